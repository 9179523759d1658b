"""Least recently used, leaves before parents.

A block is worth no more than the prefix before it, so only a *leaf* (a block none of whose continuations is in
the tier) may go. Among unleased leaves the one used longest ago goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Container, Hashable, Iterable, Sequence

from kvbm.block import BlockState
from kvbm.policy.block_tree import BlockTree

_FREE = int(BlockState.FREE)
_FILLING = int(BlockState.FILLING)
_RESIDENT = int(BlockState.RESIDENT)
_SPARE_ENTRIES = 1024


class LeafFirstLru:
    """Leaf-first LRU over `slot_count` slots.

    A use is one write to an array; the queue of leaves is corrected when victims are asked for, so a victim costs
    O(log n) amortised, and less where a whole branch goes. Memory: 26 bytes a slot, and one queue entry per leaf
    and at most as many outdated ones.
    """

    def __init__(self, slot_count: int) -> None:
        self.tree = BlockTree(slot_count)
        self._used_s = array("d", bytes(8 * slot_count))
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
        """Not used."""

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots; the parent stops being a leaf."""
        if not slots:
            return
        outdates = parent >= 0 and self._queued[parent] and self.tree.child[parent] < 0
        self.tree.append(slots, parent)
        state, used_s = self._state, self._used_s
        for slot in slots:
            assert state[slot] == _FREE, f"slot {slot} is in use"
            state[slot] = _FILLING
            used_s[slot] = now_s
        if outdates:
            self._outdated += 1
            self._tidy()

    def evictable(self, slots: Iterable[int]) -> None:
        """Queue those of the slots that are leaves and not queued already."""
        queued, child, state = self._queued, self.tree.child, self._state
        if isinstance(slots, range) and slots.step == 1:
            # A long chain as a whole: most of its blocks have continuations.
            state[slots.start : slots.stop] = bytes((_RESIDENT,)) * len(slots)
            below = child[slots.start : slots.stop]
            slots = [slot for slot, first in zip(slots, below, strict=True) if first < 0]
        for slot in slots:
            state[slot] = _RESIDENT
            if child[slot] < 0 and not queued[slot]:
                self._queue(slot)

    def removed(self, slots: Iterable[int]) -> None:
        """Empty the slots; their parents may become leaves."""
        for slot in slots:
            assert self._state[slot] != _FREE, f"slot {slot} is empty already"
            self._state[slot] = _FREE
            parent = self.tree.take_out(slot)
            if parent >= 0 and not self._queued[parent]:
                self._queue(parent)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The unleased leaves used longest ago, each before its parent; every newcomer is worth a slot."""
        chosen: list[int] = []
        leaves, state, used_s, queued = self._leaves, self._state, self._used_s, self._queued
        child, take_out = self.tree.child, self.tree.take_out
        while leaves and len(chosen) < needed:
            queued_s, slot = leaves[0]
            if state[slot] != _RESIDENT or child[slot] >= 0 or slot in leased:
                # It comes back when its lease ends, or when it becomes a leaf again.
                heapq.heappop(leaves)
                queued[slot] = 0
            elif queued_s < used_s[slot]:
                heapq.heapreplace(leaves, (used_s[slot], slot))
            else:
                heapq.heappop(leaves)
                queued[slot] = 0
                # Up the branch, as long as the parent is next in the order anyway: used when its child was.
                while True:
                    chosen.append(slot)
                    state[slot] = _FREE
                    slot = take_out(slot)
                    if slot < 0 or queued[slot] or state[slot] != _RESIDENT:
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
        child, queued = self.tree.child, self._queued
        kept = []
        for entry in self._leaves:
            slot = entry[1]
            if child[slot] >= 0:
                queued[slot] = 0
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._leaves = kept
        self._outdated = 0
