"""The last copy of a block in the fleet goes after blocks that others have too; and every policy can be wrapped so."""

from __future__ import annotations

import pytest

from kvbm.policy import EvictionPolicy, LeafFirstLru, eviction_policies, make_policy
from kvbm.policy.last_copies import PASSED_OVER_MIN, LastCopies
from kvbm.testing.policy_contract import PolicyContract
from rigs.property_tests import scale_examples


def filled(elsewhere: set[int], count: int) -> LastCopies:
    """A policy with so many blocks of their own chains, the first one used longest ago."""
    policy = LastCopies(LeafFirstLru(count), elsewhere.__contains__)
    for slot in range(count):
        policy.inserted([slot], [slot], -1, float(slot))
        policy.evictable([slot])
    return policy


def test_what_others_have_goes_first() -> None:
    policy = filled({2, 3, 5}, 8)
    assert policy.victims(2, (), (), 10.0) == [2, 3]
    assert policy.victims(2, (), (), 10.0) == [5, 0]


def test_where_nobody_has_anything_the_order_is_as_ever() -> None:
    policy = filled(set(), 6)
    assert policy.victims(3, (), (), 10.0) == [0, 1, 2]
    assert policy.victims(3, (), (), 10.0) == [3, 4, 5]


def test_it_looks_at_those_whose_turn_is_near_alone() -> None:
    count = 4 * PASSED_OVER_MIN
    policy = filled({count - 1}, count)
    assert policy.victims(1, (), (), 1000.0) != [count - 1]


def test_leased_blocks_stay() -> None:
    policy = filled({0, 1}, 4)
    assert policy.victims(3, (), {0}, 10.0) == [1, 2, 3]


class TestWrapped(PolicyContract):
    examples = scale_examples(100)

    """The contract of policies holds, whatever others have."""

    @pytest.fixture(autouse=True, params=["gittins"])
    def policy_name(self, request: pytest.FixtureRequest) -> None:
        assert request.param in eviction_policies()
        self._name = request.param
        self.admits_all = self._name != "gittins"
        if self._name == "gittins":
            self.growth_bytes_max = 1 << 24

    def make_policy(self, slot_count: int) -> EvictionPolicy:
        return LastCopies(make_policy(self._name, slot_count), lambda slot: slot % 3 == 0)
