"""The tree of a tier's blocks.

Blocks form chains, and a block is of no use without those before it, so a policy may evict only a *leaf*: a block none
of whose continuations is in the tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class BlockTree:
    """The tree of blocks, by slot: each block and its continuations. 16 bytes a slot."""

    def __init__(self, slot_count: int) -> None:
        assert slot_count > 0
        # The continuations of a block are a list through the slots: its first child, and each child's siblings.
        self.parent = array("i", [-1]) * slot_count
        self.child = array("i", [-1]) * slot_count
        self._next = array("i", [-1]) * slot_count
        self._previous = array("i", [-1]) * slot_count

    def append(self, slots: Sequence[int], parent: int) -> None:
        """Each of the slots continues the one before it, the first the one in `parent` (or -1)."""
        parents, child = self.parent, self.child
        first = slots[0]
        if parent >= 0:
            sibling = child[parent]
            if sibling >= 0:
                self._next[first] = sibling
                self._previous[sibling] = first
            child[parent] = first
        parents[first] = parent
        last = first
        for slot in slots[1:]:
            parents[slot] = last
            child[last] = slot
            last = slot

    def take_out(self, slot: int) -> int:
        """Forget a slot. Returns its parent when that has just become a leaf, else -1.

        Continuations that are still there become the first blocks of chains of their own.
        """
        child = self.child[slot]
        if child >= 0:
            self._orphan(slot, child)
        parent = self.parent[slot]
        if parent < 0:
            return -1
        self.parent[slot] = -1
        previous, following = self._previous[slot], self._next[slot]
        if following >= 0:
            self._previous[following] = previous
            self._next[slot] = -1
        if previous >= 0:
            self._next[previous] = following
            self._previous[slot] = -1
            return -1
        self.child[parent] = following
        return parent if following < 0 else -1

    def _orphan(self, slot: int, child: int) -> None:
        self.child[slot] = -1
        while child >= 0:
            following = self._next[child]
            self.parent[child] = self._next[child] = self._previous[child] = -1
            child = following
