"""A store that engines share: prompts whose blocks are written to it, and found there by another node."""

from __future__ import annotations

import dataclasses
import itertools
import random

from engine import reach
from engine.engine_process import EngineProcess
from engine.launcher import Launcher
from engine.workload import Request, random_tokens
from rigs.blob_services import ACCESS_KEY, REGION, SECRET_KEY, S3Service
from rigs.manager_probe import wait_for

BLOCKS = 10
BLOCK_TOKENS = 32
POLLS_UNTIL_ASKED_AGAIN = 100
WRITTEN = "kvbm_offload_blocks_d2o"
LOADED = "kvbm_onboard_blocks_o2d"
FOUND = 'kvbm_hit_blocks_total{tier="remote"}'


def prompts(seed: int, count: int = 4, salt: str = "") -> list[Request]:
    """A few prompts with ten complete blocks each."""
    source = random.Random(seed)
    length = BLOCKS * BLOCK_TOKENS + 5
    return [Request(f"r{seed}-{i}", random_tokens(source, length), 6, salt=salt) for i in range(count)]


def texts(engine: EngineProcess, asked: list[Request]) -> dict[str, list[int]]:
    """The answers, when the device's own cache is empty."""
    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    return dict(engine.run(asked).outputs)


def share(launcher: Launcher, asked: list[Request], blocks: int = BLOCKS) -> dict[str, list[int]]:
    """Compute the prompts, and wait until their blocks lie in the store, so many of each.

    A leader does not store what a busy manager has no time for: such blocks are offered again with the next request.
    """
    wanted = launcher.metrics()[WRITTEN] + blocks * len(asked)
    answers = texts(launcher.process, asked)
    polls = itertools.count(1)

    def is_written() -> bool:
        if launcher.metrics()[WRITTEN] >= wanted:
            return True
        if next(polls) % POLLS_UNTIL_ASKED_AGAIN == 0:
            texts(launcher.process, asked)
        return False

    wait_for(is_written, 40.0, lambda: f"{wanted - launcher.metrics()[WRITTEN]:g} blocks are not written")
    return answers


def found(launcher: Launcher, asked: list[Request]) -> dict[str, list[int]]:
    """Ask until the store's blocks are found: a node learns of them a while after they were written.

    What is asked for and not found is computed, and then in host memory: so each time it is a block more.
    """
    engine = launcher.process
    before = launcher.metrics()[FOUND]
    lengths = range(BLOCK_TOKENS + 1, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS)
    probes = iter([(request, length) for length in lengths for request in asked])

    def seen() -> bool:
        request, length = next(probes)
        name = f"probe-{next(_numbers)}"
        engine.run([dataclasses.replace(request, name=name, tokens=request.tokens[:length], output_count=1)])
        assert engine.call(reach.reset, connector=False, timeout_s=20.0)
        return launcher.metrics()[FOUND] > before

    wait_for(seen, 30.0, "the other node's blocks are not found")
    return texts(engine, asked)


_numbers = itertools.count()


def bucket(service: S3Service) -> dict[str, str]:
    """Settings that name a bucket of this server as the original's variables do."""
    service.make_bucket("kv-cache-0")
    return {
        "DYN_KVBM_OBJECT_ENABLED": "1",
        "DYN_KVBM_OBJECT_BUCKET": "kv-cache-{worker_id}",
        "DYN_KVBM_OBJECT_ENDPOINT": service.endpoint,
        "DYN_KVBM_OBJECT_REGION": REGION,
        "DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY,
        "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY,
    }
