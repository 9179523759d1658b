"""The states and leases of a tier's slots, as arrays: what is done to thousands of slots at once costs microseconds.

Needs numpy, which takes too long to load to be imported before there is a tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvbm.block import NO_SLOT, TRANSITIONS, BlockState, Transition

_FEW = 12
"""Up to so many slots a loop is faster than a call of numpy."""


class SlotTable:
    """One state and one number of leases a slot: five bytes, and a mark from the first `clear_idle` on, and
    one more where blocks were found after a restart. As a container
    it has the leased slots."""

    def __init__(self, slot_count: int) -> None:
        self.state = bytearray(slot_count)
        self._counts = array("i", bytes(4 * slot_count))
        self._cleared = bytearray()
        self._unranked = bytearray()
        self.unranked_count = 0
        """Slots with a block that was found after a restart and that the policy does not know yet."""
        # The same memory, for many slots at once.
        self._states_at = np.frombuffer(self.state, np.uint8)
        self._counts_at = np.frombuffer(self._counts, np.int32)
        self._cleared_at = np.frombuffer(self._cleared, np.uint8)

    def __contains__(self, slot: object) -> bool:
        """Whether the slot is leased."""
        return self._counts[slot] > 0  # type: ignore[call-overload,no-any-return]  # a slot is a number

    def free_slots(self, taken: Sequence[int] | np.ndarray = ()) -> array[int]:
        """All slots but these, the last one first."""
        free = np.ones(len(self.state), np.bool_)
        free[np.asarray(taken, np.intp)] = False
        return array("i", np.flatnonzero(free)[::-1].astype(np.int32).tobytes())

    def clear_idle(self) -> int:
        """Evict all resident slots without leases, and mark them; how many they are. Costs about 2 ns a slot."""
        if not len(self._cleared):
            self._cleared = bytearray(len(self.state))
            self._cleared_at = np.frombuffer(self._cleared, np.uint8)
        idle = self._states_at == int(BlockState.RESIDENT)
        idle &= self._counts_at == 0
        np.copyto(self._states_at, int(BlockState.FREE), where=idle)
        self._cleared_at |= idle
        return int(np.count_nonzero(idle))

    def slots_in(self, state: BlockState) -> np.ndarray:
        """All slots in this state."""
        return np.flatnonzero(self._states_at == int(state))

    def used(self) -> np.ndarray:
        """All slots that are not free, or were cleared, without unranked ones."""
        used = self._states_at != int(BlockState.FREE)
        if self._cleared:
            used |= self._cleared_at != 0
        if self.unranked_count:
            used &= np.frombuffer(self._unranked, np.uint8) == 0
        return np.flatnonzero(used)

    def is_cleared(self, slot: int) -> bool:
        """Whether the slot was evicted by `clear_idle`, and its mark was not taken off since."""
        return bool(self._cleared) and self._cleared[slot] > 0

    def last_cleared(self, most: int) -> list[int]:
        """The last of the marked slots, at most so many."""
        slots, end = list[int](), len(self._cleared)
        while len(slots) < most and (end := self._cleared.rfind(1, 0, end)) >= 0:
            slots.append(end)
        return slots

    def unmark(self, slots: Sequence[int]) -> None:
        """Take the marks of `clear_idle` off."""
        for slot in slots:
            assert self._cleared[slot], f"slot {slot} is not cleared"
            self._cleared[slot] = 0

    def mark_unranked(self, slots: np.ndarray) -> None:
        """The policy does not know the blocks in these slots yet."""
        self._unranked = self._unranked or bytearray(len(self.state))
        np.frombuffer(self._unranked, np.uint8)[slots] = 1
        self.unranked_count += len(slots)

    def is_unranked(self, slot: int) -> bool:
        """Whether the policy does not know the block in this slot yet."""
        return self.unranked_count > 0 and self._unranked[slot] > 0

    def ranked(self, slots: Sequence[int]) -> Sequence[int]:
        """Those of the slots that are not unranked."""
        if not self.unranked_count:
            return slots
        unranked = self._unranked
        return [slot for slot in slots if not unranked[slot]]

    def known(self, slots: list[int]) -> list[int]:
        """The same (or `NO_SLOT`), `NO_SLOT` for one that is unranked."""
        if not self.unranked_count:
            return slots
        unranked = self._unranked
        return [slot if slot >= 0 and not unranked[slot] else NO_SLOT for slot in slots]

    def unmark_unranked(self, slots: Sequence[int]) -> None:
        """The policy knows the blocks in these slots, or they have gone."""
        if self.unranked_count:
            for slot in slots:
                self.unranked_count -= self._unranked[slot]
                self._unranked[slot] = 0

    def isdisjoint(self, slots: Sequence[int]) -> bool:
        """Whether none of the slots is leased."""
        if len(slots) <= _FEW:
            return not any(self._counts[slot] for slot in slots)
        return not self._counts_at[_index(slots)].any()

    def leased_count(self) -> int:
        """How many slots are leased."""
        return int(np.count_nonzero(self._counts_at))

    def count(self, state: BlockState) -> int:
        """How many slots are in this state."""
        return self.state.count(state)

    def move(self, slots: Sequence[int] | np.ndarray, transition: Transition) -> None:
        """Change the states. An AssertionError, with nothing changed, where one of the slots cannot."""
        before, after = TRANSITIONS[transition]
        state = self.state
        if len(slots) <= _FEW:
            wrong = [slot for slot in slots if state[slot] != before]
            if not wrong:
                for slot in slots:
                    state[slot] = after
        else:
            index = _index(slots)
            wrong = index[self._states_at[index] != int(before)].tolist()
            if not wrong:
                self._states_at[index] = int(after)
        assert not wrong, f"slot {wrong[0]} cannot {transition.value}: {BlockState(state[wrong[0]]).name}"

    def lease(self, slots: Sequence[int]) -> None:
        """One lease more on each; a slot that stands there twice gets two. All of them are resident."""
        state, counts = self.state, self._counts
        if len(slots) <= _FEW:
            assert all(state[slot] == BlockState.RESIDENT for slot in slots), "only resident slots are leased"
            for slot in slots:
                counts[slot] += 1
            return
        index = _index(slots)
        resident = self._states_at[index] == int(BlockState.RESIDENT)
        assert resident.all(), "only resident slots are leased"
        self._add(index, 1)

    def unlease(self, slots: Sequence[int]) -> None:
        """One lease less on each."""
        counts = self._counts
        if len(slots) <= _FEW:
            for slot in slots:
                assert counts[slot] > 0, "a lease that was never taken"
                counts[slot] -= 1
            return
        index = _index(slots)
        self._add(index, -1)
        assert self._counts_at[index].min() >= 0, "a lease that was never taken"

    def idle(self, slots: Sequence[int]) -> Sequence[int]:
        """Those of the slots that are resident, have no lease and are not unranked, each once."""
        if len(slots) <= _FEW:
            state, counts = self.state, self._counts
            some = [slot for slot in slots if state[slot] == BlockState.RESIDENT and not counts[slot]]
            return self.ranked(list(dict.fromkeys(some)))
        index = _index(slots)
        resident = self._states_at[index] == int(BlockState.RESIDENT)
        return self.ranked(_distinct(index[resident & (self._counts_at[index] == 0)]))

    def _add(self, index: np.ndarray, change: int) -> None:
        """Change the number of leases of each, as often as it stands there."""
        starts = np.flatnonzero(np.diff(index) != 1) + 1
        if len(starts) > len(index) // _FEW:
            np.add.at(self._counts_at, index, np.int32(change))
            return
        # Runs of consecutive slots, as chains mostly lie: a slice each.
        bounds = [0, *starts.tolist(), len(index)]
        for start, end in pairwise(bounds):
            first = int(index[start])
            self._counts_at[first : first + end - start] += change

    def check(self) -> None:
        """Assert that only resident slots are leased, and only free ones cleared."""
        leased = self._states_at[self._counts_at != 0]
        assert (leased == int(BlockState.RESIDENT)).all(), "a slot that is not resident is leased"
        assert not len(leased) or self._counts_at.min() >= 0, "a lease ended twice"
        if self._cleared:
            cleared = self._states_at[self._cleared_at != 0]
            assert (cleared == int(BlockState.FREE)).all(), "a cleared slot is in use"
        assert self._unranked.count(1) == self.unranked_count


def _index(slots: Sequence[int] | np.ndarray) -> np.ndarray:
    if isinstance(slots, np.ndarray):
        return slots
    if isinstance(slots, range):
        return np.arange(slots.start, slots.stop, slots.step)
    return np.fromiter(slots, np.intp, len(slots))


def _distinct(index: np.ndarray) -> Sequence[int]:
    """The numbers, each once; as a `range` where they follow one another: policies can take those whole."""
    count = len(index)
    if count and int(index[-1]) - int(index[0]) == count - 1 and (np.diff(index) == 1).all():
        return range(int(index[0]), int(index[0]) + count)
    distinct: list[int] = list(dict.fromkeys(index.tolist()))
    return distinct
