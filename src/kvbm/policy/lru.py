"""Least recently used, leaves before parents.

A block is worth no more than the prefix before it, so only a *leaf* (a block none of whose continuations is in
the tier) may go. Among unleased leaves the one used longest ago goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Container, Hashable, Iterable, Sequence
from enum import IntEnum

_SPARE_ENTRIES = 1024


class _State(IntEnum):
    ABSENT = 0
    FILLING = 1
    RESIDENT = 2


_FILLING = int(_State.FILLING)
_RESIDENT = int(_State.RESIDENT)


class LeafFirstLru:
    """Leaf-first LRU over `slot_count` slots.

    A use is one write to an array; the queue of leaves is corrected when victims are asked for, so a victim costs
    O(log n) amortised, and less where a whole branch goes. Memory: 26 bytes a slot, and one queue entry per leaf
    and at most as many outdated ones.
    """

    def __init__(self, slot_count: int) -> None:
        self._used_s = array("d", bytes(8 * slot_count))
        # The continuations of a block are a list through the slots: its first child, and each child's siblings.
        self._parent = array("i", [-1]) * slot_count
        self._child = array("i", [-1]) * slot_count
        self._next = array("i", [-1]) * slot_count
        self._previous = array("i", [-1]) * slot_count
        self._state = bytearray(slot_count)
        self._queued = bytearray(slot_count)
        self._leaves: list[tuple[float, int]] = []
        self._outdated = 0

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Note a use of each block that is here."""
        used_s = self._used_s
        for slot in slots:
            if slot >= 0:
                used_s[slot] = now_s

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        """Of no interest to LRU."""

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots; the parent stops being a leaf."""
        if not slots:
            return
        self._add_child(slots[0], parent)
        state, used_s, parents, child = self._state, self._used_s, self._parent, self._child
        for slot in slots:
            assert not state[slot]
            state[slot] = _FILLING
            used_s[slot] = now_s
            parents[slot] = parent
            parent = slot
        for i in range(len(slots) - 1):
            child[slots[i]] = slots[i + 1]

    def evictable(self, slots: Iterable[int]) -> None:
        """Queue those of the slots that are leaves and not queued already."""
        queued, child, state = self._queued, self._child, self._state
        for slot in slots:
            state[slot] = _RESIDENT
            if child[slot] < 0 and not queued[slot]:
                self._queue(slot)

    def removed(self, slots: Iterable[int]) -> None:
        """Empty the slots; their parents may become leaves."""
        for slot in slots:
            assert self._state[slot]
            parent = self._empty(slot)
            if parent >= 0 and self._child[parent] < 0 and not self._queued[parent]:
                self._queue(parent)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The unleased leaves used longest ago, each before its parent; every newcomer is worth its place."""
        chosen: list[int] = []
        leaves, state, used_s, child = self._leaves, self._state, self._used_s, self._child
        while leaves and len(chosen) < needed:
            queued_s, slot = leaves[0]
            if state[slot] != _RESIDENT or child[slot] >= 0 or slot in leased:
                # It comes back when its lease ends, or when it becomes a leaf again.
                heapq.heappop(leaves)
                self._queued[slot] = 0
            elif queued_s < used_s[slot]:
                heapq.heapreplace(leaves, (used_s[slot], slot))
            else:
                heapq.heappop(leaves)
                self._queued[slot] = 0
                # Up the branch, as long as the parent is next in the order anyway: used when its child was.
                while True:
                    chosen.append(slot)
                    slot = self._empty_leaf(slot)
                    if slot < 0 or child[slot] >= 0 or self._queued[slot] or state[slot] != _RESIDENT:
                        break
                    if used_s[slot] > queued_s or slot in leased or len(chosen) == needed:
                        self._queue(slot)
                        break
        return chosen

    def _queue(self, slot: int) -> None:
        self._queued[slot] = 1
        heapq.heappush(self._leaves, (self._used_s[slot], slot))

    def _tidy(self) -> None:
        """Drop the entries of blocks that got continuations, once they are half of the queue."""
        if self._outdated < _SPARE_ENTRIES or 2 * self._outdated < len(self._leaves):
            return
        kept = []
        for entry in self._leaves:
            slot = entry[1]
            if self._child[slot] >= 0:
                self._queued[slot] = 0
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._leaves = kept
        self._outdated = 0

    def _add_child(self, slot: int, parent: int) -> None:
        """Put the slot into its parent's list of continuations."""
        if parent < 0:
            return
        sibling = self._next[slot] = self._child[parent]
        self._child[parent] = slot
        if sibling >= 0:
            self._previous[sibling] = slot
        elif self._queued[parent]:
            self._outdated += 1
            self._tidy()

    def _empty(self, slot: int) -> int:
        """Take the slot out of the tree; its parent."""
        self._state[slot] = 0
        parent = self._parent[slot]
        if parent >= 0:
            self._unlink(slot, parent)
        # When it leaves before its continuations, they become roots.
        child = self._child[slot]
        self._child[slot] = -1
        while child >= 0:
            following = self._next[child]
            self._parent[child] = self._next[child] = self._previous[child] = -1
            child = following
        return parent

    def _empty_leaf(self, slot: int) -> int:
        """`_empty` for a block without continuations."""
        self._state[slot] = 0
        parent = self._parent[slot]
        if parent >= 0:
            if self._next[slot] < 0 and self._previous[slot] < 0:
                self._child[parent] = self._parent[slot] = -1
            else:
                self._unlink(slot, parent)
        return parent

    def _unlink(self, slot: int, parent: int) -> None:
        """Take the slot out of its parent's list of continuations."""
        previous, following = self._previous[slot], self._next[slot]
        if previous >= 0:
            self._next[previous] = following
        else:
            self._child[parent] = following
        if following >= 0:
            self._previous[following] = previous
        self._parent[slot] = self._next[slot] = self._previous[slot] = -1
