"""NVIDIA's Dynamo as the scripts of `deploy/launch` start it, with a tiny model."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbm.demo import counters
from kvbm.demo.client import Client
from rigs.checkout import ROOT

sys.path.append(str(ROOT / "scripts"))

from dynamo_demo import environment
from dynamo_stack import Choice as Choice
from dynamo_stack import Stack as Stack

BLOCK_TOKENS, BLOCKS, DEVICE_BLOCKS, ANSWER_TOKENS = 32, 31, 64, 8

Start = Callable[..., Stack]


def starter(model: Path, directory: Path) -> Start:
    """What makes a stack that is not started yet."""
    words = (
        f"--served-model-name m --max-model-len 1152 --enforce-eager --block-size {BLOCK_TOKENS} "
        f"--num-gpu-blocks-override {DEVICE_BLOCKS} --dtype float32 --max-num-seqs 2"
    )

    def make(
        script: str, workers: Mapping[str, int], services: Mapping[str, str] | None = None, **variables: str
    ) -> Stack:
        mine = {"MODEL": str(model), "WORKER_ARGS": words, "DYN_KVBM_ONBOARD": "always", **variables}
        return Stack(script, workers, environment() | mine, directory / script, services)

    return make


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 400) for _ in range(BLOCKS * BLOCK_TOKENS + 5)] for _ in range(count)]


def counted(stack: Stack, name: str, managers: int = 1) -> int:
    """A counter's value, of all managers."""
    pages = [
        Client("127.0.0.1", stack.metrics_port + number, timeout_s=10).page() for number in range(managers)
    ]
    return sum(counters.total(counters.read(page), name) for page in pages)


def ask(stack: Stack, tokens: list[int]) -> str:
    return stack.client.complete("m", tokens, ANSWER_TOKENS).text
