"""An eviction policy: first in, first out, leaves first. See docs/guides/extending.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence


class LeafFirstFifo:
    """Evicts the leaf that came first. A leaf is a block none of whose continuations is in the tier.

    The contract is `kvbm.policy.EvictionPolicy`. Each victim costs a look at every block: right, and slow in a large
    tier; `kvbm.policy.lru` shows how to keep a queue of leaves.
    """

    def __init__(self, slot_count: int) -> None:
        # Each slot's parent, the slot of the block before it, or -1; in order of arrival.
        self._parents: dict[int, int] = {}
        self._continuations: Counter[int] = Counter()  # slot → how many blocks in the tier continue it
        self._evictable: set[int] = set()

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """The time of the last use does not matter here."""

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        """The length of an answer does not matter either."""

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        for slot in slots:
            self._parents[slot] = parent
            self._continuations[parent] += 1
            parent = slot

    def evictable(self, slots: Iterable[int]) -> None:
        self._evictable.update(slots)

    def removed(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._forget(slot)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < needed:
            leaf = next((slot for slot in self._parents if self._may_go(slot, leased)), None)
            if leaf is None:
                break
            self._forget(leaf)
            chosen.append(leaf)
        return chosen

    def _may_go(self, slot: int, leased: Container[int]) -> bool:
        return slot in self._evictable and not self._continuations[slot] and slot not in leased

    def _forget(self, slot: int) -> None:
        self._continuations[self._parents.pop(slot)] -= 1
        self._evictable.discard(slot)
        if self._continuations.pop(slot, 0):
            # The block was corrupt, for example: its continuations begin chains of their own.
            orphans = [child for child, parent in self._parents.items() if parent == slot]
            self._parents.update(dict.fromkeys(orphans, -1))
