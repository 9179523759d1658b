"""Managers that die or stall, calls that fail or come late: requests go on and are answered as if nothing were kept."""

from __future__ import annotations

import pytest

from rigs.manager_probe import wait_for
from rigs.sglang.keepers import WAYS, Manager, wait_until_settled, wait_until_stored
from rigs.sglang.prompts import HIT_TOKENS, PAGES, PROMPTS, different, prompts
from rigs.sglang.scenarios import Stage, wait_until_found
from under_sglang.conftest import Keep

Reference = list[list[int]]
EVERYTHING = PROMPTS * HIT_TOKENS


@pytest.mark.parametrize("way", WAYS)
def test_a_manager_is_killed_while_it_serves(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    kept: Manager = keep(way)
    with stage.on(kept) as engine:
        engine.generate(prompts())
        wait_until_stored(kept, PROMPTS * PAGES)
        assert engine.call("flush")
        engine.begin(prompts() * 8)
        hits = kept.metrics()['kvbm_hit_blocks_total{tier="host"}']
        wait_for(
            lambda: kept.metrics()['kvbm_hit_blocks_total{tier="host"}'] > hits, 30.0, "no request was a hit"
        )
        kept.running.kill()
        answers = engine.finish()
        assert different(answers, reference) == 0
        assert engine.call("flush")
        assert different(engine.generate(prompts()), reference) == 0
        kept.start()
        wait_until_found(engine, reference)
        engine.end()


@pytest.mark.parametrize("way", WAYS)
def test_a_manager_stands_still_for_a_while(stage: Stage, keep: Keep, reference: Reference, way: str) -> None:
    kept: Manager = keep(way)
    with stage.on(kept) as engine:
        engine.generate(prompts())
        wait_until_stored(kept, PROMPTS * PAGES)
        assert engine.call("flush")
        kept.pause(True)
        try:
            answers = engine.generate(prompts())
        finally:
            kept.pause(False)
        assert different(answers, reference) == 0
        assert sum(answer.where.storage for answer in answers) == 0
        wait_until_found(engine, reference)
        engine.end()


@pytest.mark.parametrize("way", ["storage", "generic"])
def test_sglangs_own_delays_and_failures(stage: Stage, keep: Keep, reference: Reference, way: str) -> None:
    """Its proxy around a backend delays each call by up to 50 ms, and lets one of four fail."""
    kept: Manager = keep(way)
    fault = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.25",
    }
    with stage.engine(kept.arguments(stage.model), {**kept.variables(), **fault}) as engine:
        found = 0
        for _ in range(6):
            assert engine.call("flush")
            answers = engine.generate(prompts())
            assert different(answers, reference) == 0
            found += sum(answer.where.storage for answer in answers)
            wait_until_settled(kept)
        assert "HiCache storage test injector enabled" in engine.log()
        assert found > EVERYTHING
        engine.end()


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_without_a_manager_serves(stage: Stage, keep: Keep, reference: Reference, way: str) -> None:
    """And uses the manager once there is one."""
    kept: Manager = keep(way)
    kept.stop()
    with stage.on(kept) as engine:
        assert different(engine.generate(prompts()), reference) == 0
        kept.start()
        wait_until_found(engine, reference)
        engine.end()


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_is_killed_while_it_stores(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    """What it left half-way is never found; the next engine stores it."""
    kept: Manager = keep(way)
    with stage.on(kept) as engine:
        engine.begin(prompts(), together=True)
        wait_for(
            lambda: kept.metrics()['kvbm_pool_blocks{tier="host",state="resident"}'] > 0, 30.0, "none stored"
        )
        engine.kill()
    with stage.on(kept) as engine:
        assert different(engine.generate(prompts()), reference) == 0
        wait_until_found(engine, reference)
        engine.end()
