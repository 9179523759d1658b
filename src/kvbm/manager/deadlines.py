"""Blocks that are to be dropped at a time, unless another request asks for them before (`max_ttl` of a hint).

What is stored behind such a block is dropped with it: without it, it could not be found. A deadline is no lock either:
whatever is leased, being filled, or continued by blocks that may stay, stays for now, and is looked at again later.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from kvbm.block import BlockKey
from kvbm.manager.pool import EXPIRED, SlotPool

KEYS_MAX = 1 << 18
"""Of all tenants together. The first has half of it: there is room for one tenant more at any time."""
DROPPED_AT_ONCE = 512
AGAIN_S = 30.0
_SPARE_BATCHES = 1024


class _Batch:
    """Consecutive blocks of a chain, and those that came behind them; so many of them are `left` to be dropped, and the
    others have been asked for. `behind`: the chain goes on with this block. It is the `tenant`'s."""

    __slots__ = ("behind", "keys", "left", "tenant")

    def __init__(self, keys: list[BlockKey], behind: BlockKey | None, tenant: str) -> None:
        self.keys, self.behind, self.left, self.tenant = keys, behind, len(keys), tenant


class Deadlines:
    """The deadlines of one space. Owned by the manager's thread."""

    def __init__(self) -> None:
        self._batches: dict[BlockKey, _Batch] = {}
        self._count_of: Counter[str] = Counter()
        self._due: list[tuple[float, int, _Batch]] = []
        self._serial = count()
        self._tidy_at = _SPARE_BATCHES

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, chain: Sequence[BlockKey], first: int, end: int, at_s: float, tenant: str = "") -> int:
        """Drop the blocks of the chain from `first` up to `end` then; of how many that can be noted, the last ones."""
        self.asked(chain[first:end])
        first = max(first, end - self._room(tenant))
        if first < end:
            if len(self._due) >= self._tidy_at:
                self._tidy()
            batch = _Batch(list(chain[first:end]), chain[end] if end < len(chain) else None, tenant)
            self._batches.update(dict.fromkeys(batch.keys, batch))
            self._count(batch, len(batch.keys))
            heapq.heappush(self._due, (at_s, next(self._serial), batch))
        return end - first

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """A request asks for these blocks: what was said of them before counts no more."""
        if not self._batches or self._batches.keys().isdisjoint(keys):
            return
        for key in keys:
            if (batch := self._batches.pop(key, None)) is not None:
                batch.left -= 1
                self._count(batch, -1)
                if 2 * batch.left < len(batch.keys):
                    batch.keys = [each for each in batch.keys if self._batches.get(each) is batch]

    def stored(self, parent: BlockKey | None, keys: Sequence[BlockKey]) -> None:
        """These blocks, which nobody has asked for yet, come behind `parent`."""
        batch = self._batches.get(parent) if parent is not None and self._batches else None
        if batch is not None and self._room(batch.tenant) > 0:
            new = [key for key in keys if key not in self._batches]
            batch.keys += new
            batch.left += len(new)
            self._count(batch, len(new))
            self._batches.update(dict.fromkeys(new, batch))

    def drop(self, pools: Sequence[SlotPool[BlockKey]], now_s: float) -> int:
        """Drop some of what is due, the last blocks first. How many blocks left a tier."""
        dropped, looked_at = 0, 0
        while self._due and self._due[0][0] <= now_s and looked_at < DROPPED_AT_ONCE:
            _, _, batch = heapq.heappop(self._due)
            # What the chain goes on with may stay longer; unless it came later, and goes first.
            behind = batch.behind
            apart = behind is not None and self._batches.get(behind) is not batch
            stays = behind is not None and apart and any(pool.holds(behind) for pool in pools)
            while batch.keys and not stays and looked_at < DROPPED_AT_ONCE:
                looked_at += 1
                key = batch.keys[-1]
                if self._batches.get(key) is batch:
                    dropped += sum(_drop(pool, key, now_s) for pool in pools)
                    stays = any(pool.holds(key) for pool in pools)
                    if stays:
                        break
                    del self._batches[key]
                    batch.left -= 1
                    self._count(batch, -1)
                batch.keys.pop()
            if batch.keys:
                again_s = now_s + AGAIN_S if stays else now_s
                heapq.heappush(self._due, (again_s, next(self._serial), batch))
        return dropped

    def clearing(self) -> Iterator[None]:
        """All blocks were dropped, and none of them can come back: forget what was noted by now, in slices."""
        due, batches = self._due, self._batches
        self._due, self._batches, self._count_of = [], {}, Counter()
        while due or batches:
            del due[-DROPPED_AT_ONCE:]
            for _ in range(min(len(batches), DROPPED_AT_ONCE)):
                batches.popitem()
            yield

    def _room(self, tenant: str) -> int:
        """Of how many more keys of the tenant a deadline can be noted."""
        tenants = len(self._count_of) + (tenant not in self._count_of)
        return max(0, KEYS_MAX // (tenants + 1) - self._count_of[tenant])

    def _count(self, batch: _Batch, more: int) -> None:
        self._count_of[batch.tenant] += more
        if self._count_of[batch.tenant] <= 0:
            del self._count_of[batch.tenant]

    def _tidy(self) -> None:
        """Forget the batches of which nothing is left, once they may be half of all."""
        self._due = [due for due in self._due if due[2].left]
        heapq.heapify(self._due)
        self._tidy_at = 2 * len(self._due) + _SPARE_BATCHES


def _drop(pool: SlotPool[BlockKey], key: BlockKey, now_s: float) -> bool:
    """Drop the block unless it is in use, or somebody has it retained; whether it was dropped."""
    slot = pool.find(key)
    if slot is None or pool.is_leased(slot) or pool.favouring.retains(slot, now_s):
        return False
    pool.evict(slot, EXPIRED)
    return True
