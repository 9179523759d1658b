"""Which blocks a tier holds, told to clients that keep a mirror of it, so that they can answer from memory.

A client that asked (`protocol.Announce` with `keys`) is told of all that is held, then of what comes and goes: some at
a time, and nothing while it reads more slowly than that. What is to be told waits as marks of slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvbm.block import BlockKey, BlockState, Tier
from kvbm.manager.block_index import empty_objects
from kvbm.manager.pool import SlotPool


class Listener(Protocol):
    """Who hears of blocks that come and go."""

    def committed(self, slots: Sequence[int]) -> None:
        """Blocks came into these slots."""

    def emptied(self, slots: Iterable[int]) -> None:
        """The blocks in these slots have gone."""

    def again(self) -> None:
        """Look at all slots once more."""


class HeldKeys:
    """One tier's blocks, and those who listen. Owned by the manager's thread."""

    def __init__(self, tier: Tier, slot_count: int) -> None:
        self.tier = tier
        self.slot_count = slot_count
        self.pool: SlotPool[BlockKey] | None = None
        """The tier's slots: set when it is indexed, and anew when it is indexed again."""
        self._listeners: list[Listener] = []

    def committed(self, slots: Sequence[int]) -> None:
        """The blocks in these slots can be found from now on."""
        for listener in self._listeners:
            listener.committed(slots)

    def emptied(self, slots: Iterable[int]) -> None:
        """The slots no longer hold their blocks."""
        for listener in self._listeners:
            listener.emptied(slots)

    def indexed_anew(self, pool: SlotPool[BlockKey]) -> None:
        """Blocks lie in other slots, after all slots were emptied: listeners are told everything again."""
        self.pool = pool
        for listener in self._listeners:
            listener.again()

    def listen(self) -> KeyListener:
        """A new listener, which is told of what is held as well."""
        listener = KeyListener(self)
        self._listeners.append(listener)
        return listener

    def follow(self, listener: Listener) -> None:
        """Tell this one as well what comes and goes from now on."""
        self._listeners.append(listener)

    def ignore(self, listener: Listener) -> None:
        """It listens no more."""
        self._listeners.remove(listener)


class KeyListener:
    """What one listener has yet to be told. Bounded by the tier: a block that comes and goes untold leaves nothing."""

    def __init__(self, held: HeldKeys) -> None:
        self.held = held
        self._told = empty_objects(held.slot_count)
        self._stored: dict[int, None] = {}
        self._removed: deque[BlockKey] = deque()
        self._looked_at = 0

    def committed(self, slots: Iterable[int]) -> None:
        """Blocks came into these slots."""
        for slot in slots:
            if self._told[slot] is None:
                self._stored[slot] = None

    def emptied(self, slots: Iterable[int]) -> None:
        """The blocks in these slots have gone."""
        for slot in slots:
            self._stored.pop(slot, None)
            told = self._told[slot]
            if told is not None:
                self._told[slot] = None
                self._removed.append(told)

    def again(self) -> None:
        """Look at all slots once more."""
        self._looked_at = 0

    @property
    def complete(self) -> bool:
        """All that the tier holds has been told."""
        return not self._stored and not self._removed and self._looked_at >= self.held.slot_count

    def take(self, keys_max: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Blocks that have gone, and then blocks that are held, at most so many of each; they count as told.

        None that are held while removals wait: one of those may be of a block that has come back since.
        """
        removed = [self._removed.popleft() for _ in range(min(keys_max, len(self._removed)))]
        stored = list[BlockKey]()
        pool = self.held.pool
        if self._removed or pool is None:
            return removed, stored
        end = min(self._looked_at + keys_max, self.held.slot_count)
        for slot in range(self._looked_at, end):
            if self._told[slot] is None and pool.state_of(slot) is BlockState.RESIDENT:
                self._stored[slot] = None
        self._looked_at = end
        for slot in [slot for slot, _ in zip(self._stored, range(keys_max), strict=False)]:
            del self._stored[slot]
            if pool.state_of(slot) is BlockState.RESIDENT:  # it may have been cleared since
                key = self._told[slot] = pool.key_of(slot)
                stored.append(key)
        return removed, stored
