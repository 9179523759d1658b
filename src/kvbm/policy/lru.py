"""Least recently used, leaves before parents.

A block is worth no more than the prefix before it, so only a *leaf* (a block none of whose continuations is in
the tier) may go. Among unleased leaves the one used longest ago goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence


class LeafFirstLru:
    """Leaf-first LRU over `slot_count` slots.

    Uses are written to an array; the heap of leaves is corrected lazily when a victim is asked for, so an access
    costs one array write and a victim O(log n) amortised. Memory: 29 bytes a slot plus one heap entry per leaf.
    """

    _ABSENT, _UNLEASED, _LEASED = 0, 1, 2

    def __init__(self, slot_count: int) -> None:
        self._used_s = array("d", bytes(8 * slot_count))
        self._parent = array("i", [-1]) * slot_count
        self._children = array("i", bytes(4 * slot_count))
        self._state = bytearray(slot_count)
        self._queued = bytearray(slot_count)
        self._leaves: list[tuple[float, int]] = []

    def inserted(self, slot: int, parent: int, now_s: float) -> None:
        assert self._state[slot] == self._ABSENT
        self._state[slot] = self._LEASED
        self._used_s[slot] = now_s
        self._children[slot] = 0
        self._parent[slot] = parent
        if parent >= 0:
            self._children[parent] += 1

    def accessed(self, slots: Sequence[int], now_s: float) -> None:
        used_s = self._used_s
        for slot in slots:
            used_s[slot] = now_s

    def leased(self, slot: int) -> None:
        assert self._state[slot] != self._ABSENT
        self._state[slot] = self._LEASED

    def unleased(self, slot: int) -> None:
        assert self._state[slot] == self._LEASED
        self._state[slot] = self._UNLEASED
        self._offer(slot)

    def removed(self, slot: int) -> None:
        assert self._state[slot] != self._ABSENT
        self._state[slot] = self._ABSENT
        parent = self._parent[slot]
        self._parent[slot] = -1
        if parent >= 0:
            self._children[parent] -= 1
            self._offer(parent)
        if self._children[slot]:
            self._orphan(slot)

    def victim(self) -> int:
        leaves = self._leaves
        while leaves:
            queued_s, slot = leaves[0]
            if self._state[slot] != self._UNLEASED or self._children[slot]:
                heapq.heappop(leaves)
                self._queued[slot] = 0
            elif queued_s < self._used_s[slot]:
                heapq.heapreplace(leaves, (self._used_s[slot], slot))
            else:
                return slot
        return -1

    def _offer(self, slot: int) -> None:
        if self._queued[slot] or self._children[slot] or self._state[slot] != self._UNLEASED:
            return
        self._queued[slot] = 1
        heapq.heappush(self._leaves, (self._used_s[slot], slot))

    def _orphan(self, slot: int) -> None:
        """A block left before its continuations (it was corrupt, or its store failed): they become roots."""
        for child, parent in enumerate(self._parent):
            if parent == slot:
                self._parent[child] = -1
        self._children[slot] = 0
