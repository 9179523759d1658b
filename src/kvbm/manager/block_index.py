"""Which slot of a tier holds a block: look-ups by key, one by one and for whole chains."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from kvbm.block import BlockState, SlotIndex

KeyT = TypeVar("KeyT", bound=Hashable)
"""The key of a block and of the chain up to it: `BlockKey` in the manager, a number in the simulator."""
KeyT_contra = TypeVar("KeyT_contra", bound=Hashable, contravariant=True)

_FREE, _FILLING, _RESIDENT = int(BlockState.FREE), int(BlockState.FILLING), int(BlockState.RESIDENT)
_SHORT_CHAIN = 128
_RUN_STEP = 8
_SCATTERED_MAX = 16


class BlockIndex(Generic[KeyT]):
    """The key of every slot, and the slot of every block that is resident or being filled. `state` has a byte for each
    slot, which whoever owns the slots keeps up to date, as it does the rest."""

    def __init__(self, slot_count: int, state: bytearray) -> None:
        self._slots: dict[KeyT, int] = {}
        self._keys: list[KeyT | None] = [None] * slot_count
        self._state = state
        self.cleared_count = 0
        """Free slots whose former block is still in the index. It cannot be found, and is forgotten later."""

    def find(self, key: KeyT) -> SlotIndex | None:
        """The slot that holds the block, resident; None otherwise (also while it is being filled)."""
        slot = self._slots.get(key)
        return SlotIndex(slot) if slot is not None and self._state[slot] == _RESIDENT else None

    def find_all(self, keys: list[KeyT]) -> list[int | None]:
        """`find` for many consecutive keys of a chain at once.

        A chain stored in one go mostly lies in consecutive slots. Comparing keys there reads memory in order, which
        costs a fraction of as many scattered look-ups; scattered keys are looked up one by one.
        """
        found: list[int | None] = []
        scattered = 0 if len(keys) > _SHORT_CHAIN else _SCATTERED_MAX
        while len(found) < len(keys) and scattered < _SCATTERED_MAX:
            slot = self.find(keys[len(found)])
            found.append(slot)
            run = 0 if slot is None else self._run_length(slot + 1, keys, len(found))
            if slot is not None and run:
                found.extend(range(slot + 1, slot + 1 + run))
            scattered = 0 if run else scattered + 1
        state = self._state
        for held in map(self._slots.get, keys[len(found) :]):
            found.append(held if held is not None and state[held] == _RESIDENT else None)
        return found

    def find_leading(self, keys: list[KeyT]) -> list[int]:
        """The slots of the first blocks of a chain, as far as they are resident."""
        found: list[int] = []
        while len(found) < len(keys) and (slot := self.find(keys[len(found)])) is not None:
            found.append(slot)
            run = self._run_length(slot + 1, keys, len(found))
            found.extend(range(slot + 1, slot + 1 + run))
        return found

    def find_filling(self, key: KeyT) -> SlotIndex | None:
        """The slot that is being filled with the block, if any."""
        slot = self._slots.get(key)
        return SlotIndex(slot) if slot is not None and self._state[slot] == _FILLING else None

    def holds(self, key: KeyT) -> bool:
        """Whether the block is resident or being filled."""
        slot = self._slots.get(key)
        return slot is not None and self._state[slot] != _FREE

    def held(self, keys: Iterable[KeyT]) -> bytes:
        """`holds` for each of the keys, a byte each: 1 or 0."""
        return bytes(map(self.holds if self.cleared_count else self._slots.__contains__, keys))

    def holds_any(self, keys: Iterable[KeyT]) -> bool:
        """`holds` for at least one of the keys."""
        if self.cleared_count:
            return any(map(self.holds, keys))
        return not self._slots.keys().isdisjoint(keys)

    def _run_length(self, slot: int, keys: list[KeyT], start: int) -> int:
        """How many of `keys[start:]` lie resident in `slot` and the slots after it: a lower bound."""
        length, step = 0, _RUN_STEP
        while chunk := keys[start + length : start + length + step]:
            first, end = slot + length, slot + length + len(chunk)
            resident = self._state.count(BlockState.RESIDENT, first, end)
            if self._keys[first:end] != chunk or resident < len(chunk):
                break
            length, step = length + len(chunk), 2 * step
        return length
