"""Where a promised hit comes from, in vLLM's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.block import Tier
from kvbm.vllm_integration import scheduler_side
from kvbm.vllm_integration.scheduler_side import SchedulerSide

pytestmark = pytest.mark.skipif(
    scheduler_side.CacheHitSource is None, reason="this vLLM does not split hits by source"
)
HOST, DISK, REMOTE = Tier.HOST, Tier.DISK, Tier.REMOTE


@pytest.mark.parametrize(
    ("tiers", "tokens", "split"),
    [
        ((HOST, HOST), 8, {"host": 8}),
        ((HOST, DISK, DISK), 11, {"host": 4, "disk": 7}),
        ((HOST, DISK, REMOTE), 12, {"host": 4, "disk": 4, "external_unspecified": 4}),
        ((REMOTE, REMOTE), 7, {"external_unspecified": 7}),
        ((), 0, {}),
    ],
)
def test_tokens_are_split_by_tier(tiers: tuple[Tier, ...], tokens: int, split: dict[str, int]) -> None:
    leader = SimpleNamespace(promised_sources=lambda request, blocks: bytes(tiers[:blocks]))
    side: Any = SimpleNamespace(block_tokens=4, leader=leader)
    found = SchedulerSide.hit_sources(side, SimpleNamespace(request_id="r"), tokens)
    assert {source.value: count for source, count in found.items()} == split
