"""The manager gives consecutive slots as a range: a policy does with it what it does with a list."""

from __future__ import annotations

import pytest

from kvbm.policy.registry import EVICTION

SLOTS = 60


@pytest.mark.parametrize("name", EVICTION.built_in)
def test_a_range_of_slots_is_as_a_list_of_them(name: str) -> None:
    chosen = []
    for kind in (list, range):
        policy = EVICTION.make(name, SLOTS)
        policy.requested(list(range(1, 41)), [-1] * 40, 0.0)
        policy.inserted(list(range(1, 41)), list(range(40)), -1, 1.0)
        policy.inserted([101, 102, 103], [50, 51, 52], 19, 1.0)  # a branch
        assert policy.victims(1, (), {}, 2.0) == [], "all are being filled"
        slots = range(40)
        policy.evictable(slots if kind is range else list(slots))
        policy.evictable(range(50, 53) if kind is range else [50, 51, 52])
        chosen.append(policy.victims(30, (), {}, 3.0))
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 30
    assert set(chosen[0]) <= {*range(40), 50, 51, 52}
