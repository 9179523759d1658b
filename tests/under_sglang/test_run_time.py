"""What an operator does to a storage backend while the engine runs, and what the manager says of it."""

from __future__ import annotations

import json

import pytest

from rigs.manager_probe import wait_for
from rigs.sglang.keepers import Manager, wait_until_settled, wait_until_stored
from rigs.sglang.modes import PREFETCH_FROM_TOKENS, STORAGE, hicache
from rigs.sglang.prompts import HIT_TOKENS, PAGES, PROMPTS, different, prompts
from rigs.sglang.scenarios import Stage
from under_sglang.conftest import Keep

Reference = list[list[int]]
EVERYTHING = PROMPTS * HIT_TOKENS
CONFIG = json.dumps({**STORAGE, "interface_v1": 1, "prefetch_threshold": PREFETCH_FROM_TOKENS})


def test_attached_and_detached_at_run_time(stage: Stage, keep: Keep, reference: Reference) -> None:
    kept: Manager = keep("storage", disk=False)
    how = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": CONFIG,
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    with stage.engine(hicache(stage.model, admin_api_key="k"), kept.variables()) as engine:
        found = []
        for number in range(2):
            assert engine.call("attach", **how)[0]
            assert engine.call("flush")
            assert different(engine.generate(prompts()), reference) == 0
            wait_until_stored(kept, PROMPTS * PAGES)
            assert engine.call("flush")
            answers = engine.generate(prompts())
            assert different(answers, reference) == 0, number
            found.append(sum(answer.where.storage for answer in answers))
            # The scheduler is idle a little after the last answer, and refuses until then.
            wait_for(lambda: engine.call("detach")[0], 10.0, "SGLang does not detach the storage")
            assert engine.call("flush")
            answers = engine.generate(prompts())
            assert different(answers, reference) == 0
            found.append(sum(answer.where.storage for answer in answers))
        assert found == [EVERYTHING, 0, EVERYTHING, 0]
        engine.end()


@pytest.mark.parametrize("way", ["storage", "generic"])
def test_cleared(stage: Stage, keep: Keep, reference: Reference, way: str) -> None:
    """After a clear nothing is found, and it fills again."""
    kept: Manager = keep(way, disk=False)
    with stage.on(kept) as engine:
        engine.generate(prompts())
        wait_until_stored(kept, PROMPTS * PAGES)
        assert engine.call("clear")
        found = []
        for _ in range(2):
            assert engine.call("flush")
            answers = engine.generate(prompts())
            assert different(answers, reference) == 0
            found.append(sum(answer.where.storage for answer in answers))
            wait_until_settled(kept)
        assert found == [0, EVERYTHING]
        engine.end()


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_layouts_and_prefetch_policies(
    stage: Stage, keep: Keep, reference: Reference, layout: str, policy: str
) -> None:
    kept: Manager = keep("storage", disk=False)
    more = {"hicache_mem_layout": layout, "hicache_storage_prefetch_policy": policy}
    with stage.engine({**kept.arguments(stage.model), **more}, kept.variables()) as engine:
        assert different(engine.generate(prompts()), reference) == 0
        wait_until_stored(kept, PROMPTS * PAGES)
        assert engine.call("flush")
        answers = engine.generate(prompts())
        assert different(answers, reference) == 0
        if policy != "best_effort":
            assert sum(answer.where.storage for answer in answers) == EVERYTHING
        engine.end()
