"""Least recently used, leaves before parents.

A block is worth no more than the prefix before it, so only a *leaf* (a block none of whose continuations is in
the tier) may go. Among unleased leaves the one used longest ago goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Container, Iterable, Sequence
from enum import IntEnum

_SPARE_ENTRIES = 1024


class _State(IntEnum):
    ABSENT = 0
    FILLING = 1
    RESIDENT = 2


class LeafFirstLru:
    """Leaf-first LRU over `slot_count` slots.

    A use is one write to an array; the queue of leaves is corrected when a victim is asked for, so a victim costs
    O(log n) amortised. Memory: 26 bytes a slot, and one queue entry per leaf and at most as many outdated ones.
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

    def inserted(self, slot: int, parent: int, now_s: float) -> None:
        """Begin to fill the slot; its parent stops being a leaf."""
        assert self._state[slot] == _State.ABSENT
        self._state[slot] = _State.FILLING
        self._used_s[slot] = now_s
        self._parent[slot] = parent
        if parent >= 0:
            sibling = self._next[slot] = self._child[parent]
            self._child[parent] = slot
            if sibling >= 0:
                self._previous[sibling] = slot
            elif self._queued[parent]:
                self._outdated += 1
                self._tidy()

    def accessed(self, slots: Sequence[int], now_s: float) -> None:
        """Note a use of each slot."""
        used_s = self._used_s
        for slot in slots:
            used_s[slot] = now_s

    def evictable(self, slots: Iterable[int]) -> None:
        """Queue those of the slots that are leaves and not queued already."""
        queued, child, state = self._queued, self._child, self._state
        for slot in slots:
            state[slot] = _State.RESIDENT
            if not queued[slot] and child[slot] < 0:
                self._queue(slot)

    def removed(self, slot: int) -> None:
        """Empty the slot; its parent may become a leaf."""
        assert self._state[slot] != _State.ABSENT
        self._state[slot] = _State.ABSENT
        parent = self._parent[slot]
        if parent >= 0:
            self._unlink(slot, parent)
            if self._child[parent] < 0 and not self._queued[parent]:
                self._queue(parent)
        # It left before its continuations (it was corrupt, or its store failed): they become roots.
        child = self._child[slot]
        self._child[slot] = -1
        while child >= 0:
            following = self._next[child]
            self._parent[child] = self._next[child] = self._previous[child] = -1
            child = following

    def victim(self, leased: Container[int]) -> int:
        """The unleased leaf used longest ago; -1 when there is none."""
        leaves = self._leaves
        while leaves:
            queued_s, slot = leaves[0]
            if self._state[slot] != _State.RESIDENT or self._child[slot] >= 0 or slot in leased:
                # It comes back when its lease ends, or when it becomes a leaf again.
                heapq.heappop(leaves)
                self._queued[slot] = 0
            elif queued_s < self._used_s[slot]:
                heapq.heapreplace(leaves, (self._used_s[slot], slot))
            else:
                return slot
        return -1

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
