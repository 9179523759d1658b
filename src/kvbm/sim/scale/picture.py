"""Draws the rows of a `ScaleStudy`: hits, times and network by nodes, a line for each router and remote tier.

Where there is one number of nodes and several loads, by load; where there are several of both, each load has its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbm.present.axes import STYLE, find_pyplot, plain_axes, save_figure
from kvbm.sim.scale.study import ScaleRow

COLOURS = {
    ("random", "private"): "#c2255c",
    ("random", "shared"): "#e0a100",
    ("kv", "private"): "#2f6fde",
    ("kv", "shared"): "#0f9d76",
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))
"""A kind of line for each load, where there are several."""
OTHER_COLOURS = ("#8a8f98", "#9c36b5", "#0b7285", "#5c940d", "#d9480f", "#22262e")


Line = tuple[str, str, float | None]
"""Router, remote tier, and the load where it tells lines apart."""


def draw(rows: Sequence[ScaleRow], path: Path) -> bool:
    """Write a PNG: hits and times by nodes. False, and no file, when matplotlib is not installed (extra `demo`)."""
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    from matplotlib import ticker

    with pyplot.rc_context(STYLE):
        figure, (hits, times, network) = pyplot.subplots(
            1, 3, figsize=(16, 4.8), dpi=150, facecolor="white", layout="constrained"
        )
        _panel(hits, rows, "Blocks that hit", "host memory and remote tier, dotted: on paper", _hits)
        _panel(times, rows, "Time to first token, p99", "seconds", lambda row: row.ttft_p99_s)
        _panel(network, rows, "Read from the remote tier", "GB/s, mean node", _read)
        colours, across = _colours(rows), _across(rows)
        for line in _series(rows):
            points = [(across(row), 100 * row.paper_all) for row in _of(line, rows)]
            hits.plot(
                *zip(*points, strict=True), color=colours[line[:2]], linewidth=1.2, linestyle=(0, (1, 2))
            )
        hits.yaxis.set_major_formatter(lambda rate, _: f"{rate:g} %")
        times.set_yscale("log")
        times.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        times.yaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
        times.yaxis.set_minor_locator(ticker.NullLocator())
        times.set_ylim(
            max(min(row.ttft_p99_s for row in rows), 1e-3) / 2,
            max(*(row.ttft_p99_s for row in rows), 1e-2) * 2,
        )
        for axes in (hits, network):
            axes.set_ylim(bottom=0)
        handles, labels = hits.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3.4)
        save_figure(figure, path)
    return True


def _hits(row: ScaleRow) -> float:
    return 100 * row.hit_rate


def _read(row: ScaleRow) -> float:
    return row.read_bytes_per_s / 1e9


def _panel(
    axes: Any, rows: Sequence[ScaleRow], title: str, note: str, value: Callable[[ScaleRow], float]
) -> None:
    plain_axes(axes, "y", title, note)
    colours, across = _colours(rows), _across(rows)
    loads = list(dict.fromkeys(line[2] for line in _series(rows)))
    for line in _series(rows):
        router, remote, load = line
        points = [(across(row), value(row)) for row in _of(line, rows)]
        name = f"{router}, {remote} remote tier" if remote != "none" else router
        axes.plot(
            *zip(*points, strict=True),
            color=colours[router, remote],
            linestyle=DASHES[loads.index(load) % len(DASHES)],
            marker="o",
            markersize=4.5,
            linewidth=2.0,
            label=name if load is None else f"{name}, load {load:g}",
        )
    places = sorted({across(row) for row in rows})
    if not _by_load(rows):
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,g}" for place in places])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("load" if _by_load(rows) else "nodes")


def _by_load(rows: Sequence[ScaleRow]) -> bool:
    return len({row.nodes for row in rows}) == 1 < len({row.wanted_load for row in rows})


def _across(rows: Sequence[ScaleRow]) -> Callable[[ScaleRow], float]:
    """The place of a row from left to right."""
    return (lambda row: row.wanted_load) if _by_load(rows) else (lambda row: row.nodes)


def _series(rows: Sequence[ScaleRow]) -> list[Line]:
    by_load = len({row.wanted_load for row in rows}) > 1 and not _by_load(rows)
    return list(dict.fromkeys((row.router, row.remote, row.wanted_load if by_load else None) for row in rows))


def _of(line: Line, rows: Sequence[ScaleRow]) -> list[ScaleRow]:
    return [
        row for row in rows if (row.router, row.remote) == line[:2] and line[2] in (None, row.wanted_load)
    ]


def _colours(rows: Sequence[ScaleRow]) -> dict[tuple[str, str], str]:
    kinds = list(dict.fromkeys((row.router, row.remote) for row in rows))
    spare = iter(OTHER_COLOURS * len(kinds))
    return {kind: COLOURS[kind] if kind in COLOURS else next(spare) for kind in kinds}
