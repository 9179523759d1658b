"""SIEVE, leaves before parents: blocks never move, and a hand goes over them and takes the unused ones.

Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web
caches", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

from kvbm.policy.leaf_first import LeafFirstQueues


class Sieve(LeafFirstQueues):
    """SIEVE over `slot_count` slots; see `leaf_first` for how leaves come first.

    Blocks stand in the order in which they came. The hand goes from the oldest to the newest and round again; a block
    used since it passed last is spared once, any other goes, and with it what continues it. A block that had to wait
    comes back where the hand is.

    A use is one write to an array. Memory: 28 bytes a slot.
    """

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count, queue_count=1)
        self._used = bytearray(slot_count)
        # The slot that the hand looks at next; at the queue's end it goes on with the oldest.
        self._hand = slot_count

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Note a use of each block that is here."""
        used = self._used
        for slot in slots:
            if slot >= 0:
                used[slot] = 1

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots: the newest, not used yet."""
        if not slots:
            return
        self._fill(slots, parent)
        for slot in slots:
            self._used[slot] = 0
        self._enter_all(slots, 0)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The leaves of blocks that the hand finds unused; every newcomer is worth a slot."""
        chosen: list[int] = []
        newer, used, end = self._newer, self._used, self._slot_count
        while len(chosen) < needed:
            slot = newer[end] if self._hand == end else self._hand
            if slot == end:
                break
            if used[slot]:
                used[slot] = 0
                self._hand = newer[slot]
                continue
            leaf = self._leaf_of(slot, leased)
            if leaf >= 0:
                self._empty(leaf)
                chosen.append(leaf)
        return chosen

    def _leave(self, slot: int) -> None:
        if slot == self._hand:
            self._hand = self._newer[slot]
        super()._leave(slot)

    def _wait(self, slot: int) -> None:
        if slot == self._hand:
            self._hand = self._newer[slot]
        super()._wait(slot)

    def _end_wait(self, slot: int) -> None:
        """Put a slot that waited back where the hand is, which looks at it next."""
        self._waits[slot] = 0
        older, newer, end = self._older, self._newer, self._slot_count
        above = newer[end] if self._hand == end else self._hand
        below = older[above]
        newer[slot], older[slot] = above, below
        newer[below] = older[above] = slot
        self._hand = slot
