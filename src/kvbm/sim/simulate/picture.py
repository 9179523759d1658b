"""Draws hit rates against the size of the cache, a line for each policy; or times to first token, a bar a setup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbm.present.axes import FAINT, STYLE, find_pyplot, plain_axes, save_figure
from kvbm.sim.replay import optimum
from kvbm.sim.simulate.report import Curve, Document, TraceFacts
from kvbm.sim.simulate.study import BASELINE, HitRow, TimeRow, averaged, label

COLOURS = {
    "lru": "#8a8f98",
    optimum.NAME: "#22262e",
    "gittins": "#2f6fde",
}
"""A policy has its colour in every picture; `OTHER_COLOURS` are for libCacheSim's and those that packages bring."""
OTHER_COLOURS = ("#0f9d76", "#d9480f", "#9c36b5", "#e0a100", "#0b7285", "#c2255c", "#5c940d")
PANEL_IN, HEIGHT_IN, DPI = 7.4, 5.4, 150
BAR_IN, BARS_BESIDE_IN = 0.36, 1.1
"""Of a picture of bars: the height of each with its gap, and that of the margins above and below."""


def draw(document: Document, path: Path) -> bool:
    """Write a PNG, a panel for each trace. False, and no file, when matplotlib is not installed (extra `demo`)."""
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    names = list(dict.fromkeys(trace.name for trace in document.traces))
    panel = _times_panel if document.times else _hits_panel
    bars = max(
        (len(averaged([row for row in document.times if row.trace == name])) for name in names), default=0
    )
    height_in = max(HEIGHT_IN, BARS_BESIDE_IN + BAR_IN * bars)
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            1,
            len(names),
            figsize=(PANEL_IN * len(names), height_in),
            dpi=DPI,
            facecolor="white",
            squeeze=False,
            layout="constrained",
        )
        for axes, name in zip(panels[0], names, strict=True):
            panel(axes, document, next(trace for trace in document.traces if trace.name == name))
        save_figure(figure, path)
    return True


def _hits_panel(axes: Any, document: Document, trace: TraceFacts) -> None:
    rows = averaged([row for row in document.hit_rates if row.trace == trace.name])
    note = f"dotted: all repeated blocks, {trace.repeated_rate:.1%} of {trace.accesses:,}"
    plain_axes(axes, "y", f"Hit rate: {trace.name}", note)
    axes.axhline(100 * trace.repeated_rate, color=FAINT, linewidth=0.8, linestyle=(0, (1, 3)))
    exact = next((curve for curve in document.lru_curves if curve.trace == trace.name), None)
    for policy, colour in _colours(label(row) for row in rows).items():
        points = sorted((row.blocks, row.hit_rate) for row in rows if label(row) == policy)
        _line(axes, trace, policy, colour, points, exact if policy == BASELINE else None)
    _legend(axes, {policy: max(r.hit_rate for r in rows if label(r) == policy) for policy in _policies(rows)})
    shares = {100 * row.blocks / trace.unique_blocks: row for row in rows}
    axes.set_xscale("log")
    axes.set_xlim(min(shares) / 1.25, max(shares) * 1.25)
    axes.set_xticks(list(shares), [_tick(row, share, trace) for share, row in shares.items()])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g} %")
    axes.set_xlabel("size of the cache (100 %: all different blocks)")


def _line(
    axes: Any,
    trace: TraceFacts,
    policy: str,
    colour: str,
    points: Sequence[tuple[int, float]],
    exact: Curve | None,
) -> None:
    """One policy's line and points. LRU is known at all sizes, so its line is exact between the points too."""
    style = {"color": colour, "marker": "o", "markersize": 4.5, "linewidth": 2.0, "zorder": 3}
    if policy == optimum.NAME:
        style |= {"linestyle": (0, (4, 2)), "marker": "D", "markersize": 3.5, "linewidth": 1.4}
    elif exact is not None:
        axes.plot(*_percent(trace, exact.points), color=colour, linewidth=1.4, zorder=1)
        axes.plot(*_percent(trace, points), **style | {"linestyle": "none", "zorder": 2})
        points = []  # the legend shows the two together
    axes.plot(*_percent(trace, points), label=policy, **style)


def _percent(trace: TraceFacts, points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    shares = [100 * blocks / trace.unique_blocks for blocks, _ in points]
    return shares, [100 * rate for _, rate in points]


def _legend(axes: Any, heights: dict[str, float]) -> None:
    """Beside the lines, in the order in which they end, from above."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -heights[labels[i]])
    titles = ["belady (optimum)" if labels[i] == optimum.NAME else labels[i] for i in order]
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False, "handlelength": 2.4}
    axes.legend([handles[i] for i in order], titles, **place)


def _tick(row: HitRow, share: float, trace: TraceFacts) -> str:
    if not row.size.endswith("%"):
        return f"{row.size}\n{share:.2g} %"
    gigabytes = row.blocks * trace.block_bytes / 1e9 if trace.block_bytes else None
    return row.size if gigabytes is None else f"{row.size}\n{gigabytes:,.0f} GB"


def _times_panel(axes: Any, document: Document, trace: TraceFacts) -> None:
    """Bars of the times to first token: the median over the 90th percentile."""
    rows = averaged([row for row in document.times if row.trace == trace.name])
    note = "seconds: median (dark), 90th percentile (pale); share of blocks loaded"
    plain_axes(axes, "x", f"Time to first token: {trace.name}", note)
    colours = _colours(label(row) for row in rows if label(row))
    for place, row in enumerate(rows):
        colour = colours.get(label(row), FAINT)
        axes.barh(place, row.ttft_p90_s, height=0.6, color=colour, alpha=0.25)
        axes.barh(place, row.ttft_p50_s, height=0.6, color=colour)
        hits = f"   {row.host_hit_rate + row.disk_hit_rate:.0%}" if label(row) else ""
        axes.text(
            row.ttft_p90_s, place, f"  {row.ttft_p50_s:,.2f} / {row.ttft_p90_s:,.2f}{hits}", va="center"
        )
    axes.set_yticks(range(len(rows)), [_setup_words(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max(row.ttft_p90_s for row in rows))


def _setup_words(row: TimeRow) -> str:
    return " · ".join(part for part in (label(row), row.host, row.disk) if part) or "no cache"


def _policies(rows: Sequence[HitRow]) -> list[str]:
    return list(dict.fromkeys(label(row) for row in rows))


def _colours(policies: Iterable[str]) -> dict[str, str]:
    """Policy to colour, in the order given."""
    known = list(dict.fromkeys(policies))
    others = [policy for policy in known if policy not in COLOURS]
    spare = {policy: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, policy in enumerate(others)}
    return {policy: COLOURS.get(policy) or spare[policy] for policy in known}
