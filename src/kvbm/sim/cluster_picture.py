"""Draws the rows of `cluster_study`: hits, times and network by nodes, a line for each router and remote tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbm.sim.cluster_study import ScaleRow
from kvbm.sim.drawing import FAINT, GRID, STYLE, find_pyplot

COLOURS = {
    ("random", "private"): "#c2255c",
    ("random", "shared"): "#e0a100",
    ("kv", "private"): "#2f6fde",
    ("kv", "shared"): "#0f9d76",
}
OTHER_COLOURS = ("#8a8f98", "#9c36b5", "#0b7285", "#5c940d", "#d9480f", "#22262e")


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
        for line in _series(rows):
            points = [(row.nodes, 100 * row.paper_all) for row in rows if (row.router, row.remote) == line]
            colour = _colours(rows)[line]
            hits.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, linestyle=(0, (1, 2)))
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
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        draft = path.with_name(f".{path.name}.tmp")
        figure.savefig(draft, format="png")
        pyplot.close(figure)
    os.replace(draft, path)
    return True


def _hits(row: ScaleRow) -> float:
    return 100 * row.hit_rate


def _read(row: ScaleRow) -> float:
    return row.read_bytes_per_s / 1e9


def _panel(
    axes: Any, rows: Sequence[ScaleRow], title: str, note: str, value: Callable[[ScaleRow], float]
) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_title(title, pad=22)
    axes.text(0.0, 1.02, note, transform=axes.transAxes, fontsize=9, color=FAINT)
    for line, colour in _colours(rows).items():
        points = [(row.nodes, value(row)) for row in rows if (row.router, row.remote) == line]
        name = f"{line[0]}, {line[1]} remote tier" if line[1] != "none" else line[0]
        axes.plot(
            *zip(*points, strict=True), color=colour, marker="o", markersize=4.5, linewidth=2.0, label=name
        )
    counts = sorted({row.nodes for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("nodes")


def _series(rows: Sequence[ScaleRow]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.router, row.remote) for row in rows))


def _colours(rows: Sequence[ScaleRow]) -> dict[tuple[str, str], str]:
    lines = _series(rows)
    spare = iter(OTHER_COLOURS * len(lines))
    return {line: COLOURS[line] if line in COLOURS else next(spare) for line in lines}
