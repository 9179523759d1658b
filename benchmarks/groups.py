"""What a hybrid model's host memory holds: hit rates by size, groups against keeping all blocks of all layers.

python -m benchmarks.groups [--trace FILE,…] [--model gemma-3-27b] [--sizes 100GB,200GB,…] [--output DIR]

The traces are replayed through the manager's own policies, twice at each size: once as KVBM keeps the model (all blocks
of full attention, of the windows and states what a boundary needs), and once as a cache keeps it that knows one kind of
block (all layers of every token). Both get the same bytes; padding of groups counts. Needs no GPU and no engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from kvbm.present.axes import FAINT, STYLE, find_pyplot, plain_axes, save_figure
from kvbm.present.numbers import format_bytes
from kvbm.present.tables import console, plain_table, save_json
from kvbm.settings.parse import parse_size
from kvbm.sim.serving.hybrid import MODELS, HybridModel
from kvbm.sim.simulate.picture import COLOURS
from kvbm.sim.simulate.simulation import open_trace
from kvbm.sim.simulate.study import run_policy
from kvbm.sim.traces.formats import ReadOptions
from kvbm.sim.traces.trace import Trace

GROUPS, EVERYTHING = "groups", "everything"
DEFAULT_SIZES = "1%,2%,5%,10%,20%"
"""Shares of what all layers of all different blocks take."""


def rows(trace: Trace, model: HybridModel, policies: list[str], sizes: str) -> list[dict[str, Any]]:
    """Hit rates of both ways to keep the model, for each size and policy."""
    slots = model.slots(trace.block_tokens)
    all_bytes = trace.unique_blocks * slots.everything_bytes
    found: list[dict[str, Any]] = []
    for word in sizes.split(","):
        share = float(word[:-1]) / 100.0 if word.endswith("%") else None
        size = int(all_bytes * share) if share is not None else parse_size("--sizes", word)
        for policy in policies:
            for kept, each_bytes, grouped in (
                (EVERYTHING, slots.everything_bytes, None),
                (GROUPS, slots.slot_bytes, slots),
            ):
                replayed = run_policy(trace, policy, size // each_bytes, lambda requests: None, grouped)
                row = {"trace": trace.name, "policy": policy, "kept": kept, "bytes": size}
                found.append(row | {"share": size / all_bytes, "hit_rate": replayed.hit_rate})
    return found


def bytes_for(hit_rate: float, points: list[tuple[int, float]]) -> float | None:
    """The size at which a line through (bytes, hit rate) reaches this rate; None where it does not."""
    before = (0, 0.0)
    for size, rate in sorted(points):
        if rate >= hit_rate:
            return before[0] + (size - before[0]) * (hit_rate - before[1]) / (rate - before[1])
        before = (size, max(rate, before[1]))
    return None


def points_of(found: list[dict[str, Any]], policy: str, kept: str) -> list[tuple[int, float]]:
    """(bytes, hit rate) of one line, by size."""
    return sorted(
        (row["bytes"], row["hit_rate"]) for row in found if (row["policy"], row["kept"]) == (policy, kept)
    )


def render(trace: Trace, model: HybridModel, found: list[dict[str, Any]]) -> Table:
    """Hit rates beside one another, hits of a byte, and the memory that keeping everything takes for as many hits."""
    title = (
        f"{trace.name}, {model.name}: no cache can hit more than {1 - trace.unique_blocks / trace.accesses:.1%}; "
        f"everything takes {format_bytes(trace.unique_blocks * model.slots(trace.block_tokens).everything_bytes)}"
    )
    columns = ("host memory", "of all", "policy", EVERYTHING, GROUPS, "hits a GB", "memory for as many hits")
    table = plain_table(columns, words={"policy", "memory for as many hits"}, title=title)
    for row in found:
        if row["kept"] != GROUPS:
            continue
        whole = dict(points_of(found, row["policy"], EVERYTHING))[row["bytes"]]
        needed = bytes_for(row["hit_rate"], points_of(found, row["policy"], EVERYTHING))
        least = max(row["bytes"] for row in found)
        more = f"{needed / row['bytes']:.1f} ×" if needed else f"more than {least / row['bytes']:.1f} ×"
        table.add_row(
            format_bytes(row["bytes"]),
            f"{row['share']:.1%}",
            row["policy"],
            f"{whole:.2%}",
            f"{row['hit_rate']:.2%}",
            f"{row['hit_rate'] / whole:.2f} ×" if whole else "-",
            more,
        )
    return table


def draw(traces: list[Trace], model: HybridModel, found: list[dict[str, Any]], path: Path) -> bool:
    """A panel for each trace. False, and no file, without matplotlib."""
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            1, len(traces), figsize=(7.0 * len(traces), 5.2), dpi=150, squeeze=False, layout="constrained"
        )
        for axes, trace in zip(panels[0], traces, strict=True):
            mine = [row for row in found if row["trace"] == trace.name]
            most = 1 - trace.unique_blocks / trace.accesses
            note = f"{model.name}; dotted: all repeated blocks, {most:.1%}"
            plain_axes(axes, "y", f"Hits by host memory: {trace.name}", note)
            axes.axhline(100 * most, color=FAINT, linewidth=0.8, linestyle=(0, (1, 3)))
            for policy in dict.fromkeys(row["policy"] for row in mine):
                for kept, style in ((GROUPS, "-"), (EVERYTHING, (0, (4, 2)))):
                    points = points_of(mine, policy, kept)
                    axes.plot(
                        [size / 1e9 for size, _ in points],
                        [100 * rate for _, rate in points],
                        color=COLOURS.get(policy, FAINT),
                        linestyle=style,
                        marker="o",
                        markersize=4,
                        label=f"{policy}, {'needed blocks' if kept == GROUPS else 'all blocks'}",
                    )
            axes.set_xscale("log")
            sizes = sorted({row["bytes"] / 1e9 for row in mine})
            axes.set_xticks(sizes, [f"{size:,.0f} GB" for size in sizes])
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g} %")
            axes.set_ylim(bottom=0)
            axes.set_xlabel("host memory")
            axes.legend(frameon=False, loc="best")
        save_figure(figure, path)
    return True


def main() -> int:
    """Replay, print a table for each trace, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="synthetic", help="comma-separated, as kvbm simulate reads them")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="tokens of a block")
    parser.add_argument("--model", default="gemma-3-27b", choices=tuple(MODELS))
    parser.add_argument("--policy", default="lru,gittins")
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help="shares of everything, or bytes")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where JSON and picture go")
    options = parser.parse_args()
    model = MODELS[options.model]
    options.output.mkdir(parents=True, exist_ok=True)
    traces = [
        open_trace(word, ReadOptions(chunk_tokens=options.chunk_tokens)) for word in options.trace.split(",")
    ]
    found: list[dict[str, Any]] = []
    for trace in traces:
        mine = rows(trace, model, options.policy.split(","), options.sizes)
        console().print(render(trace, model, mine))
        found += mine
    save_json({"model": model.name, "rows": found}, options.output / "groups.json")
    draw(traces, model, found, options.output / "groups.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
