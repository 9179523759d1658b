"""GDSF: what is used often and dear to compute again stays, and nothing stays for ever."""

from __future__ import annotations

import random

import pytest

from kvbm.policy import BlockCost, Gdsf
from kvbm.policy.contract import EvictionPolicy
from kvbm.testing.checked_tier import CheckedTier

ALIKE = BlockCost(
    block_tokens=1,
    prefill_s_per_token=1.0,
    attention_s_per_token_pair=0.0,
    block_bytes=0,
    load_bytes_per_s=1.0,
)
"""Every block saves a second."""


def alike(slot_count: int) -> EvictionPolicy:
    return Gdsf(slot_count, ALIKE)


def held(tier: CheckedTier) -> set[int]:
    return {block.path[0] for block in tier.blocks.values()}


def test_what_was_used_more_often_stays() -> None:
    tier = CheckedTier(alike, 4)
    for block in (0, 0, 1, 2, 2, 3):
        tier.serve((block,))
    tier.serve((4,))
    assert held(tier) == {0, 2, 3, 4}, "1 and 3 were used once, 1 longer ago"
    tier.serve((5,))
    assert held(tier) == {0, 2, 4, 5}


def test_old_fame_fades() -> None:
    """The tier's age rises with each victim, until three uses of long ago are worth less than one of now."""
    tier = CheckedTier(alike, 2)
    for block in (0, 0, 0, 10, 11, 12):
        tier.serve((block,))
    assert held(tier) == {0, 12}
    for block in range(13, 20):
        tier.serve((block,))
    assert 0 not in held(tier)


def test_what_is_dearer_to_compute_stays() -> None:
    """Two leaves used equally often: the one deeper in its chain costs more attention."""
    cost = BlockCost(block_tokens=512, attention_s_per_token_pair=1e-7, block_bytes=0)
    tier = CheckedTier(lambda slot_count: Gdsf(slot_count, cost), 5)
    tier.serve((1, 1, 1))
    tier.serve((2,))
    shallow, deep = tier.find((2,)), tier.find((1, 1, 1))
    assert tier.evict(2) == (shallow, deep)


def test_depth_is_counted_from_where_a_run_continues() -> None:
    cost = BlockCost(block_tokens=512, attention_s_per_token_pair=1e-7, block_bytes=0)
    tier = CheckedTier(lambda slot_count: Gdsf(slot_count, cost), 6)
    for path in ((1,), (1, 1), (1, 1, 1), (2,), (2, 2)):
        tier.reserve(path)
        tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
    shallow, deep = tier.find((2, 2)), tier.find((1, 1, 1))
    middle = tier.find((2,))
    assert tier.evict(3) == (shallow, middle, deep)


def test_without_that_cost_age_decides() -> None:
    tier = CheckedTier(alike, 5)
    tier.serve((1, 1, 1))
    tier.serve((2,))
    deep = tier.find((1, 1, 1))
    assert tier.evict(1) == (deep,)


def test_the_cost_of_a_block() -> None:
    cost = BlockCost(
        block_tokens=10,
        prefill_s_per_token=2.0,
        attention_s_per_token_pair=0.1,
        block_bytes=30,
        load_bytes_per_s=6.0,
    )
    assert cost.saved_s(0) == pytest.approx(2.0 * 10 + 0.1 * 10 * 5 - 5.0)
    assert cost.saved_s(3) == pytest.approx(2.0 * 10 + 0.1 * 10 * 35 - 5.0)
    assert BlockCost(block_bytes=1 << 40).saved_s(0) == 0.0, "computing is faster"


def test_the_defaults_make_loading_worth_it() -> None:
    assert 0.0 < BlockCost().saved_s(0) < BlockCost().saved_s(1000) < 1.0


class Model:
    """GDSF of blocks without chains, as the paper has it: the lowest rank of all goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.age = 0.0
        self.ranks: dict[int, tuple[float, int]] = {}
        self.uses: dict[int, int] = {}

    def request(self, block: int, number: int) -> bool:
        hit = block in self.ranks
        if not hit and len(self.ranks) == self.capacity:
            victim = min(self.ranks, key=self.ranks.__getitem__)
            self.age = self.ranks.pop(victim)[0]
            del self.uses[victim]
        self.uses[block] = self.uses.get(block, 0) + 1
        self.ranks[block] = (self.age + self.uses[block], number)
        return hit


@pytest.mark.parametrize("capacity", [1, 5, 30])
def test_flat_traffic_is_answered_as_by_the_paper(capacity: int) -> None:
    chance, tier, model = random.Random(capacity), CheckedTier(alike, capacity), Model(capacity)
    hits = 0
    for number in range(2000):
        block = min(int(chance.paretovariate(0.6)), 200)
        hit = model.request(block, number)
        assert tier.serve((block,)) == hit, f"request {number}"
        assert held(tier) == set(model.ranks)
        hits += hit
    assert 100 < hits < 1900


def test_a_removed_block_leaves_no_rank_behind() -> None:
    """Its slot's next block is worth little, whatever the last one was worth."""
    tier = CheckedTier(alike, 2)
    for block in (0, 0, 0, 0, 0, 0, 0, 0, 0, 1):
        tier.serve((block,))
    tier.evict(1)
    slot = tier.find((0,))
    assert held(tier) == {0}, "and its high rank has been looked at"
    tier.remove([slot])
    for block in (2, 3, 3):
        tier.serve((block,))
    assert tier.find((2,)) == slot
    assert tier.evict(1) == (slot,)


def test_outdated_entries_are_tidied_up() -> None:
    policy = Gdsf(8)
    longest = 0
    for number in range(5000):
        policy.inserted((number,), (number % 8,), -1, 0.0)
        policy.evictable((number % 8,))
        policy.removed((number % 8,))
        longest = max(longest, len(policy._leaves))
    assert longest < 200
