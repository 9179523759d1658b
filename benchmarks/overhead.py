"""What storing everything costs a workload that never hits: prompts that are all new, with KVBM and without.

Engines take turns, plain and KVBM, several rounds: a slow minute of the machine falls on both. The budget is a
ratio of at most 1.02 between the medians. Run it from the checkout:

    python -m benchmarks.overhead [--tokens 8000] [--prompts 4] [--rounds 3] [--size windows]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from benchmarks.engine import (
    BLOCK_TOKENS,
    Engine,
    PromptKv,
    add_engine_arguments,
    end_with_children,
    in_own_process,
    passed_on,
    prompt,
    prompt_kv,
)
from benchmarks.ttft import COLD_PROMPTS, scenario
from kvbm.present.tables import plain_table, save_json
from kvbm.testing.tiny_model import SHAPES, Size, make_model

BUDGET = 1.02
SIDES = ("plain", "kvbm-host", "kvbm-disk")


def measure(model: str, side: str, options: argparse.Namespace, kv: PromptKv, scratch: Path) -> list[float]:
    """Seconds of one engine for each of several new prompts; a first one warms up and does not count.

    Raises RuntimeError when a prompt hit anything.
    """
    roomy, tight = kv.stored_blocks * (COLD_PROMPTS + 2), kv.loaded_blocks + 2
    chosen = scenario(side, roomy, tight, kv.block_bytes, scratch)
    groups = SHAPES[cast("Size", options.size)].groups
    times: list[float] = []
    with Engine(model, chosen, prompt_tokens=options.tokens, dtype=options.dtype, groups=groups) as engine:
        for number in range(options.prompts + 1):
            # No wait between prompts: stores of one prompt overlap the next, as under load.
            seconds, found = engine.first_token_s(prompt(1000 * options.round + number, options.tokens))
            if found > BLOCK_TOKENS:
                raise RuntimeError(f"{side}: {found} tokens of a new prompt were cached")
            times.append(seconds)
    return times[1:]


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    end_with_children()
    console = Console(stderr=True)
    size = cast("Size", options.size)
    kv = prompt_kv(size, options.dtype, options.tokens)
    options.output.mkdir(parents=True, exist_ok=True)
    model = str(
        make_model(options.output.absolute() / "models" / f"{size}-{options.dtype}", size, options.dtype)
    )
    if options.side:
        with tempfile.TemporaryDirectory(prefix="overhead-", dir=options.output.absolute()) as scratch:
            times = measure(model, options.side, options, kv, Path(scratch))
        Path(options.result).write_text(json.dumps(times))
        return 0
    sides = SIDES if options.disk else SIDES[:2]
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds):
        # The order turns round by round, so that neither side always runs on the warmer machine.
        for side in sides if number % 2 == 0 else reversed(sides):
            chosen = {"tokens": options.tokens, "prompts": options.prompts, "side": side, "round": number}
            times = in_own_process("benchmarks.overhead", passed_on(options, **chosen), options.timeout)
            measured[side] += times
            console.print(f"round {number + 1}, {side}: {', '.join(f'{seconds:.3f}' for seconds in times)} s")
    rows = summarise(measured)
    save_json({"rows": rows, "times_s": measured}, options.output / "overhead.json")
    Console().print(render(rows))
    return 0


def summarise(measured: dict[str, list[float]]) -> list[dict[str, float | str]]:
    """One row per engine: median and best, and the median's ratio to that of the plain engine."""
    plain_s = statistics.median(measured["plain"])
    return [
        {
            "what": side,
            "measured_s": statistics.median(times),
            "best_s": min(times),
            "ratio": statistics.median(times) / plain_s,
            "ratio_of_bests": min(times) / min(measured["plain"]),
        }
        for side, times in measured.items()
    ]


def render(rows: list[dict[str, float | str]]) -> Table:
    """The table; the budget is on the ratio."""
    columns = ("what", "budget", "measured", "best", "ratio", "ratio of bests")
    title = "No hit, everything stored: seconds per prompt"
    table = plain_table(columns, words={"what"}, title=title)
    for row in rows:
        budget = "–" if row["what"] == "plain" else f"≤ {BUDGET} ×"
        times = (f"{row['measured_s']:.3f}", f"{row['best_s']:.3f}")
        table.add_row(str(row["what"]), budget, *times, f"{row['ratio']:.3f}", f"{row['ratio_of_bests']:.3f}")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser, hybrid=True)
    parser.add_argument("--tokens", type=int, default=8000, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=4, help="measured prompts per engine")
    parser.add_argument("--rounds", type=int, default=3, help="how often the engines take turns")
    parser.add_argument(
        "--disk",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also with little host memory and a disk",
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
