"""S3-FIFO, leaves before parents: most new blocks are evicted soon, those used again are kept long.

Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence

from kvbm.policy.leaf_first import LeafFirstQueues

SMALL_SHARE = 0.1
GHOST_SHARE = 0.9
USES_TO_MOVE = 2
USES_MAX = 3

_SMALL, _MAIN = 0, 1


class S3Fifo(LeafFirstQueues):
    """S3-FIFO over `slot_count` slots; see `leaf_first` for how leaves come first.

    New blocks enter a small first-in-first-out queue meant for `small_share` of the slots. The oldest there goes, and
    its key is remembered as a *ghost*, unless it was used `uses_to_move` times or continued, which moves it to the
    main queue. A newcomer whose ghost is still known enters the main queue at once. The main queue gives its oldest
    block another round for each use, up to three.

    A use is one write to an array. Memory: 36 bytes a slot, and at most `ghost_share` × `slot_count` ghosts, about
    160 bytes each where no other object keeps the key.
    """

    def __init__(
        self,
        slot_count: int,
        small_share: float = SMALL_SHARE,
        ghost_share: float = GHOST_SHARE,
        uses_to_move: int = USES_TO_MOVE,
    ) -> None:
        assert 0.0 <= small_share < 1.0 and ghost_share >= 0.0 and 0 < uses_to_move <= USES_MAX
        super().__init__(slot_count, queue_count=2)
        self._main_max = slot_count - int(slot_count * small_share)
        self._ghosts_max = int(slot_count * ghost_share)
        self._uses_to_move = uses_to_move
        self._uses = bytearray(slot_count)
        self._keys: list[Hashable] = [None] * slot_count
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Count a use of each block that is here, up to three."""
        uses = self._uses
        for slot in slots:
            if slot >= 0 and uses[slot] < USES_MAX:
                uses[slot] += 1

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots: in the main queue where the ghost is known, else in the small one."""
        if not slots:
            return
        self._fill(slots, parent)
        ghosts, uses, kept = self._ghosts, self._uses, self._keys
        for key, slot in zip(keys, slots, strict=True):
            kept[slot] = key
            uses[slot] = 0
        if ghosts.keys().isdisjoint(keys):
            self._enter_all(slots, _SMALL)
        else:
            for slot in reversed(slots):
                self._enter(slot, _MAIN if kept[slot] in ghosts else _SMALL)
                ghosts.pop(kept[slot], None)
        # Only now, so that the ghosts of the victims do not drive out those of the blocks that they made room for.
        while len(ghosts) > self._ghosts_max:
            ghosts.popitem(last=False)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The next in turn that may go; every newcomer is worth a slot."""
        chosen: list[int] = []
        while len(chosen) < needed and (slot := self._next_in_turn()) >= 0:
            if self._goes_on(slot) or (leaf := self._leaf_of(slot, leased)) < 0:
                continue
            if self._queue[leaf] == _SMALL:
                self._ghosts[self._keys[leaf]] = None
            self._keys[leaf] = None
            self._empty(leaf)
            chosen.append(leaf)
        return chosen

    def _next_in_turn(self) -> int:
        """The oldest of the queue that has to give one up, or of the other where that one is empty; or -1."""
        count, newer = self._slot_count, self._newer
        small, main = newer[count + _SMALL], newer[count + _MAIN]
        first, second = (main, small) if self._sizes[_MAIN] > self._main_max else (small, main)
        if first < count:
            return first
        return second if second < count else -1

    def _goes_on(self, slot: int) -> bool:
        """Move the slot to the main queue's newest end when its uses have earned that."""
        uses = self._uses[slot]
        if self._queue[slot] == _MAIN:
            if not uses:
                return False
            self._uses[slot] = uses - 1
        else:
            if uses < self._uses_to_move and self.tree.child[slot] < 0:
                return False
            self._uses[slot] = 0
        self._move(slot, _MAIN)
        return True
