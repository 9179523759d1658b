"""The duel with LRU: what LRU would have hit in a tier of the same size, and how far the tier may differ from it.

LRU keeps the blocks that were asked for last, whatever order they lie in: those of the latest requests, as far back as
they fit. So its shadow needs two counts per request (the blocks that no later request asked for, and those of them that
are in the tier) and no list of blocks.

A block that LRU would hold and the tier does not is a *stake*: if it is asked for, LRU has a hit and the tier has not.
Nothing else can be lost to LRU. So the policy may add to the stakes only while its *credit* covers them. Otherwise it
*holds*: what LRU holds stays, and of the other blocks those with the lowest index go. The credit is `LOSS_MAX` of the
blocks asked for so far, plus the hits by which the tier is ahead. Holding adds no stake, and a stake that was lost is
none any more. So if every stake is covered in full, the tier is never behind by more than `LOSS_MAX` of the blocks
asked for, whatever is asked for.

That leaves most of the gain in a large tier unused, because few stakes are ever lost: 0 to 3 in 10 of them on all
traces that were tried. So the credit covers a share of them, the *price*: what was lost of earlier stakes, with a
margin. The bound then holds as long as no larger share is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

LOSS_MAX = 0.0015
"""The share of all blocks asked for that may be lost to LRU; the aim is 0.002."""
PRICE_MIN, PRICE_MARGIN = 0.25, 1.5
_LOST_SHARE, _LOST_WEIGHT = 0.6, 300.0
"""The share of stakes that is taken to be lost at first, and how many blocks that assumption counts for."""
_CREDIT_SLOTS, _MEMORY_SLOTS = 8, 8
"""Bounds, in tiers, of the credit that is kept, and of the stakes that the price is from."""
_RESUME_SHARE = 0.05


class Duel:
    """Counts hits of the tier and of its LRU shadow. A request's number says how recent a block's last use is.

    `slot_count` is the tier's size, `requests_max` bounds how far the shadow looks back, `price_min` is the least price
    of a stake. Requests after `cutoff` are in LRU's tier, that of the cutoff in part.
    """

    def __init__(self, slot_count: int, requests_max: int, price_min: float = PRICE_MIN) -> None:
        self.holds = False
        self.cutoff = 0
        self.accesses = 0
        self.deficit = 0
        self._credit = 0.0
        self.price_min = price_min
        self._lost, self._unasked = _LOST_SHARE * _LOST_WEIGHT, (1 - _LOST_SHARE) * _LOST_WEIGHT
        self._slot_count = slot_count
        self._requests_max = requests_max
        # Blocks by the request that used them last, and those of them in the tier; then both for all after `cutoff`.
        self._ring = requests_max + 1
        self._blocks, self._there = (array("i", bytes(4 * self._ring)) for _ in range(2))
        self._latest = 0
        self._kept = self._kept_there = 0

    @property
    def stakes(self) -> int:
        """Blocks that LRU would hold and the tier does not, at most."""
        at = self.cutoff % self._ring
        of_cutoff = min(self._slot_count - self._kept, self._blocks[at] - self._there[at])
        return self._kept - self._kept_there + max(0, of_cutoff)

    @property
    def price(self) -> float:
        """The share of the stakes that the credit has to cover."""
        lost = self._lost / (self._lost + self._unasked)
        return min(1.0, max(self.price_min, PRICE_MARGIN * lost))

    def decide(self, needed: int, may_resume: bool) -> bool:
        """Before `needed` blocks make room: whether to hold. True when that has changed."""
        cover = self._credit - self.price * min(self.stakes + needed, self._slot_count)
        if self.holds:
            changed = may_resume and cover >= _RESUME_SHARE * self._credit
        else:
            changed = cover < 0
        self.holds ^= changed
        return changed

    def lru_hits(self, runs: Iterable[tuple[int, int]]) -> int:
        """The chain's blocks that LRU would hold. `runs` has (the request that used it last, blocks) of each run."""
        hits, spare = 0, self._slot_count - self._kept
        for last_request, blocks in runs:
            there = blocks if last_request > self.cutoff else min(blocks, spare)
            if last_request <= self.cutoff:
                there = there if last_request == self.cutoff else 0
                spare -= there
            hits += there
            if there < blocks:
                break
        return hits

    def moved(self, last_request: int, request: int, blocks: int, there: int) -> None:
        """Blocks that an earlier request used last (0: none did) are used by this one; so many of them are in the tier.

        LRU does not hold blocks that came without a request (0), or with one that is behind the cutoff by now.
        """
        if last_request > self.cutoff:
            self._lost += blocks - there
        self._add(last_request, -blocks, -there)
        self._add(request, blocks, there)

    def came(self, last_request: int, there: int) -> None:
        """So many blocks that this request used last came into the tier; below 0 they left it."""
        self._add(last_request, 0, there)

    def forgotten(self, last_request: int, blocks: int) -> None:
        """Blocks that are not in the tier left the history."""
        self._add(last_request, -blocks, 0)

    def begin(self, request: int) -> None:
        """A request comes; requests too far back to be counted one by one are forgotten."""
        self._drop(request - self._requests_max)
        self._latest = request
        self._blocks[request % self._ring] = self._there[request % self._ring] = 0

    def end(self, lru_hits: int, hits: int, blocks: int) -> None:
        """The request used its blocks."""
        while self._kept > self._slot_count and self.cutoff < self._latest:
            self._drop(self.cutoff + 1)
        self.accesses += blocks
        self.deficit += lru_hits - hits
        credit = self._credit + LOSS_MAX * blocks + hits - lru_hits
        self._credit = min(credit, float(_CREDIT_SLOTS * self._slot_count))
        if self._lost + self._unasked > _MEMORY_SLOTS * self._slot_count + _LOST_WEIGHT:
            self._lost, self._unasked = self._lost / 2, self._unasked / 2

    def _add(self, request: int, blocks: int, there: int) -> None:
        if request >= self.cutoff and request > 0:
            self._blocks[request % self._ring] += blocks
            self._there[request % self._ring] += there
            if request > self.cutoff:
                self._kept += blocks
                self._kept_there += there

    def _drop(self, cutoff: int) -> None:
        while self.cutoff < cutoff:
            self.cutoff += 1
            at = self.cutoff % self._ring
            self._kept -= self._blocks[at]
            self._kept_there -= self._there[at]
            self._unasked += self._blocks[at] - self._there[at]
