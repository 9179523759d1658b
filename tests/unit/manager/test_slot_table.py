"""The arrays of states and leases against a dictionary, for few slots and for many."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvbm.block import BlockState, Transition
from kvbm.manager.slot_table import SlotTable

SLOTS = 400


@pytest.mark.parametrize("seed", range(6))
def test_leases_add_up_however_the_slots_lie(seed: int) -> None:
    rng = random.Random(seed)
    table, counts = SlotTable(SLOTS), Counter[int]()
    table.move(range(SLOTS), Transition.RESERVE)
    table.move(range(SLOTS), Transition.COMMIT)
    taken: list[list[int]] = []
    for _ in range(120):
        if taken and rng.random() < 0.5:
            slots = taken.pop(rng.randrange(len(taken)))
            table.unlease(slots)
            counts.subtract(slots)
            idle = table.idle(slots)
            assert sorted(idle) == sorted({slot for slot in slots if not counts[slot]}), "each of them once"
        else:
            first, count = rng.randrange(SLOTS // 2), rng.choice((1, 3, 50, 150))
            slots = list(range(first, first + count))
            if rng.random() < 0.5:
                slots = [rng.randrange(SLOTS) for _ in slots]  # some of them twice
            table.lease(slots)
            counts.update(slots)
            taken.append(slots)
        table.check()
        leased = [slot for slot in range(SLOTS) if counts[slot]]
        assert [slot for slot in range(SLOTS) if slot in table] == leased
        assert table.leased_count() == len(leased)
        for some in ([0, 1], list(range(100, 200)), leased[:40]):
            assert table.isdisjoint(some) == (not any(counts[slot] for slot in some))


def test_a_run_whose_leases_end_is_given_as_a_range() -> None:
    table = SlotTable(100)
    table.move(range(100), Transition.RESERVE)
    table.move(range(100), Transition.COMMIT)
    table.lease(list(range(20, 60)))
    table.unlease(list(range(20, 60)))
    assert table.idle(list(range(20, 60))) == range(20, 60)


@pytest.mark.parametrize("count", [3, 60])
def test_slots_that_hold_no_block_or_are_leased_are_not_idle(count: int) -> None:
    table = SlotTable(100)
    table.move(range(count), Transition.RESERVE)
    table.move(range(count), Transition.COMMIT)
    table.lease([0])
    table.move([1], Transition.EVICT)
    assert list(table.idle(range(count))) == list(range(2, count))
    assert not table.idle(range(count, count + 30)), "they are free"


@pytest.mark.parametrize("count", [3, 60])
def test_nothing_is_done_that_a_slot_cannot_do(count: int) -> None:
    table, slots = SlotTable(100), list(range(count))
    with pytest.raises(AssertionError, match="only resident slots"):
        table.lease(slots)
    with pytest.raises(AssertionError, match="slot 0 cannot commit: FREE"):
        table.move(slots, Transition.COMMIT)
    table.move(slots[1:], Transition.RESERVE)
    with pytest.raises(AssertionError, match="slot 1 cannot reserve: FILLING"):
        table.move(slots, Transition.RESERVE)
    assert table.count(BlockState.FILLING) == count - 1, "nothing was changed"
    table.move(slots[1:], Transition.COMMIT)
    with pytest.raises(AssertionError, match="a lease that was never taken"):
        table.unlease(slots[1:])
