"""Draws the answers of `kvbm plan`: what each cost buys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm.present.axes import FAINT, INK, STYLE, find_pyplot, plain_axes, save_figure
from kvbm.sim.plan.cheapest import DOLLARS, Candidate
from kvbm.sim.plan.planning import Answer, Answers, words_of
from kvbm.sim.plan.report import ALONE, BOTH, kinds, money, target_words
from kvbm.sim.simulate.picture import DPI, HEIGHT_IN, PANEL_IN

COLOURS = {ALONE: "#d9480f", BOTH: "#2f6fde"}


def draw(answers: Answers, path: Path) -> bool:
    """Write a PNG: what each cost buys, a panel for each trace. False, and no file, without matplotlib."""
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    panels = len(answers.plans)
    with pyplot.rc_context(STYLE):
        size_in = (PANEL_IN * panels, HEIGHT_IN)
        figure, grid = pyplot.subplots(
            1, panels, figsize=size_in, dpi=DPI, squeeze=False, layout="constrained"
        )
        for axes, answer in zip(grid[0], answers.plans, strict=True):
            _panel(axes, answer)
        save_figure(figure, path)
    return True


def _panel(axes: Any, answer: Answer) -> None:
    timed = answer.target.most_s is not None
    how = (
        "line: LRU at every size, exactly"
        if answer.lru_curve
        else "every dot is a replay; the lines join the best"
    )
    note = "prices are assumed; " + how if answer.prices.assumed else how
    plain_axes(axes, "both", f"{answer.trace.name}: {target_words(answer)}", note)
    for kind, rows in kinds(answer, everything=True).items():
        cached = [row for row in rows if row.host_bytes]
        axes.scatter(*_xy(answer, cached), s=16, color=COLOURS[kind], alpha=0.4, linewidths=0)
        best = [row for row in kinds(answer, everything=False)[kind] if row.host_bytes]
        line = _exact(answer, kind, cached) if answer.lru_curve and cached else _xy(answer, best)
        label = "disk alone" if cached and cached[0].staged else kind
        axes.plot(*line, color=COLOURS[kind], linewidth=1.8, label=label)
    level = answer.target.most_s if timed else 100 * (answer.target.least_hit_rate or 0.0)
    axes.axhline(level, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="target")
    if timed:
        without = next(row for row in answer.candidates if not row.host_bytes)
        axes.axhline(
            answer.target.measure(without),
            color=FAINT,
            linewidth=1.0,
            linestyle=(0, (1, 3)),
            label="no cache",
        )
    _mark_chosen(axes, answer)
    axes.set_xscale("log", subs=())
    axes.xaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
    axes.xaxis.set_major_formatter(lambda cost, _: f"{cost:,g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost, $ a month" if answer.prices.unit == DOLLARS else f"cost, {answer.prices.unit}")
    axes.set_ylabel(f"TTFT, {answer.target.statistic}, seconds" if timed else "hit rate, %")
    place = "upper right" if timed else "lower right"
    axes.legend(loc=place, facecolor="white", edgecolor="white", framealpha=1.0)


def _exact(answer: Answer, kind: str, rows: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    """The curve of LRU over the sizes of the rows, which differ in one tier only."""
    block_bytes = answer.trace.block_bytes or 0
    largest = max(row.disk_bytes or row.host_bytes for row in rows)
    smallest = min(row.disk_bytes or row.host_bytes for row in rows)
    sizes = [(blocks * block_bytes, 100 * rate) for blocks, rate in answer.lru_curve]
    kept = [(size, rate) for size, rate in sizes if smallest <= size <= largest]
    points = [(size, 0) if kind == ALONE else (rows[0].host_bytes, size) for size, _ in kept]
    return [answer.prices.cost(point) for point in points], [rate for _, rate in kept]


def _mark_chosen(axes: Any, answer: Answer) -> None:
    chosen = answer.chosen
    if chosen is None or not chosen.host_bytes:
        text = "no size meets the target" if chosen is None else "met without a cache"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=INK, weight="bold")
        return
    timed = answer.target.most_s is not None
    (x,), (y,) = _xy(answer, [chosen])
    axes.plot([x], [y], marker="*", markersize=16, color=INK, linestyle="none", zorder=5)
    axes.annotate(
        f"{words_of(chosen)}\n{money(chosen.cost, answer.prices)}",
        (x, y),
        # Below the curve, which falls with times and rises with hit rates.
        xytext=(10, -42) if timed else (14, -38),
        textcoords="offset points",
        ha="right" if timed else "left",
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2},
        zorder=6,
    )


def _xy(answer: Answer, rows: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    scale = 1.0 if answer.target.most_s is not None else 100.0
    return [row.cost for row in rows], [scale * answer.target.measure(row) for row in rows]
