"""Hit rates of LRU for all sizes at once, exactly.

Leaf-first LRU keeps blocks in one order whatever the size: by last use, and within one request from its first block
on (a prefix outlives its continuations). So a block hits in every cache larger than the number of blocks before it in
that order: its stack distance (Mattson, Gecsei, Slutz, Traiger, IBM Systems Journal 9(2), 1970). A request touches a
whole chain, and the rest of an earlier request's chain lies together in the order. So distances are found for
runs of blocks, not for blocks: the cost is O(log requests) for each earlier request that a chain is left of.

Of requests that arrive at the very same time the order counts here, and the slot number in `LeafFirstLru`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

from kvbm.sim.traces.trace import Trace


@dataclass(frozen=True)
class LruCurve:
    """`hits[c]`: how many of `accesses` blocks hit in an LRU cache of c blocks (a numpy array, from 0 on)."""

    accesses: int
    hits: Any

    def hit_rate(self, capacity: int) -> float:
        """Share of the blocks asked for that hit in a cache of so many blocks."""
        if not self.accesses:
            return 0.0
        return float(self.hits[min(capacity, len(self.hits) - 1)]) / self.accesses

    def points(self, count: int) -> list[tuple[int, float]]:
        """About `count` sizes, evenly spaced in their logarithm, with their hit rates."""
        largest = max(len(self.hits) - 1, 1)
        sizes = numpy.unique(numpy.geomspace(1, largest, count).round().astype(int))
        return [(int(size), self.hit_rate(int(size))) for size in sizes]


def lru_curve(trace: Trace) -> LruCurve:
    """The curve of a trace, from no cache at all to one that holds everything."""
    flat, starts = trace.flat, trace.starts
    last_use = numpy.full(trace.unique_blocks, -1)
    # How many blocks were used last by each request, and how the number of hits grows with the size: `growth` is
    # summed twice, because a run of blocks adds one hit at each of as many consecutive sizes.
    left = _Counts(len(trace.requests))
    growth = numpy.zeros(trace.unique_blocks + 2, numpy.int64)
    for number in range(len(trace.requests)):
        blocks = flat[starts[number] : starts[number + 1]]
        uses = last_use[blocks]
        # A request for a block is one for all before it: known blocks come first, later uses before earlier ones.
        known = int(numpy.count_nonzero(uses >= 0))
        edges = [0, *(numpy.flatnonzero(uses[1:known] != uses[: max(known - 1, 0)]) + 1).tolist(), known]
        runs = [(int(uses[start]), stop - start) for start, stop in pairwise(edges) if stop > start]
        for earlier, length in runs:
            before = left.after(earlier)
            growth[before + 1] += 1
            growth[before + length + 1] -= 1
        for earlier, length in runs:
            left.add(earlier, -length)
        left.add(number, len(blocks))
        last_use[blocks] = number
    hits = numpy.cumsum(numpy.cumsum(growth))[: trace.unique_blocks + 1]
    return LruCurve(trace.accesses, hits)


class _Counts:
    """Counts by position, with sums in O(log n): a binary indexed tree (Fenwick, 1994)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._total = 0

    def add(self, position: int, count: int) -> None:
        """Raise one count."""
        self._total += count
        sums, i = self._sums, position + 1
        while i < len(sums):
            sums[i] += count
            i += i & -i

    def after(self, position: int) -> int:
        """The sum of all counts behind the position."""
        upto, i = 0, position + 1
        while i:
            upto += self._sums[i]
            i &= i - 1
        return self._total - upto
