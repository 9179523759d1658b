"""The duel with LRU: what LRU would have hit in a tier of the same size, and which of the two decides.

LRU keeps the blocks that were asked for last, whatever order they lie in: those of the latest requests, as far back as
they fit. So its shadow needs one count per request (the blocks that no later request asked for) and no list of blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

LOSS_MAX = 0.0004
"""One try may lose this share of all blocks asked for to LRU, or of those of an hour if that is more."""
HORIZON_S, _ELAPSED_S_MIN = 3600.0, 60.0
PAUSE_S, PAUSE_S_MAX = 300.0, 86_400.0
"""LRU decides for so long after the first try that lost as much; twice as long after each further one, up to a day."""


class Duel:
    """Counts hits of the tier and of its LRU shadow. A request's number says how recent a block's last use is.

    `slot_count` is the tier's size, `requests_max` bounds how far the shadow looks back.
    """

    def __init__(self, slot_count: int, requests_max: int) -> None:
        self.lru_decides = False
        self._began_s = -1.0
        self._pause_s = PAUSE_S
        self._resumes_s = 0.0
        self._lost_before = 0
        self.accesses = 0
        self.deficit = 0
        self._slot_count = slot_count
        self._requests_max = requests_max
        # Blocks by the request that used them last; those after `_cutoff` are in LRU's tier, `_kept` altogether,
        # and as many of those at the cutoff as there is room for.
        self._blocks = array("i", bytes(4 * requests_max))
        self._cutoff = self._latest = 0
        self._kept = 0

    def lru_hits(self, runs: Iterable[tuple[int, int]]) -> int:
        """The chain's blocks that LRU would hold. `runs` has (the request that used it last, blocks) of each run."""
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
        """Blocks that an earlier request used last (0: none did) are used by this one.

        LRU does not hold blocks that came without a request (0), or with one that is behind the cutoff by now.
        """
        self.forgotten(last_request, blocks)
        if request > self._cutoff:
            self._blocks[request % self._requests_max] += blocks
            self._kept += blocks

    def forgotten(self, last_request: int, blocks: int) -> None:
        """Blocks left the history."""
        if last_request > self._cutoff:
            self._blocks[last_request % self._requests_max] -= blocks
            self._kept -= blocks

    def begin(self, request: int) -> None:
        """A request comes; requests too far back to be counted one by one are forgotten."""
        if request - self._requests_max > self._cutoff:
            self._drop(request - self._requests_max)
        self._latest = request
        self._blocks[request % self._requests_max] = 0

    def end(self, lru_hits: int, hits: int, blocks: int, now_s: float) -> bool:
        """The request used its blocks. True when the policy that decides has changed."""
        while self._kept > self._slot_count and self._cutoff < self._latest:
            self._drop(self._cutoff + 1)
        self.accesses += blocks
        self.deficit += lru_hits - hits
        if self._began_s < 0:
            self._began_s = now_s
        elapsed_s = max(now_s - self._began_s, _ELAPSED_S_MIN)
        if self.lru_decides:
            if now_s < self._resumes_s:
                return False
            self._lost_before = max(0, self.deficit)
        else:
            allowed = LOSS_MAX * self.accesses * max(1.0, HORIZON_S / elapsed_s)
            if self.deficit <= self._lost_before + allowed:
                return False
            self._resumes_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        self.lru_decides = not self.lru_decides
        return True

    def _drop(self, cutoff: int) -> None:
        while self._cutoff < cutoff:
            self._cutoff += 1
            self._kept -= self._blocks[self._cutoff % self._requests_max]
