"""The simulator says what a real engine would see: the same trace through both, from the manager's own recording."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine import reach
from engine.launcher import Launcher
from engine.patience import wait_for_every_hit, wait_for_every_store
from engine.tier_settings import host
from engine.workload import BLOCK_TOKENS, MODEL_TOKENS_MAX, Request, random_tokens
from kvbm.cli.record import follow
from kvbm.client.admin import Admin, choose_manager
from kvbm.policy import make_policy
from kvbm.settings import Settings
from kvbm.sim.replay.replay import replay
from kvbm.sim.traces.formats import read_trace
from kvbm.sim.traces.recorder import Recorder
from kvbm.sim.traces.trace import Trace
from rigs.manager_probe import wait_for

CHATS, TURNS_MAX, REQUESTS = 40, 6, 160
AGREEMENT = 0.02


def chats(seed: int) -> list[Request]:
    """A trace of chats scaled down: two shared system prompts, turns that grow, chats that stop, and some that do not
    come back for long. The prompts' answers are not part of the next turn, so that all blocks are prompts'."""
    choice = random.Random(seed)
    systems = [random_tokens(choice, 3 * BLOCK_TOKENS), random_tokens(choice, 2 * BLOCK_TOKENS)]
    texts = [systems[choice.random() < 0.3] for _ in range(CHATS)]
    turns = [0] * CHATS
    requests = []
    while len(requests) < REQUESTS:
        # Most of the time one of the latest chats goes on.
        newest = sum(turn > 0 for turn in turns)
        chat = min(CHATS - 1, max(0, newest - int(choice.expovariate(0.25))))
        if turns[chat] == TURNS_MAX:
            continue
        turns[chat] += 1
        added = random_tokens(choice, choice.randint(20, 3 * BLOCK_TOKENS))
        if len(texts[chat]) + len(added) + 2 <= MODEL_TOKENS_MAX:
            texts[chat] += added
            requests.append(Request(f"chat{chat}-{turns[chat]}", texts[chat], output_count=1))
    return requests


@contextmanager
def recording(runtime_dir: str, expected: int) -> Iterator[io.BytesIO]:
    """Record the private manager of the engine that runs, until `expected` requests have ended."""
    settings = Settings(runtime_dir=runtime_dir)
    file, stop = io.BytesIO(), threading.Event()
    recorder = Recorder(file)
    admin = Admin(choose_manager(settings), settings)
    follows = threading.Event()
    ends: list[str] = []
    thread = threading.Thread(
        target=lambda: ends.append(follow(admin, recorder, lambda: not stop.is_set(), follows.set))
    )
    thread.start()
    assert follows.wait(20.0)
    try:
        yield file
        wait_for(lambda: recorder.written >= expected, 20.0, lambda: f"{recorder.written} requests recorded")
    finally:
        stop.set()
        thread.join(20.0)
        admin.close()
    assert ends == [""]


@pytest.mark.parametrize(("policy", "blocks"), [("lru", 30), ("gittins", 30), ("gittins", 80)])
def test_hit_rates_of_an_engine_and_of_the_simulator_agree(
    launcher: Launcher, tmp_path: Path, policy: str, blocks: int
) -> None:
    engine = launcher.start({**host(blocks), "DYN_KVBM_EVICTION": policy})
    engine.call(wait_for_every_store, timeout_s=20.0)
    engine.call(wait_for_every_hit, timeout_s=20.0)
    requests = chats(seed=blocks)
    with recording(launcher.runtime_dir, len(requests)) as file:
        engine.call(reach.run_one_by_one, requests, timeout_s=180.0)
    metrics = launcher.metrics()
    queried = metrics["kvbm_queried_blocks_total"]
    real = metrics['kvbm_hit_blocks_total{tier="host"}'] / queried
    path = tmp_path / "trace.jsonl"
    path.write_bytes(file.getvalue())
    trace: Trace = read_trace(path)
    simulated = replay(trace, blocks, make_policy(policy, blocks))
    assert len(trace.requests) == len(requests)
    assert trace.accesses == queried
    assert 0.1 < real < 0.9, "a rate that says something"
    assert abs(real - simulated.hit_rate) <= AGREEMENT, (real, simulated.hit_rate)
