"""The most that any cache of a size could hit: it evicts what is needed again furthest in the future.

Belady's MIN (IBM Systems Journal 5(2), 1966) for chains, with bypass: when the cache is full, the block that is
needed last goes, be it resident or the newcomer itself. A prefix is needed again no later than any of its
continuations, so leaves go first by themselves, the resident blocks always are whole prefixes, and the optimum over
single blocks is the optimum over chains. It knows the future: no policy object can be driven by it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy

from kvbm.sim.replay.replay import Replay
from kvbm.sim.traces.trace import PROGRESS_REQUESTS, Trace

NAME = "belady"
"""Its name on the command line."""

_ABSENT = -1


def optimum(
    trace: Trace, capacity: int, on_progress: Callable[[int], None] = lambda requests: None
) -> Replay:
    """Replay with the best decisions for `capacity` blocks. Arguments and answer as in `replay`."""
    assert capacity > 0
    cache = _Foresight(capacity, trace.unique_blocks)
    uses, starts = next_requests(trace), trace.starts
    hits_by_request = []
    for number, request in enumerate(trace.requests):
        following = uses[starts[number] : starts[number + 1]].tolist()
        hits_by_request.append(cache.request(request.blocks, following, len(trace.requests)))
        if number % PROGRESS_REQUESTS == 0:
            on_progress(number)
    on_progress(len(trace.requests))
    return Replay(
        trace.accesses,
        sum(hits_by_request),
        cache.inserted_blocks,
        cache.evicted_blocks,
        tuple(hits_by_request),
    )


def next_requests(trace: Trace) -> Any:
    """For every block asked for (`Trace.flat`), the next request that asks for it; the number of requests if none."""
    count = len(trace.requests)
    request_of = numpy.repeat(numpy.arange(count), numpy.diff(trace.starts))
    # Stable: uses of one block stay in their order.
    by_block = numpy.argsort(trace.flat, kind="stable")
    blocks, requests = trace.flat[by_block], request_of[by_block]
    following = numpy.full(len(blocks), count)
    again = blocks[1:] == blocks[:-1]
    following[:-1][again] = requests[1:][again]
    answer = numpy.empty_like(following)
    answer[by_block] = following
    return answer


class _Foresight:
    """A cache of `capacity` blocks that knows when each block is needed again."""

    def __init__(self, capacity: int, unique_blocks: int) -> None:
        self.inserted_blocks = 0
        self.evicted_blocks = 0
        self._free = capacity
        self._unique = unique_blocks
        self._needed = [_ABSENT] * unique_blocks
        self._parent = [_ABSENT] * unique_blocks
        self._children = [0] * unique_blocks
        # -(needed * unique + block) of leaves, soonest out first; entries that have changed since are outdated.
        self._leaves: list[int] = []

    def request(self, blocks: tuple[int, ...] | Any, following: list[int], never: int) -> int:
        """Look the chain up, then keep what is worth it. `following`: when each block is needed next."""
        needed, children = self._needed, self._children
        held = list(map(needed.__getitem__, blocks))
        hits = held.index(_ABSENT) if _ABSENT in held else len(held)
        for i in range(hits):
            needed[blocks[i]] = following[i]
        last = blocks[hits - 1] if hits else _ABSENT
        if hits and not children[last]:
            self._queue(last)
        # Needs along a chain never get sooner, so nothing behind the first block without one is worth keeping.
        end = following.index(never) if following[-1] == never else len(following)
        kept = hits
        while kept < end and (self._free or self._make_room(following[kept])):
            block = blocks[kept]
            needed[block] = following[kept]
            self._free -= 1
            self._parent[block] = last
            if last >= 0:
                children[last] += 1
            last = block
            kept += 1
        if kept > hits:
            self.inserted_blocks += kept - hits
            self._queue(last)
        return hits

    def _make_room(self, needed_by: int) -> bool:
        """Evict the leaf needed last, unless it is needed before the newcomer."""
        leaves, needed, children = self._leaves, self._needed, self._children
        while leaves:
            when, block = divmod(-leaves[0], self._unique)
            if needed[block] != when or children[block]:
                heapq.heappop(leaves)
                continue
            if when <= needed_by:
                return False
            heapq.heappop(leaves)
            needed[block] = _ABSENT
            self._free += 1
            self.evicted_blocks += 1
            parent = self._parent[block]
            if parent >= 0:
                children[parent] -= 1
                if not children[parent]:
                    self._queue(parent)
            return True
        return False

    def _queue(self, block: int) -> None:
        heapq.heappush(self._leaves, -(self._needed[block] * self._unique + block))
