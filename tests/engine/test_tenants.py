"""Two tenants on one engine: one stores a few prompts, the other floods host memory with many times its size."""

from __future__ import annotations

import dataclasses
import random

from engine import reach
from engine.engine_process import EngineProcess
from engine.launcher import Launcher
from engine.patience import wait_for_every_store
from engine.tier_settings import host
from engine.workload import Request, random_tokens

PROMPT = 10 * 32 + 5
"""Tokens of a prompt with ten complete blocks."""
HOST_BLOCKS = 80
"""Half of an equal share of two tenants is two prompts."""


def prompts(salt: str, count: int) -> list[Request]:
    source = random.Random(salt)
    return [Request(f"{salt}-{i}", random_tokens(source, PROMPT), 4, salt=salt) for i in range(count)]


QUIET, LOUD = prompts("quiet", 2), prompts("loud", 32)
AGAIN = [dataclasses.replace(each, name=f"{each.name}-again") for each in QUIET]


def hits_after_a_flood(launcher: Launcher, engine: EngineProcess, outputs: dict[str, list[int]]) -> list[int]:
    """How many tokens of the quiet tenant's prompts are found, with an empty device, once the other has stored 320
    blocks. All answers are added to `outputs`."""
    engine.call(wait_for_every_store, timeout_s=20.0)
    for each in (*QUIET, *LOUD):
        outputs.update(engine.run([each]).outputs)
    stored = launcher.metrics()["kvbm_offload_blocks_d2h"]
    assert stored >= 4 * HOST_BLOCKS, f"only {stored} blocks were stored: that is no flood"
    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    before = launcher.metrics()['kvbm_hit_blocks_total{tier="host"}']
    answers = engine.run(AGAIN)
    outputs.update(answers.outputs)
    found = [answers.cached_tokens[request.name] for request in AGAIN]
    assert launcher.metrics()['kvbm_hit_blocks_total{tier="host"}'] - before == sum(found) // 32
    launcher.assert_nothing_held()
    return found


def test_who_floods_takes_nothing_from_others_below_their_share(launcher: Launcher) -> None:
    """Without shares the same flood evicts everything, and in no case is an answer another one."""
    plain = launcher.start(transfer=None, num_gpu_blocks_override=1000)
    expected = plain.run([*QUIET, *LOUD, *AGAIN]).outputs
    settings = {**host(HOST_BLOCKS), "DYN_KVBM_EVICTION": "lru"}

    shared: dict[str, list[int]] = {}
    assert hits_after_a_flood(launcher, launcher.start(settings), shared) == [320, 320]
    assert shared == expected
    spared = launcher.metrics()['kvbm_spared_blocks_total{tier="host",favour="share"}']
    assert spared > 0

    launcher.stop()
    unshared: dict[str, list[int]] = {}
    engine = launcher.start({**settings, "DYN_KVBM_SALT_SHARE": "0"})
    assert hits_after_a_flood(launcher, engine, unshared) == [0, 0]
    assert unshared == expected
