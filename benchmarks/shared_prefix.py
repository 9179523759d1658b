"""Many requests at once that share one long prefix, which the device has evicted: seconds until all are answered.

Every engine has room for all requests on its device. The prefix lies in the tier that the row names, or nowhere
(`plain`). Engines take turns, each in a process of its own; medians over all turns count:

    python -m benchmarks.shared_prefix [--requests 16] [--tokens 4000] [--only plain,kvbm-host,native-host] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from benchmarks.engine import (
    BLOCK_TOKENS,
    Engine,
    Scenario,
    add_engine_arguments,
    end_with_children,
    in_own_process,
    passed_on,
    prompt,
)
from benchmarks.ttft import SCENARIOS, TITLES, WIDTH, scenario
from kvbm.present.tables import plain_table, save_json
from kvbm.testing.tiny_model import SHAPES, Size, make_model

PREFIXES = 2
TAIL_TOKENS = 24
BUDGETS = {"kvbm-host": 1.0, "kvbm-disk": 1.2}
"""Against vLLM's own offloading from host memory."""


def measure(model: str, chosen: Scenario, options: argparse.Namespace) -> list[float]:
    """Seconds of each crowd of one engine; a first one for each prefix warms up and does not count.

    The prefixes take turns: above a disk, each has pushed the other out of the small host memory. Raises RuntimeError
    when a crowd was not served from the tier.
    """
    times: list[float] = []
    least = 0.9 * (options.tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    with Engine(
        model,
        chosen,
        prompt_tokens=options.tokens + TAIL_TOKENS,
        dtype=options.dtype,
        requests=options.requests,
    ) as engine:
        for number in range(PREFIXES):
            engine.first_token_s(prompt(number, options.tokens))
            engine.wait_until_stored()
        for turn in range(options.repeats + PREFIXES):
            shared = prompt(turn % PREFIXES, options.tokens)
            tails = [prompt(1000 + turn * options.requests + i, TAIL_TOKENS) for i in range(options.requests)]
            engine.reset_device()
            before = _hit_tokens(engine)
            seconds = engine.all_answered_s([shared + tail for tail in tails])
            found = _hit_tokens(engine) - before
            if chosen.tier and found < least:
                raise RuntimeError(f"{chosen.name}: {found} of {options.tokens} tokens from its tiers")
            if turn >= PREFIXES:
                times.append(seconds)
            engine.wait_until_stored()
    return times


def _hit_tokens(engine: Engine) -> int:
    """Host memory above a disk keeps a few blocks of the other prefix."""
    return engine.hit_tokens("host") + engine.hit_tokens("disk")


def summarise(measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per engine: median, best and worst, and the median against that of vLLM's own host tier."""
    peer = measured.get("native-host")
    return [
        {
            "scenario": name,
            "median_s": statistics.median(times),
            "best_s": min(times),
            "worst_s": max(times),
            "ratio": statistics.median(times) / statistics.median(peer) if peer else None,
        }
        for name, times in measured.items()
    ]


def render(rows: list[dict[str, Any]], title: str) -> Table:
    """The table; the budget is on the ratio."""
    columns = ("engine", "budget", "all answered, s", "best", "worst", "× vLLM's own")
    table = plain_table(columns, words={"engine"}, title=title)
    for row in rows:
        budget = BUDGETS.get(row["scenario"])
        times = [f"{row[key]:.3f}" for key in ("median_s", "best_s", "worst_s")]
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(TITLES[row["scenario"]], f"≤ {budget} ×" if budget else "–", *times, ratio)
    return table


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    end_with_children()
    console = Console(stderr=True)
    size = cast("Size", options.size)
    block_bytes = SHAPES[size].kv_bytes_per_token(options.dtype) * BLOCK_TOKENS
    options.output.mkdir(parents=True, exist_ok=True)
    model = str(
        make_model(options.output.absolute() / "models" / f"{size}-{options.dtype}", size, options.dtype)
    )
    if options.scenario:
        blocks = options.tokens // BLOCK_TOKENS
        with tempfile.TemporaryDirectory(prefix="shared-prefix-", dir=options.output.absolute()) as scratch:
            # Host memory above a disk holds one prefix and no more.
            sizes = blocks * (PREFIXES + 2) + options.requests, blocks + 2
            chosen = scenario(options.scenario, *sizes, block_bytes, Path(scratch))
            Path(options.result).write_text(json.dumps(measure(model, chosen, options)))
        return 0
    measured: dict[str, list[float]] = {name: [] for name in options.only}
    for number in range(options.rounds):
        for name in options.only if number % 2 == 0 else reversed(options.only):
            arguments = {key: getattr(options, key) for key in ("requests", "tokens", "repeats")}
            times = in_own_process(
                "benchmarks.shared_prefix", passed_on(options, **arguments, scenario=name), options.timeout
            )
            measured[name] += times
            console.print(f"round {number + 1}, {name}: {', '.join(f'{seconds:.3f}' for seconds in times)} s")
    rows = summarise(measured)
    save_json({"rows": rows, "times_s": measured}, options.output / "shared-prefix.json")
    title = f"{options.requests} requests share an evicted prefix of {options.tokens:,} tokens"
    Console(width=max(WIDTH, Console().width)).print(render(rows, title))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--requests", type=int, default=16, help="that come together")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prefix that they share")
    parser.add_argument("--repeats", type=int, default=2, help="measured crowds of one engine")
    parser.add_argument("--rounds", type=int, default=5, help="how often the engines take turns")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(name for name in SCENARIOS if name in text.split(",")),
        default=("plain", "kvbm-host", "kvbm-disk", "native-host"),
        help="comma-separated: " + ", ".join(SCENARIOS),
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
