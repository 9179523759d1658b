"""ARC, leaves before parents: blocks used once and blocks used again share the tier as the misses advise.

Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence

from kvbm.policy.leaf_first import LeafFirstQueues

_ONCE, _AGAIN, _UNKNOWN = 0, 1, 2
_QUEUE_AFTER_USE = bytes((_AGAIN, _AGAIN))


class Arc(LeafFirstQueues):
    """ARC over `slot_count` slots; see `leaf_first` for how leaves come first.

    Blocks stand in two queues in order of use: those asked for once since they came (the paper's T1), and those asked
    for again (T2). The keys of victims are remembered as *ghosts* of their queue (B1, B2). A newcomer whose ghost is
    known enters the second queue, and moves the border: a ghost of the first says that this queue was too short, one
    of the second says the same of that.

    A use costs one comparison where the whole chain was last used together, else a few writes. Memory: 35 bytes a
    slot, and at most `slot_count` ghosts (more only between `victims` and `inserted`), about 160 bytes each where
    no other object keeps the key.
    """

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count, queue_count=2)
        self._keys: list[Hashable] = [None] * slot_count
        self._ghosts: tuple[OrderedDict[Hashable, None], ...] = (OrderedDict(), OrderedDict())
        # Where the border should be: blocks in the first queue.
        self._once_target = 0.0
        # Keys of the run that room was made for last whose ghosts were found.
        self._returning: set[Hashable] = set()

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Make each block that is here the newest of those asked for again."""
        self._use(slots, _QUEUE_AFTER_USE)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots, each in the queue that its ghost says."""
        if not slots:
            return
        self._fill(slots, parent)
        kept, returning, (once, again) = self._keys, self._returning, self._ghosts
        for key, slot in zip(keys, slots, strict=True):
            kept[slot] = key
        if not returning and once.keys().isdisjoint(keys) and again.keys().isdisjoint(keys):
            self._enter_all(slots, _ONCE)
        else:
            for slot in reversed(slots):
                known = kept[slot] in returning or self._recall(kept[slot]) != _UNKNOWN
                self._enter(slot, _AGAIN if known else _ONCE)
            returning.clear()
        # The paper drops a ghost before it makes a new one; here it is done afterwards, which leaves the same ones, so
        # that a whole run finds its ghosts before its victims drive them out.
        sizes = self._sizes
        while once and sizes[_ONCE] + len(once) > self._slot_count:
            once.popitem(last=False)
        while again and sizes[_ONCE] + sizes[_AGAIN] + len(once) + len(again) > 2 * self._slot_count:
            again.popitem(last=False)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The oldest of the queue beyond its border that may go; every newcomer is worth a slot.

        Decided newcomer by newcomer, as if each was inserted before the next.
        """
        chosen: list[int] = []
        self._returning.clear()
        arriving = 0
        free_count = len(incoming) - needed
        # Where more has to go than comes, the first victims make room for no newcomer.
        for index in range(min(0, free_count), len(incoming)):
            known = self._recall(incoming[index]) if index >= 0 else _UNKNOWN
            if index >= free_count:
                slot = self._replace(self._sizes[_ONCE] + arriving, known, leased)
                if slot < 0:
                    break
                chosen.append(slot)
            if known != _UNKNOWN:
                self._returning.add(incoming[index])
            elif index >= 0:
                arriving += 1
        return chosen

    def _recall(self, key: Hashable) -> int:
        """Take the key out of the ghosts and move the border; the queue whose ghost it was."""
        once, again = self._ghosts
        if key in once:
            grown = self._once_target + max(len(again) / len(once), 1.0)
            self._once_target = min(grown, float(self._slot_count))
            del once[key]
            return _ONCE
        if key in again:
            shrunk = self._once_target - max(len(once) / len(again), 1.0)
            self._once_target = max(shrunk, 0.0)
            del again[key]
            return _AGAIN
        return _UNKNOWN

    def _replace(self, once_count: int, known: int, leased: Container[int]) -> int:
        """Evict for a newcomer while the first queue counts so many; the slot, or -1."""
        beyond = once_count > self._once_target or (known == _AGAIN and once_count == self._once_target)
        slot = self._candidate(_ONCE if beyond else _AGAIN, leased)
        if slot < 0:
            slot = self._candidate(_AGAIN if beyond else _ONCE, leased)
        if slot >= 0:
            self._ghosts[self._queue[slot]][self._keys[slot]] = None
            self._keys[slot] = None
            self._empty(slot)
        return slot
