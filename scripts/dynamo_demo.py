"""`make dynamo`: the prefix-reuse experiment through NVIDIA's Dynamo, on this machine, without a service to start.

Four stacks, one after the other, each from its script in `deploy/launch`: one worker without and with KVBM; two
workers behind a router that follows what they hold; prefill and decode apart. All must give the same text.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dynamo_venv

INSIDE = "--inside"
"""The script calls itself with Dynamo's own Python."""
MODEL_NAME = "kvbm-dynamo"
BLOCK_TOKENS, PREFIX_BLOCKS, QUESTION_TOKENS, ANSWER_TOKENS = 32, 32, 40, 16
DOCUMENTS, REQUESTS = 4, 20
REQUEST_BLOCKS = PREFIX_BLOCKS + -(-(QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS)
DEVICE_BLOCKS = REQUEST_BLOCKS + 3


@dataclass(frozen=True)
class Topology:
    """A stack and what the table calls it."""

    title: str
    script: str
    workers: dict[str, int]
    chosen: str = ""
    """The kind of workers whose choice tells what a router believes; empty: it routes without."""


TOPOLOGIES = (
    Topology("one worker, no KVBM", "agg.sh", {"backend": 1}),
    Topology("one worker", "agg_kvbm.sh", {"backend": 1}),
    Topology("two workers, KV router", "agg_kvbm_router.sh", {"backend": 2}, "decode"),
    Topology("prefill and decode apart", "disagg_kvbm.sh", {"backend": 1, "prefill": 1}),
)


@dataclass(frozen=True)
class Outcome:
    """What one run gave. `router`: blocks that the router believed cached, in all tiers, in host memory, on disk."""

    title: str
    texts: list[str]
    new_s: list[float]
    seen_s: list[float]
    loaded_blocks: int
    router: tuple[int, int, int] | None = None


def worker_arguments() -> list[str]:
    """vLLM's arguments, the same for all runs: a device cache for one request at a time."""
    return [
        *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(REQUEST_BLOCKS * BLOCK_TOKENS), "--block-size", str(BLOCK_TOKENS)),
        *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-num-seqs", "2"),
    ]


def environment() -> dict[str, str]:
    """The caller's environment, with as many threads in every engine: another number of them gives other roundings."""
    import os

    own = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # The router's table tells tiers apart only where the events do.
        "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE": "passthrough",
        "DYN_KVBM_CPU_CACHE_GB": "0.5",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("DYN_")} | own


def prompts() -> list[tuple[bool, list[int]]]:
    """The requests: whether one about the same document came before, and the tokens."""
    from kvbm.demo.workload import schedule

    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 400) for _ in range(count)]

    documents = [tokens(PREFIX_BLOCKS * BLOCK_TOKENS) for _ in range(DOCUMENTS)]
    asks = schedule(DOCUMENTS, REQUESTS)
    return [(ask.seen, documents[ask.document] + tokens(QUESTION_TOKENS - 8)) for ask in asks]


def ask_all(
    server: Any, asks: Sequence[tuple[bool, list[int]]]
) -> tuple[list[str], list[float], list[float]]:
    """Texts, and seconds to the first token of documents that are new and that were seen."""
    texts, new_s, seen_s = [], list[float](), list[float]()
    warm_up = random.Random(1)
    server.client.complete(MODEL_NAME, [warm_up.randrange(10, 400) for _ in asks[0][1]], ANSWER_TOKENS)
    for seen, tokens in asks:
        answer = server.client.complete(MODEL_NAME, tokens, ANSWER_TOKENS)
        texts.append(answer.text)
        (seen_s if seen else new_s).append(answer.ttft_s)
    return texts, new_s, seen_s


def run(topology: Topology, model: Path, directory: Path, asks: Sequence[tuple[bool, list[int]]]) -> Outcome:
    """One stack from start to end."""
    from dynamo_stack import Stack
    from kvbm.demo import counters
    from kvbm.demo.client import Client

    words = " ".join(worker_arguments())
    variables = environment() | {"MODEL": str(model), "WORKER_ARGS": words}
    with Stack(topology.script, topology.workers, variables, directory / topology.script) as stack:
        texts, new_s, seen_s = ask_all(stack, asks)
        loaded = 0
        managers = 0 if topology.script == "agg.sh" else topology.workers["backend"]
        for worker in range(managers):
            page = Client("127.0.0.1", stack.metrics_port + worker, timeout_s=10).page()
            loaded += counters.total(counters.read(page), "kvbm_onboard_blocks_h2d")
        router = None
        if topology.chosen:
            choices = stack.choices(topology.chosen)[-len(asks) :]
            router = (
                sum(each.overlap for each in choices),
                sum(each.host for each in choices),
                sum(each.disk for each in choices),
            )
    return Outcome(topology.title, texts, new_s, seen_s, loaded, router)


def show(outcomes: Sequence[Outcome]) -> bool:
    """The table; whether all texts are those of the first run."""
    from rich.console import Console

    from kvbm.demo.runs import describe_machine
    from kvbm.present.tables import plain_table

    headings = ("run", "new, ms", "seen, ms", "loaded", "router", "host", "disk")
    table = plain_table(headings, words={"run"})
    for each in outcomes:
        table.add_row(
            each.title,
            f"{statistics.median(each.new_s) * 1000:.0f}",
            f"{statistics.median(each.seen_s) * 1000:.0f}",
            str(each.loaded_blocks),
            *(map(str, each.router) if each.router is not None else "–––"),
        )
    console = Console(highlight=False)
    console.print(
        ", ".join(f"{name}: {value}" for name, value in describe_machine(None).items()), soft_wrap=True
    )
    console.print(
        f"{REQUESTS} requests about {DOCUMENTS} documents of {PREFIX_BLOCKS} blocks of {BLOCK_TOKENS} tokens, one at a"
        " time. Median times to the first token, for documents that are new and that were seen; then blocks: loaded by"
        " KVBM, believed cached by the router in all tiers, in host memory, on disk. One thread an engine.",
        soft_wrap=True,
    )
    console.print(table)
    same = [each for each in outcomes if each.texts == outcomes[0].texts]
    if len(same) == len(outcomes):
        console.print(f"All {len(outcomes)} runs gave the same text for all {REQUESTS} requests.")
        return True
    for each in outcomes:
        wrong = sum(text != first for text, first in zip(each.texts, outcomes[0].texts, strict=True))
        if wrong:
            console.print(f"{each.title}: {wrong} of {REQUESTS} texts differ from those of the first run.")
    return False


def main_inside(output: Path) -> int:
    """The experiment, in Dynamo's environment."""
    from kvbm.testing.tiny_model import make_model

    model = make_model(output / "model", "demo", "float32")
    asks = prompts()
    outcomes = []
    for topology in TOPOLOGIES:
        print(f"Dynamo, {topology.title} …", file=sys.stderr, flush=True)
        outcomes.append(run(topology, model, output, asks))
    return 0 if show(outcomes) else 1


def main() -> int:
    """Makes the environment, and runs the experiment in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep the logs in this directory")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return main_inside(options.output)
    venv = dynamo_venv.prepare()
    directory = options.output or Path(tempfile.mkdtemp(prefix="kvbm-dynamo-"))
    command = [str(venv.python), __file__, INSIDE, "--output", str(directory.absolute())]
    status = subprocess.run(command).returncode
    if options.output is None and status == 0:
        shutil.rmtree(directory, ignore_errors=True)
    elif status:
        print(f"logs: {directory}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
