"""The duel with LRU: what LRU would have hit in a tier of the same size, and who decides.

LRU keeps the blocks that were asked for last, whatever order they lie in: those of the latest requests, as far back
as they fit. So its shadow needs one count per request (the blocks that nobody asked for since) and no list of blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

LOSS_MAX, LOSS_BLOCKS, LOSS_SHARE = 0.001, 100, 0.05
"""LRU may be ahead by this share of all blocks asked for, and by so many blocks or this share of the tier."""
_LOSS_FORGIVEN = 0.6
"""It decides no longer once it is ahead by this share of that: others get another chance, having learnt meanwhile."""


class Duel:
    """Counts hits of the tier and of its LRU shadow. A request's number says how recent a block's last use is.

    `slot_count` is the tier's size, `requests_max` bounds how far the shadow looks back.
    """

    def __init__(self, slot_count: int, requests_max: int) -> None:
        self.lru_decides = False
        self.accesses = 0
        self.deficit = 0
        self._slot_count = slot_count
        self._requests_max = requests_max
        # Blocks by the request that used them last; those after `_cutoff` are in LRU's tier, `_kept` altogether,
        # and as many of those at the cutoff as there is room for.
        self._blocks = array("i", bytes(4 * requests_max))
        self._cutoff = 0
        self._kept = 0

    def lru_hits(self, runs: Iterable[tuple[int, int]]) -> int:
        """How many blocks of a chain are in LRU's tier now: (the request that used it last, blocks) of each run."""
        hits, spare = 0, self._slot_count - self._kept
        for last_request, blocks in runs:
            there = blocks if last_request > self._cutoff else min(blocks, spare)
            if last_request <= self._cutoff:
                there = there if last_request == self._cutoff else 0
                spare -= there
            hits += there
            if there < blocks:
                break
        return hits

    def moved(self, last_request: int, request: int, blocks: int) -> None:
        """Blocks that an earlier request used last (0: none did) are used by this one."""
        if last_request > self._cutoff:
            self._blocks[last_request % self._requests_max] -= blocks
            self._kept -= blocks
        self._blocks[request % self._requests_max] += blocks
        self._kept += blocks

    def forgotten(self, last_request: int, blocks: int) -> None:
        """Blocks left the history."""
        if last_request > self._cutoff:
            self._blocks[last_request % self._requests_max] -= blocks
            self._kept -= blocks

    def begin(self, request: int) -> None:
        """A request comes; what is too far back to be told apart is gone."""
        if request - self._requests_max > self._cutoff:
            self._drop(request - self._requests_max)
        self._blocks[request % self._requests_max] = 0

    def end(self, lru_hits: int, hits: int, blocks: int) -> bool:
        """The request used its blocks; True when who decides has changed."""
        while self._kept > self._slot_count:
            self._drop(self._cutoff + 1)
        self.accesses += blocks
        self.deficit += lru_hits - hits
        limit = LOSS_MAX * self.accesses + min(LOSS_BLOCKS, LOSS_SHARE * self._slot_count)
        before = self.lru_decides
        allowed = _LOSS_FORGIVEN * limit if before else limit
        self.lru_decides = self.deficit > allowed
        return before != self.lru_decides

    def _drop(self, cutoff: int) -> None:
        while self._cutoff < cutoff:
            self._cutoff += 1
            self._kept -= self._blocks[self._cutoff % self._requests_max]
