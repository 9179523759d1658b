"""The states and leases of a tier's slots, as arrays: what is done to thousands of slots at once costs microseconds.

Needs numpy, which takes too long to load to be imported before there is a tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvbm.block import TRANSITIONS, BlockState, Transition

_FEW = 12
"""Up to so many slots a loop is faster than a call of numpy."""


class SlotTable:
    """One state and one number of leases a slot: five bytes, and a mark from the first `clear_idle` on. As a container
    it has the leased slots."""

    def __init__(self, slot_count: int) -> None:
        self.state = bytearray(slot_count)
        self._counts = array("i", bytes(4 * slot_count))
        self._cleared = bytearray()
        # The same memory, for many slots at once.
        self._states_at = np.frombuffer(self.state, np.uint8)
        self._counts_at = np.frombuffer(self._counts, np.int32)
        self._cleared_at = np.frombuffer(self._cleared, np.uint8)

    def __contains__(self, slot: object) -> bool:
        """Whether the slot is leased."""
        return self._counts[slot] > 0  # type: ignore[call-overload,no-any-return]  # a slot is a number

    def free_slots(self, taken: bytearray | None = None) -> array[int]:
        """All slots, or those that are not marked in `taken`, the last one first."""
        slots = (
            np.arange(len(self.state), dtype=np.int32)
            if taken is None
            else np.flatnonzero(np.frombuffer(taken, np.uint8) == 0).astype(np.int32)
        )
        return array("i", slots[::-1].tobytes())

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
        """All slots that are not free, or were cleared."""
        used = self._states_at != int(BlockState.FREE)
        if self._cleared:
            used |= self._cleared_at != 0
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

    def move(self, slots: Sequence[int], transition: Transition) -> None:
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

    def unlease(self, slots: Sequence[int]) -> Sequence[int]:
        """One lease less on each. Returns the slots that have none any more, each once."""
        counts = self._counts
        if len(slots) <= _FEW:
            for slot in slots:
                assert counts[slot] > 0, "a lease that was never taken"
                counts[slot] -= 1
            return [slot for slot in dict.fromkeys(slots) if not counts[slot]]
        index = _index(slots)
        self._add(index, -1)
        left = self._counts_at[index]
        assert left.min() >= 0, "a lease that was never taken"
        return _distinct(index[left == 0])

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


def _index(slots: Sequence[int]) -> np.ndarray:
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
