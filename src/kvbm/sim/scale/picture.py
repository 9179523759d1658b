"""Draws the rows of a `ScaleStudy`: hits, times and network by nodes, a line for each router and remote tier.

Where there is one number of nodes and several loads, by load; where there are several of both, each load has its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbm.present.axes import STYLE, find_pyplot, plain_axes, save_figure
from kvbm.sim.scale.study import ScaleRow


def draw(rows: Sequence[ScaleRow], path: Path) -> bool:
    """Write a PNG: hits and times by nodes. False, and no file, when matplotlib is not installed (extra `demo`)."""
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    with pyplot.rc_context(STYLE):
        figure, (hits, times, network) = pyplot.subplots(
            1, 3, figsize=(16, 4.8), dpi=150, facecolor="white", layout="constrained"
        )
        _panel(
            hits, rows, "Blocks that hit", "%, host memory and remote tier", lambda row: 100 * row.hit_rate
        )
        _panel(times, rows, "Time to first token, p99", "seconds", lambda row: row.ttft_p99_s)
        _panel(
            network,
            rows,
            "Read from the remote tier",
            "GB/s, mean node",
            lambda row: row.read_bytes_per_s / 1e9,
        )
        times.set_yscale("log")
        for axes in (hits, network):
            axes.set_ylim(bottom=0)
        handles, labels = hits.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3.4)
        save_figure(figure, path)
    return True


def lines(rows: Sequence[ScaleRow]) -> dict[str, list[tuple[float, ScaleRow]]]:
    """The rows of each line by its name, each with its place from left to right."""
    several_loads = len({row.wanted_load for row in rows}) > 1
    by_load = _goes_by_load(rows)
    found: dict[str, list[tuple[float, ScaleRow]]] = {}
    for row in rows:
        name = f"{row.router}, {row.remote} remote tier" if row.remote != "none" else row.router
        if several_loads and not by_load:
            name += f", load {row.wanted_load:g}"
        found.setdefault(name, []).append((row.wanted_load if by_load else row.nodes, row))
    return found


def _goes_by_load(rows: Sequence[ScaleRow]) -> bool:
    return len({row.nodes for row in rows}) == 1 < len({row.wanted_load for row in rows})


def _panel(
    axes: Any, rows: Sequence[ScaleRow], title: str, note: str, value: Callable[[ScaleRow], float]
) -> None:
    plain_axes(axes, "y", title, note)
    for name, points in lines(rows).items():
        axes.plot(
            [place for place, _ in points],
            [value(row) for _, row in points],
            marker="o",
            markersize=4.5,
            linewidth=2.0,
            label=name,
        )
    places = sorted({place for points in lines(rows).values() for place, _ in points})
    if not _goes_by_load(rows):
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,g}" for place in places])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("load" if _goes_by_load(rows) else "nodes")
