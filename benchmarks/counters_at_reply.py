"""Are the counters right when a reply is there? A client reads `/metrics` at once after every reply.

One `vllm serve` with KVBM and a device cache that holds two prompts. Fresh prompts are computed and stored, for one
token and for fifteen; then prompts that left the device come again and are loaded. After each reply the page is read
until it has counted all blocks of that request. A prompt is computed in one step, so that a reply of one token leaves
before any of its blocks is copied. Run it from the checkout:

    python -m benchmarks.counters_at_reply [--requests 40]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.engine import CONNECTOR, end_with_children, prompt
from kvbm.demo.server import HOST, Server, free_port, make_vllm_command
from kvbm.present.tables import console, plain_table, save_json
from kvbm.settings import process_environment
from kvbm.testing.tiny_model import DType, Size, make_model

BLOCK_TOKENS = 32
COMPLETE_S_MAX = 2.0
POLL_S = 0.001
SETTLED_S = 0.6
NAME = "tiny"

Page = dict[str, float]


class Kind(NamedTuple):
    """A kind of request, and the series that it raises for each block of its prompt."""

    title: str
    max_tokens: int
    fresh: bool
    raised: dict[str, float]


STORED = {"kvbm_offload_blocks_d2h": 1.0}
RESIDENT = {'kvbm_pool_blocks{tier="host",state="resident"}': 1.0}
LOADED = {"kvbm_onboard_blocks_h2d": 1.0, "kvbm_matched_tokens": BLOCK_TOKENS}
KINDS = (
    Kind("stored, 1 token: counter", 1, True, STORED),
    Kind("stored, 1 token: gauge", 1, True, RESIDENT),
    Kind("stored, 15 tokens: counter", 15, True, STORED),
    Kind("stored, 15 tokens: gauge", 15, True, RESIDENT),
    Kind("loaded, 1 token: counters", 1, False, LOADED),
)


class Lag(NamedTuple):
    """From the end of a reply to the end of the first page, and of the first page that had counted it, in seconds.

    `complete_s` is None where no page did: an engine gives up a store for which the manager had no time.
    """

    first_s: float
    complete_s: float | None
    at_first: bool


class Watched:
    """A server, and the page of its manager's metrics."""

    def __init__(self, port: int, metrics_port: int, blocks: int) -> None:
        self._port, self._metrics_port, self._blocks = port, metrics_port, blocks

    def ask(self, number: int, max_tokens: int) -> None:
        """A completion; returns when the whole reply is here."""
        body = {
            "model": NAME,
            # The last token's KV is never stored, nor is a block that only the answer would fill.
            "prompt": prompt(number, self._blocks * BLOCK_TOKENS + 1),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"http://{HOST}:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()

    def page(self) -> Page:
        """What the metrics say now."""
        with urllib.request.urlopen(f"http://{HOST}:{self._metrics_port}/metrics", timeout=20) as reply:
            lines = str(reply.read(), "utf-8").splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {series: float(value) for series, value in rows}

    def measure(self, kind: Kind, number: int) -> Lag:
        """Ask, and read the page until it has counted the request, or for `COMPLETE_S_MAX`."""
        if kind.raised is RESIDENT:
            # What an earlier request changed shows by then; and not always at the same moment between two refreshes.
            time.sleep(SETTLED_S * random.uniform(1.0, 2.0))
        before = self.page()
        self.ask(number, kind.max_tokens)
        began_s = time.perf_counter()
        wanted = {name: before.get(name, 0.0) + n * self._blocks for name, n in kind.raised.items()}
        first_s = 0.0
        while True:
            page, now_s = self.page(), time.perf_counter() - began_s
            missing = {name: page.get(name) for name, value in wanted.items() if page.get(name) != value}
            if not missing:
                return Lag(first_s or now_s, now_s, not first_s)
            if now_s > COMPLETE_S_MAX:
                print(f"{kind.title}: {missing}, and not {wanted}", file=sys.stderr)
                return Lag(first_s, None, False)
            first_s = first_s or now_s
            time.sleep(POLL_S)


def measure(model: str, options: argparse.Namespace, scratch: Path) -> dict[str, list[Lag]]:
    """The lags of every kind of request, at one server."""
    metrics_port, prompts = free_port(), len(KINDS) * options.requests + 4
    environment = {
        **{name: value for name, value in process_environment().items() if not name.startswith("DYN_")},
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "DYN_KVBM_METRICS": "true",
        "DYN_KVBM_METRICS_PORT": str(metrics_port),
        "DYN_KVBM_ONBOARD": "always",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str((prompts + 2) * (options.blocks + 1)),
        "DYN_KVBM_RUNTIME_DIR": str(scratch / "run"),
    }
    arguments = [
        "--served-model-name", NAME, "--dtype", options.dtype, "--enforce-eager",
        "--max-model-len", str((options.blocks + 2) * BLOCK_TOKENS), "--max-num-seqs", "2",
        "--block-size", str(BLOCK_TOKENS),
        "--max-num-batched-tokens", str((options.blocks + 2) * BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(2 * options.blocks + 8),
        "--kv-transfer-config", json.dumps(CONNECTOR),
    ]  # fmt: skip
    log = options.output / "counters_at_reply.log"
    port = free_port()
    command = make_vllm_command(model, port, arguments)
    with Server(
        "vllm serve",
        command,
        port,
        environment,
        log,
        start_timeout_s=options.timeout,
        request_timeout_s=120.0,
    ) as server:
        watched = Watched(server.port, metrics_port, options.blocks)
        for number in range(4):  # first uses of shapes and of memory
            watched.ask(number, 2)
        lags: dict[str, list[Lag]] = {kind.title: [] for kind in KINDS}
        number = 4
        for _ in range(options.requests):
            for kind in KINDS:
                # The device has room for two prompts.
                asked = number if kind.fresh else number - 4
                lags[kind.title].append(watched.measure(kind, asked))
                number += kind.fresh
    return lags


def summarise(title: str, lags: list[Lag]) -> dict[str, Any]:
    """One row, times in ms."""
    complete = sorted(lag.complete_s * 1e3 for lag in lags if lag.complete_s is not None) or [math.inf]
    return {
        "request": title,
        "at first read": f"{sum(lag.at_first for lag in lags)} of {len(lags)}",
        "first read": statistics.median(lag.first_s * 1e3 for lag in lags),
        "complete p50": statistics.median(complete),
        "p95": complete[min(len(complete) - 1, round(0.95 * len(complete)))],
        "max": complete[-1],
        "never": sum(lag.complete_s is None for lag in lags),
    }


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    end_with_children()
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    dtype = cast("DType", options.dtype)
    size = cast("Size", options.size)
    model = str(make_model(options.output / "models" / f"{size}-{dtype}", size, dtype))
    with tempfile.TemporaryDirectory(prefix="kvbm-counters-") as scratch, _others(options.busy):
        lags = measure(model, options, Path(scratch))
    rows = [summarise(title, some) for title, some in lags.items()]
    save_json({"rows": rows, "lags": lags}, options.output / "counters_at_reply.json")
    table = plain_table(rows[0], words={"request"}, title="Metrics after a reply, ms")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console().print(table)
    return 0


@contextlib.contextmanager
def _others(count: int) -> Iterator[None]:
    """So many programs that want a core each: a machine that is shared."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40, help="requests of each kind")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of 32 tokens in a prompt")
    parser.add_argument("--busy", type=int, default=0, help="other programs that want a core each")
    parser.add_argument(
        "--size", choices=("tiny", "demo", "small"), default="tiny", help="which of our models"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument(
        "--timeout", type=float, default=240.0, help="seconds that the server's start may take"
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where model, log, JSON go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
