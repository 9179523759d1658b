"""When to load: before the request, or layer by layer beside it. Conversations, in turns.

The device holds one conversation and a little; each comes back after all others, with what was said and new words.
Engines take turns, several rounds. Run it from the checkout:

    python -m benchmarks.modes [--conversations 6] [--turns 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import msgspec

from benchmarks.engine import (
    BLOCK_TOKENS,
    Engine,
    add_engine_arguments,
    end_with_children,
    in_own_process,
    passed_on,
    prompt,
)
from benchmarks.ttft import COLD_PROMPTS, scenario
from kvbm.present.tables import console, plain_table, save_json
from kvbm.testing.tiny_model import SHAPES, Size, make_model

MODES = {
    "plain": {},
    "before": {"DYN_KVBM_ONBOARD_MODE": "async"},
    "layerwise": {"DYN_KVBM_ONBOARD_MODE": "layerwise"},
}
TURN_TOKENS = 1000


def measure(
    model: str, mode: str, options: argparse.Namespace, block_bytes: int, scratch: Path
) -> dict[str, float]:
    """One engine: seconds for all turns but the first, prompt tokens that were not computed, blocks copied down."""
    longest = options.turns * TURN_TOKENS
    blocks = options.conversations * -(-longest // BLOCK_TOKENS)
    name = "plain" if mode == "plain" else "kvbm-host"
    chosen = scenario(name, blocks * (COLD_PROMPTS + 2), blocks + 2, block_bytes, scratch)
    chosen = msgspec.structs.replace(chosen, environment={**chosen.environment, **MODES[mode]})
    seconds = found = 0.0
    with Engine(model, chosen, prompt_tokens=longest, dtype=options.dtype) as engine:
        for turn in range(options.turns):
            for talk in range(options.conversations):
                words = prompt(1000 * options.round + talk, (turn + 1) * TURN_TOKENS)
                took_s, cached = engine.first_token_s(words)
                if turn:
                    seconds, found = seconds + took_s, found + cached
        engine.wait_until_stored()
        stored = sum(
            float(line.split()[-1])
            for line in engine._kvbm_metrics()
            if line.startswith("kvbm_offload_blocks_d2h")
        )
    return {"seconds": seconds, "found_tokens": found, "stored_blocks": stored}


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    end_with_children()
    size = cast("Size", options.size)
    block_bytes = SHAPES[size].kv_bytes_per_token(options.dtype) * BLOCK_TOKENS
    options.output.mkdir(parents=True, exist_ok=True)
    directory = options.output.absolute() / "models" / f"{size}-{options.dtype}"
    model = str(make_model(directory, size, options.dtype))
    if options.mode:
        with tempfile.TemporaryDirectory(prefix="modes-", dir=options.output.absolute()) as scratch:
            result = measure(model, options.mode, options, block_bytes, Path(scratch))
        Path(options.result).write_text(json.dumps(result))
        return 0
    measured: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(options.rounds):
        # The order turns round by round, so that no mode always runs on the warmer machine.
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            chosen = {
                "conversations": options.conversations,
                "turns": options.turns,
                "mode": mode,
                "round": number,
            }
            measured[mode].append(
                in_own_process("benchmarks.modes", passed_on(options, **chosen), options.timeout)
            )
            print(f"round {number + 1}, {mode}: {measured[mode][-1]}", file=sys.stderr)
    rows = [summarise(mode, runs, measured["plain"]) for mode, runs in measured.items()]
    save_json({"rows": rows, "runs": measured}, options.output / "modes.json")
    columns = [column.replace("_", " ") for column in rows[0]]
    title = "Conversations that return: all turns but the first"
    table = plain_table(columns, words={"mode"}, title=title)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console().print(table)
    return 0


def summarise(mode: str, runs: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    """One row: medians, and the ratio of the median time to that of the engine without KVBM."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    plain_s = statistics.median(run["seconds"] for run in plain)
    return {
        "mode": mode,
        "seconds": medians["seconds"],
        "of_plain": medians["seconds"] / plain_s,
        "found_tokens": int(medians["found_tokens"]),
        "stored_blocks": int(medians["stored_blocks"]),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--conversations", type=int, default=6, help="how many take turns")
    parser.add_argument("--turns", type=int, default=4, help="of each, a thousand tokens longer every time")
    parser.add_argument("--rounds", type=int, default=3, help="how often the engines take turns")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
