"""The speed of the simulator: blocks asked for in a second, by policy and size, against LRU in the same run.

python -m benchmarks.simulator [--trace FILE] [--policies lru,gittins] [--sizes 1%,5%,20%]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from kvbm.present.tables import console, plain_table, save_json
from kvbm.sim.replay.curves import lru_curve
from kvbm.sim.simulate.simulation import parse_policies
from kvbm.sim.simulate.sizes import parse_sizes
from kvbm.sim.simulate.study import BASELINE, run_policy
from kvbm.sim.traces.formats import ReadOptions, read_trace
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace

BUDGETS_PER_S = {BASELINE: 0.75e6, "gittins": 150e3}
"""Blocks a second that a replay must manage on one core."""
SHAPE = ChatShape(conversations=1500)


def best_s(trace: Trace, policies: list[str], capacity: int, rounds: int) -> dict[str, float]:
    """The shortest replay of each policy; they take turns, so that all meet the same machine."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for policy in policies:
            started = time.perf_counter()
            run_policy(trace, policy, capacity, lambda requests: None)
            seconds = time.perf_counter() - started
            best[policy] = min(best.get(policy, seconds), seconds)
    return best


def rows(
    trace: Trace, policies: list[str], sizes: list[tuple[str, int]], rounds: int
) -> list[dict[str, Any]]:
    """Blocks a second, and how many times as long as LRU each takes."""
    found: list[dict[str, Any]] = []
    for text, capacity in sizes:
        best = best_s(trace, policies, capacity, rounds)
        for policy, seconds in best.items():
            found.append(
                {
                    "what": policy,
                    "size": text,
                    "blocks": capacity,
                    "budget_per_s": BUDGETS_PER_S.get(policy),
                    "accesses_per_s": trace.accesses / seconds,
                    "times_lru": seconds / best[BASELINE],
                }
            )
    started = time.perf_counter()
    lru_curve(trace)
    seconds = time.perf_counter() - started
    found.append(
        {
            "what": "LRU, all sizes at once",
            "size": "all",
            "blocks": trace.unique_blocks,
            "budget_per_s": None,
            "accesses_per_s": trace.accesses / seconds,
            "times_lru": None,
        }
    )
    return found


def render(trace: Trace, found: list[dict[str, Any]]) -> Table:
    """The table, with the budgets."""
    title = f"Replays of {trace.name}: {trace.accesses:,} blocks asked for, {trace.unique_blocks:,} different"
    columns = ("what", "size", "blocks", "budget, M/s", "M/s", "× LRU")
    table = plain_table(columns, words={"what", "size"}, title=title)
    for row in found:
        budget = f"≥ {row['budget_per_s'] / 1e6:.2f}" if row["budget_per_s"] else "–"
        times = f"{row['times_lru']:.2f}" if row["times_lru"] else "–"
        cells = (f"{row['blocks']:,}", budget, f"{row['accesses_per_s'] / 1e6:.2f}", times)
        table.add_row(row["what"], row["size"], *cells)
    return table


def main() -> int:
    """Replay by every policy and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a trace to replay instead of made-up conversations")
    parser.add_argument("--chunk-tokens", type=int, help="regroup its blocks into larger ones")
    parser.add_argument("--policies", default="all", help="comma-separated; LRU always runs")
    parser.add_argument("--sizes", default="1%,5%,20%", help="shares of all blocks")
    parser.add_argument("--rounds", type=int, default=3, help="how often the policies take turns")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.trace is None:
        trace = chats(SHAPE)
    else:
        trace = read_trace(options.trace, ReadOptions(chunk_tokens=options.chunk_tokens))
    policies = list(dict.fromkeys([BASELINE, *parse_policies(options.policies, timed=False)]))
    sizes = [(size.text, size.blocks_of(trace, None)) for size in parse_sizes("--sizes", options.sizes)]
    found = rows(trace, policies, sizes, options.rounds)
    save_json(found, options.output / "simulator.json")
    console().print(render(trace, found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
