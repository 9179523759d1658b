"""Shared by leaf-first policies: the tree of a tier's blocks, and queues that respect leaves and leases.

Published policies choose among independent objects. Blocks form chains, and a block is of no use without those before
it, so only a *leaf* (a block none of whose continuations is in the tier) may go. A policy made for independent objects
stays as it was published, and still answers with leaves only, by two rules:

- When a block's turn to go comes, the leaves that continue it go first, whatever their own standing: a use of theirs
  would have been a use of the block too, and it was not used since its last turn.
- A block that is leased or being filled when its turn comes, or whose leaf is, *waits* outside its queue. It is next in
  turn as soon as its lease ends, it is filled, or its last continuation goes.

The search for leaves continues where it ended, so a branch that goes is walked once down and once up: O(1) amortised.
A turn that meets a leased leaf, or one being filled, costs as many steps as there are down to that leaf.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable, Iterable, Sequence

from kvbm.block import BlockState

_FREE = int(BlockState.FREE)
_FILLING = int(BlockState.FILLING)
_RESIDENT = int(BlockState.RESIDENT)


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


class LeafFirstQueues:
    """Base of policies that keep blocks in queues: each block belongs to one queue, and stands in it or waits.

    A queue runs from its oldest block, whose turn is next, to its newest. Memory: 27 bytes a slot (the tree 16, links
    8, states 3); there are no outdated entries.
    """

    def __init__(self, slot_count: int, queue_count: int) -> None:
        assert slot_count > 0, f"a tier has at least one slot, not {slot_count}"
        self._slot_count = slot_count
        self.tree = BlockTree(slot_count)
        self._state = bytearray(slot_count)
        self._queue = bytearray(slot_count)
        self._waits = bytearray(slot_count)
        # Blocks that belong to each queue, those that wait included.
        self._sizes = [0] * queue_count
        # Per queue, the slot whose turn it is, and the slot at which the search for its leaves continues.
        self._due = [-1] * queue_count
        self._due_leaf = [-1] * queue_count
        # Queue q is a ring through its slots and one more entry, its end, `slot_count + q`: the oldest slot is the one
        # newer than the end.
        self._newer = array("i", range(slot_count + queue_count))
        self._older = array("i", range(slot_count + queue_count))

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        """Not used."""

    def evictable(self, slots: Iterable[int]) -> None:
        """The slots may go; those that wait are next in turn."""
        state, waits = self._state, self._waits
        for slot in slots:
            state[slot] = _RESIDENT
            if waits[slot]:
                self._end_wait(slot)

    def removed(self, slots: Iterable[int]) -> None:
        """Empty the slots; their parents may become leaves."""
        for slot in slots:
            assert self._state[slot] != _FREE, f"slot {slot} is empty already"
            self._empty(slot)
        self._due = [-1] * len(self._due)

    def _fill(self, slots: Sequence[int], parent: int) -> None:
        """Put the slots of a chain into the tree. The caller enters each into a queue, the last block first."""
        state = self._state
        for slot in slots:
            assert state[slot] == _FREE, f"slot {slot} is in use"
            state[slot] = _FILLING
        self.tree.append(slots, parent)

    def _enter(self, slot: int, queue: int) -> None:
        """Make a slot that belongs to no queue the newest of one."""
        self._queue[slot] = queue
        self._sizes[queue] += 1
        older, newer = self._older, self._newer
        end = self._slot_count + queue
        newest = older[end]
        older[slot] = newest
        newer[slot] = end
        newer[newest] = older[end] = slot

    def _enter_all(self, slots: Sequence[int], queue: int) -> None:
        """Make the slots of a chain the newest of a queue, its first block the very newest."""
        self._sizes[queue] += len(slots)
        queues, older, newer = self._queue, self._older, self._newer
        above = self._slot_count + queue
        newest = older[above]
        for slot in slots:
            queues[slot] = queue
            newer[slot] = above
            older[above] = slot
            above = slot
        older[above] = newest
        newer[newest] = above

    def _leave(self, slot: int) -> None:
        """Take a slot out of its queue, waiting or not."""
        self._sizes[self._queue[slot]] -= 1
        if self._waits[slot]:
            self._waits[slot] = 0
            return
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older] = newer
        self._older[newer] = older

    def _move(self, slot: int, queue: int) -> None:
        """Make a slot the newest of another queue, or of its own."""
        self._leave(slot)
        self._enter(slot, queue)

    def _use(self, slots: Sequence[int], queue_after: bytes) -> None:
        """Make a request's slots the newest of `queue_after[q]`, where q is the queue each belongs to.

        The earlier a block is in the chain, the newer, so that leaves come first in turn. Blocks that were last used
        together stand together and move together: a step in a known run is one comparison.
        """
        queue, waits, newer, older = self._queue, self._waits, self._newer, self._older
        number = len(slots)
        while number:
            number -= 1
            last = slots[number]
            if last < 0:
                continue
            own = queue[last]
            if waits[last] or queue_after[own] != own:
                self._move(last, queue_after[own])
                continue
            first, above = last, newer[last]
            while number and slots[number - 1] == above:
                number -= 1
                first, above = above, newer[above]
            end = self._slot_count + own
            if above == end:
                continue
            below, newest = older[last], older[end]
            newer[below], older[above] = above, below
            newer[first], older[end] = end, first
            newer[newest], older[last] = last, newest

    def _may_go(self, slot: int, leased: Container[int]) -> bool:
        return self._state[slot] == _RESIDENT and self.tree.child[slot] < 0 and slot not in leased

    def _leaf_of(self, slot: int, leased: Container[int]) -> int:
        """The slot that goes at this slot's turn: itself, or a leaf that continues it; -1 when it has to wait."""
        child = self.tree.child
        leaf = slot
        if child[slot] >= 0:
            queue = self._queue[slot]
            if self._due[queue] == slot and self._due_leaf[queue] >= 0:
                leaf = self._due_leaf[queue]
            while (below := child[leaf]) >= 0:
                leaf = below
            self._due[queue], self._due_leaf[queue] = slot, leaf
        if self._may_go(leaf, leased):
            return leaf
        self._wait(slot)
        return -1

    def _candidate(self, queue: int, leased: Container[int]) -> int:
        """The slot that goes at the queue's turn, or -1. Slots that have to wait leave the queue."""
        newer, end = self._newer, self._slot_count + queue
        while (slot := newer[end]) != end:
            if (leaf := self._leaf_of(slot, leased)) >= 0:
                return leaf
        return -1

    def _wait(self, slot: int) -> None:
        """Take a slot that may not go now out of its queue until it may."""
        self._waits[slot] = 1
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older] = newer
        self._older[newer] = older

    def _end_wait(self, slot: int) -> None:
        """Put a slot that waited back into its queue, next in turn."""
        self._waits[slot] = 0
        older, newer = self._older, self._newer
        end = self._slot_count + self._queue[slot]
        oldest = newer[end]
        newer[slot] = oldest
        older[slot] = end
        older[oldest] = newer[end] = slot

    def _empty(self, slot: int) -> None:
        """Take a slot out of its queue and of the tree."""
        self._leave(slot)
        if slot in self._due_leaf:
            self._step_up(slot)
        self._state[slot] = _FREE
        parent = self.tree.take_out(slot)
        if parent >= 0 and self._waits[parent] and self._state[parent] == _RESIDENT:
            self._end_wait(parent)

    def _step_up(self, slot: int) -> None:
        """The search for leaves continues with the parent of a leaf that goes."""
        parent = self.tree.parent[slot]
        for queue, leaf in enumerate(self._due_leaf):
            if leaf == slot:
                self._due_leaf[queue] = -1 if self._due[queue] == slot else parent
