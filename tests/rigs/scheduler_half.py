"""The scheduler's half of the connector at a manager that answers from a script."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.adapters import Adapters
from kvbm.clock import ManualClock
from kvbm.hashing import split_keys
from kvbm.protocol import Hello, Reserve, ReserveReply
from kvbm.settings import Settings
from kvbm.step_plan import StepPlan
from kvbm.vllm_integration import scheduler_side
from kvbm.vllm_integration.scheduler_side import SchedulerSide
from rigs.leader import HASHES, TABLE, ScriptedManager

BLOCK_TOKENS = 4
DONE = SimpleNamespace(finished_recving=None, invalid_block_ids=None)


class FullAttentionSpec:
    """Named as vLLM's, which is all that is looked at."""

    block_size = BLOCK_TOKENS


class Side:
    """A scheduler's half at a manager that answers from a script; digests are made when the test says so."""

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int = 1, **settings: Any
    ) -> None:
        self.manager = ScriptedManager()
        self.digests: list[Callable[[], None]] = []
        self.adapters_clock = ManualClock()
        monkeypatch.setattr(scheduler_side, "ManagerFinder", lambda *arguments: self.manager)
        monkeypatch.setattr(
            scheduler_side,
            "Adapters",
            lambda memo, clock: Adapters(memo, self.adapters_clock, self.digests.append),
        )
        monkeypatch.setattr(scheduler_side, "hashes_are_deterministic", lambda config: True)
        groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec()) for _ in range(groups)]
        kv_cache = SimpleNamespace(num_blocks=200, kv_cache_groups=groups)
        transfer = SimpleNamespace(engine_id="e", kv_load_failure_policy="recompute")
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            model_config=SimpleNamespace(max_model_len=400),
            parallel_config=SimpleNamespace(world_size=1),
        )
        chosen = Settings(**{"runtime_dir": str(tmp_path), "onboard_mode": "async", **settings})
        self.side = SchedulerSide(config, kv_cache, chosen, {})
        self.manager.ready()
        self.step()
        assert [type(message) for message in self.manager.said()] == [Hello]

    def request(self, name: str, blocks: int, lora_path: str) -> Any:
        lora = SimpleNamespace(lora_path=lora_path, lora_int_id=1)
        return SimpleNamespace(
            request_id=name,
            block_hashes=HASHES[:blocks],
            num_tokens=blocks * BLOCK_TOKENS + 1,
            num_computed_tokens=0,
            num_output_tokens=0,
            lora_request=lora,
        )

    def step(self, preempted: Collection[str] = (), **tokens: int) -> StepPlan:
        state = SimpleNamespace(get_block_ids=lambda request_id: (TABLE,))
        return self.side.step(
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=sum(tokens.values()),
                kv_connector_block_state=state,
                preempted_req_ids=preempted,
            )
        )

    def grant(self, reserve: Reserve) -> None:
        slots = tuple(range(len(split_keys(reserve.keys))))
        self.manager.send(ReserveReply(store=reserve.store, slots=slots, generations=slots))

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.manager.said() if isinstance(message, kind)]
