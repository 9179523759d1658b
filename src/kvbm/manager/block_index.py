"""Which slot of a tier holds a block: look-ups by key, one by one and for whole chains."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Generic, TypeVar

from kvbm.block import NO_SLOT, BlockState, SlotIndex
from kvbm.manager.key_table import KeyT, KeyTable
from kvbm.slices import sliced

if TYPE_CHECKING:
    import numpy as np

KeyT_contra = TypeVar("KeyT_contra", bound=Hashable, contravariant=True)

_FREE, _FILLING, _RESIDENT = int(BlockState.FREE), int(BlockState.FILLING), int(BlockState.RESIDENT)
FOUND_AT_ONCE = 8192
"""Blocks of a chain that are looked for in one slice."""
_SHORT_CHAIN = 128
_RUN_STEP = 8
_SCATTERED_MAX = 16


def empty_objects(count: int) -> np.ndarray:
    """An array of Python objects, all of them None."""
    import numpy as np  # takes too long to load to be imported before there is a tier

    return np.empty(count, object)


class BlockIndex(Generic[KeyT]):
    """The key of every slot, and the slot of every block that is resident or being filled. `state` has a byte for each
    slot, which whoever owns the slots keeps up to date, as it does the rest."""

    def __init__(self, slot_count: int, state: bytearray) -> None:
        self._slots: KeyTable[KeyT, int] = KeyTable()
        # No list: the garbage collector would look at each of its items, 13 ms for a million.
        self._keys: np.ndarray = empty_objects(slot_count)
        self._state = state
        self.found_at_once = FOUND_AT_ONCE
        # Slots that were emptied since the latest `finding` began.
        self._gone: set[int] | None = None
        self.cleared_count = 0
        """Free slots whose former block is still in the index. It cannot be found, and is forgotten later."""

    def key_of(self, slot: int) -> KeyT:
        """The key of a slot that is not free."""
        key: KeyT | None = self._keys[slot]
        assert key is not None, f"slot {slot} is free"
        return key

    def find(self, key: KeyT) -> SlotIndex | None:
        """The slot that holds the block, resident; None otherwise (also while it is being filled)."""
        slot = self._slots.find(key)
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
        for held in self._slots.find_each(keys[len(found) :]):
            found.append(held if held is not None and state[held] == _RESIDENT else None)
        return found

    def finding(self, keys: list[KeyT], brought: Set[KeyT] = frozenset()) -> Generator[None, None, list[int]]:
        """The slots of these blocks, `NO_SLOT` for one that is not here or was `brought`; in slices, of one chain at a
        time. None of the slots has been emptied when all are found."""
        slots, gone = list[int](), set[int]()
        self._gone = gone
        for part in sliced(keys, self.found_at_once):
            slots += self._found_before(list(part), brought)
            if len(keys) > self.found_at_once:
                yield
        self._gone = None
        return [NO_SLOT if slot in gone else slot for slot in slots] if gone else slots

    def _found_before(self, keys: list[KeyT], brought: Set[KeyT]) -> list[int]:
        """The slots of these blocks, `NO_SLOT` for one that is not here or was brought."""
        slots = [NO_SLOT if slot is None else slot for slot in self.find_all(keys)]
        if brought:
            slots = [NO_SLOT if key in brought else slot for key, slot in zip(keys, slots, strict=True)]
        return slots

    def find_leading(self, keys: list[KeyT]) -> list[int]:
        """The slots of the first blocks of a chain, as far as they are resident."""
        found: list[int] = []
        while len(found) < len(keys) and (slot := self.find(keys[len(found)])) is not None:
            found.append(slot)
            run = self._run_length(slot + 1, keys, len(found))
            found.extend(range(slot + 1, slot + 1 + run))
        return found

    def resident(self) -> Iterator[tuple[SlotIndex, KeyT]]:
        """Every resident slot with its key."""
        for slot, state in enumerate(self._state):
            if state == BlockState.RESIDENT:
                yield SlotIndex(slot), self.key_of(slot)

    def find_filling(self, key: KeyT) -> SlotIndex | None:
        """The slot that is being filled with the block, if any."""
        slot = self._slots.find(key)
        return SlotIndex(slot) if slot is not None and self._state[slot] == _FILLING else None

    def holds(self, key: KeyT) -> bool:
        """Whether the block is resident or being filled."""
        slot = self._slots.find(key)
        return slot is not None and self._state[slot] != _FREE

    def held(self, keys: Iterable[KeyT]) -> bytes:
        """`holds` for each of the keys, a byte each: 1 or 0."""
        return bytes(map(self.holds, keys)) if self.cleared_count else self._slots.has_each(keys)

    def holds_any(self, keys: Iterable[KeyT]) -> bool:
        """`holds` for at least one of the keys."""
        return any(self.held(keys))

    def _keys_of(self, slots: Sequence[int]) -> list[KeyT]:
        return [key for key in map(self._keys.__getitem__, slots) if key is not None]

    def _run_length(self, slot: int, keys: list[KeyT], start: int) -> int:
        """How many of `keys[start:]` lie resident in `slot` and the slots after it: a lower bound."""
        length, step = 0, _RUN_STEP
        while chunk := keys[start + length : start + length + step]:
            first, end = slot + length, slot + length + len(chunk)
            resident = self._state.count(BlockState.RESIDENT, first, end)
            if self._keys[first:end].tolist() != chunk or resident < len(chunk):
                break
            length, step = length + len(chunk), 2 * step
        return length
