"""What a store that stops answering costs requests: their time to first token beside an engine without a cache.

An engine writes prompts into a Redis and ends. The next one knows what lies there, and has promised itself hits, when
the server is stopped (SIGSTOP: connections stay open, nothing answers). Then the prompts are asked, one by one. What
the slowest takes beyond the same engine without a cache is to stay below the deadline of a read, after which the
breaker opens. Needs redis-server. Run it from the checkout:

    python -m benchmarks.store_stall [--tokens 4000] [--prompts 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console

from benchmarks.engine import (
    CONNECTOR,
    Engine,
    Scenario,
    add_engine_arguments,
    end_with_children,
    in_own_process,
    passed_on,
    prompt,
    prompt_kv,
)
from kvbm.present.tables import plain_table, save_json
from kvbm.testing.tiny_model import Size, make_model

DEADLINE_MS = 2000
LEARNS_S = 8.0
"""A node lists what others wrote every 5 seconds."""
PARTS = ("plain", "write", "answering", "stalled")


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[int, int]]:
    """A server in memory: its port and its process."""
    port = _free_port()
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            assert time.monotonic() < until_s, "redis-server does not answer"
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def measure(
    part: str, model: str, size: str, tokens: int, prompts: int, dtype: str, port: int, pid: int
) -> list[float]:
    """Seconds to the first token of each prompt in one engine; the first request, of another prompt, warms up."""
    kv = prompt_kv(size, cast("Any", dtype), tokens)
    environment = {
        "DYN_KVBM_METRICS": "true",
        "DYN_KVBM_METRICS_PORT": str(_free_port()),
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(kv.stored_blocks * (prompts + 2)),
        "DYN_KVBM_REMOTE": f"redis://127.0.0.1:{port}/0",
        "DYN_KVBM_REMOTE_LINGER_SECS": "0",
        "DYN_KVBM_REMOTE_DEADLINE_MS": str(DEADLINE_MS),
    }
    plain = part == "plain"
    chosen = Scenario(
        name=part,
        tier=None,
        environment={} if plain else environment,
        transfer_config=None if plain else CONNECTOR,
    )
    with Engine(model, chosen, prompt_tokens=tokens, dtype=dtype) as engine:
        engine.first_token_s(prompt(10_000 + PARTS.index(part), tokens))
        engine.wait_until_stored()
        if part in ("answering", "stalled"):
            time.sleep(LEARNS_S)
        if part == "stalled":
            os.kill(pid, signal.SIGSTOP)
        times = []
        for number in range(prompts):
            seconds, cached = engine.first_token_s(prompt(number, tokens))
            if (part == "answering" and not cached) or (part in ("plain", "write") and cached):
                raise RuntimeError(f"{part}: {cached} of {tokens} tokens cached")
            times.append(seconds)
            if part == "write":
                engine.wait_until_stored()
        return times


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    if shutil.which("redis-server") is None:
        print("redis-server is not installed", file=sys.stderr)
        return 1
    end_with_children()
    size = cast("Size", options.size)
    options.output.mkdir(parents=True, exist_ok=True)
    model = str(
        make_model(options.output.absolute() / "models" / f"{size}-{options.dtype}", size, options.dtype)
    )
    given = (model, size, options.tokens, options.prompts, options.dtype)
    if options.part:
        times = measure(options.part, *given, options.port, options.pid)
        with open(options.result, "w") as file:
            json.dump(times, file)
        return 0
    console = Console(stderr=True)
    measured: dict[str, list[float]] = {}
    with redis_server() as (port, pid):
        for part in PARTS:
            console.print(f"measuring: {part}")
            words = {
                "tokens": options.tokens,
                "prompts": options.prompts,
                "part": part,
                "port": port,
                "pid": pid,
            }
            measured[part] = in_own_process(
                "benchmarks.store_stall", passed_on(options, **words), options.timeout
            )
        os.kill(pid, signal.SIGCONT)
    save_json({"times_s": measured, "deadline_ms": DEADLINE_MS}, options.output / "store_stall.json")
    table = plain_table(
        ("engine", "median", "slowest", "slowest beyond plain's median"),
        words={"engine"},
        title=f"Time to first token, ms; a read has {DEADLINE_MS} ms",
    )
    base_s = statistics.median(measured["plain"])
    for part, times in measured.items():
        cells = (statistics.median(times), max(times), max(times) - base_s)
        table.add_row(part, *(f"{cell * 1e3:,.0f}" for cell in cells))
    Console().print(table)
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--tokens", type=int, default=4000, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="how many are asked")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
