"""Draws the results: when the first token came, how long it took, and where the tokens came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbm.demo.counters import TIERS
from kvbm.demo.report import Results, Run, prompt_tokens, speedup, ttfts_s
from kvbm.present.axes import FAINT, INK, STYLE, find_pyplot, grid_only, save_figure
from kvbm.present.numbers import quantile

RUN_COLOURS = ("#8a8f98", "#2f6fde", "#0f9d76")
TIER_COLOURS = {"computed": "#d5d8dd", "device": "#f2b134", "host": "#2f6fde", "disk": "#0f9d76"}
WIDTH_IN, HEIGHT_IN, DPI = 13.0, 7.2, 150
LEFT, RIGHT = 0.055, 0.975


def draw(results: Results, path: Path) -> bool:
    """Write a PNG. False, and no file, when matplotlib is not installed (it comes with the `demo` extra)."""
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    with pyplot.rc_context({**STYLE, "axes.titlesize": 11, "axes.titlepad": 10}):
        figure = pyplot.figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor="white")
        _headline(figure, results)
        _draw_requests(figure.add_axes((LEFT, 0.515, RIGHT - LEFT, 0.315)), results)
        _draw_percentiles(figure.add_axes((LEFT + 0.055, 0.135, 0.355, 0.235)), results)
        _draw_sources(figure.add_axes((0.605, 0.135, RIGHT - 0.605, 0.235)), results)
        _footer(figure, results)
        save_figure(figure, path)
    return True


def _headline(figure: Any, results: Results) -> None:
    gains = ", ".join(f"{speedup(results, run):.1f}× with {_short(run)}" for run in results.runs[1:])
    figure.text(LEFT, 0.945, "The same long prefix, asked again", fontsize=17, fontweight="bold")
    figure.text(
        LEFT, 0.905, f"First token sooner by {gains} (median, prefix seen before)", fontsize=11, color=FAINT
    )


def _footer(figure: Any, results: Results) -> None:
    facts = {**results.machine, **results.settings}
    first = f"{facts.get('machine', '')} · {facts.get('device', '')} · {facts.get('software', '')}"
    second = f"{facts.get('model', '')} · {facts.get('dtype', '')} · {facts.get('load', '')}"
    figure.text(LEFT, 0.045, first, fontsize=8, color=FAINT)
    figure.text(LEFT, 0.02, second, fontsize=8, color=FAINT)


def _draw_requests(axes: Any, results: Results) -> None:
    """Every request: its time to first token, per run. Hollow: the prefix was new."""
    grid_only(axes, "y", "left")
    for run, colour in zip(results.runs, RUN_COLOURS, strict=False):
        numbers = range(1, len(run.requests) + 1)
        values = [request.ttft_s * 1e3 for request in run.requests]
        axes.plot(numbers, values, color=colour, linewidth=1.1, alpha=0.55, zorder=2)
        fills = [colour if request.seen else "white" for request in run.requests]
        axes.scatter(
            numbers,
            values,
            s=34,
            facecolors=fills,
            edgecolors=colour,
            linewidths=1.4,
            zorder=3,
            clip_on=False,
        )
        axes.plot([], [], color=colour, marker="o", markersize=6, linewidth=1.1, label=run.title)
    hollow = {"marker": "o", "markersize": 6, "markerfacecolor": "white", "linewidth": 0}
    axes.plot([], [], color=FAINT, label="prefix is new", **hollow)
    axes.set_title("Time to first token of every request, ms")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0.3, len(results.runs[0].requests) + 0.7)
    axes.set_xlabel("request")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), ncols=4, frameon=False, fontsize=9)


def _draw_percentiles(axes: Any, results: Results) -> None:
    grid_only(axes, "x", "bottom")
    for row, (run, colour) in enumerate(zip(results.runs, RUN_COLOURS, strict=False)):
        values = ttfts_s(run, seen_only=True)
        p50, p95 = (quantile(values, fraction) * 1e3 for fraction in (0.5, 0.95))
        axes.barh(row, p95, height=0.5, color=colour, alpha=0.25)
        axes.barh(row, p50, height=0.5, color=colour)
        axes.text(p95, row, f"  {p50:,.0f} / {p95:,.0f}", va="center", fontsize=9)
    _rows(axes, results)
    axes.set_xlim(0, 1.22 * max(quantile(ttfts_s(run, seen_only=True), 0.95) for run in results.runs) * 1e3)
    axes.set_title("Prefix seen before: p50 (solid) / p95, ms", pad=28)


def _draw_sources(axes: Any, results: Results) -> None:
    """Prompt tokens by where their KV came from."""
    grid_only(axes, "x", "bottom")
    for row, run in enumerate(results.runs):
        parts = {tier: run.hit_tokens.get(tier, 0) for tier in TIERS}
        total = max(prompt_tokens(run), 1)
        left = 0.0
        for source, tokens in {**parts, "computed": max(total - sum(parts.values()), 0)}.items():
            share = 100 * tokens / total
            axes.barh(row, share, left=left, height=0.5, color=TIER_COLOURS[source])
            if share >= 6:
                ink = INK if source in ("computed", "device") else "white"
                axes.text(
                    left + share / 2, row, f"{share:.0f}", ha="center", va="center", fontsize=9, color=ink
                )
            left += share
    _rows(axes, results)
    axes.set_xlim(0, 100)
    axes.set_title("Where prompt tokens came from, %", pad=28)
    for source, colour in TIER_COLOURS.items():
        axes.bar(0, 0, color=colour, label=source)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=4, frameon=False, fontsize=9, handlelength=1.0
    )


def _rows(axes: Any, results: Results) -> None:
    axes.set_yticks(range(len(results.runs)), [run.title.replace(": ", ":\n") for run in results.runs])
    axes.set_ylim(len(results.runs) - 0.45, -0.55)


def _short(run: Run) -> str:
    return {"host": "host memory", "disk": "less of it and a disk"}.get(run.name, run.title)
