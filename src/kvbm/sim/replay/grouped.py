"""Replay of a trace for a model with several groups, through the manager's pool and the rules of engine and manager.

A slot holds a block of one group, and all slots have one size, as vLLM's pages do. What a request finds, is told to
the policies and stores is as in `manager.lookups` and `leader.group_offers`: the blocks of all tokens, and of the other
groups the tails at boundaries where a prompt may be taken up again. Generated tokens are in no trace before a later
prompt repeats them, so a turn ends where its prompt does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kvbm.block import Tier
from kvbm.grouping import WINDOWS, Grouping, Place, Reach
from kvbm.groups import GroupKind
from kvbm.manager.pool import SlotPool
from kvbm.policy import EvictionPolicy
from kvbm.sim.replay.replay import Replay
from kvbm.sim.traces.trace import PROGRESS_REQUESTS, Trace, TraceRequest


class Tail(NamedTuple):
    """What groups of these kinds need at a boundary."""

    boundary: int
    kinds: Sequence[GroupKind]


class GroupedTier:
    """A tier of blocks of several groups, for a trace of `unique_blocks` blocks. Slots are filled at once."""

    def __init__(
        self, slot_count: int, policy: EvictionPolicy, grouping: Grouping, unique_blocks: int
    ) -> None:
        self.pool: SlotPool[int] = SlotPool(Tier.HOST, slot_count, policy)
        self.inserted_count = 0
        self._grouping = grouping
        self._unique_blocks = unique_blocks

    def requested(self, blocks: Sequence[int], now_s: float) -> Reach:
        """Find how far a prompt is held, and tell the policy."""
        grouping = self._grouping
        limit = grouping.floor(len(blocks))
        chain = self.keys(blocks, grouping.chain(0, limit))

        def held(group: int, numbers: range) -> bytes:
            return self._held(self.keys(blocks, [Place(group, number) for number in numbers]))

        found = grouping.reach(limit, self._held(chain), held)
        # As a lookup does; that a lease ends tells some policies to look at a block again.
        leased = self.pool.find_leading(self.keys(blocks, grouping.run(found.boundary, 0)))
        self.pool.lease_all(leased)
        self.pool.requested(chain, now_s)
        for boundary in grouping.uses(found):
            self.pool.requested_tail(self.keys(blocks, grouping.tail(boundary)), now_s)
        self.pool.unlease_all(leased)
        return found

    def insert(self, request: TraceRequest, block_tokens: int, found: Reach, now_s: float) -> None:
        """Store what the request computed, as far as the policy finds it worth it."""
        grouping, blocks = self._grouping, request.blocks
        limit = grouping.floor(len(blocks))
        chain = self.keys(blocks, grouping.chain(0, limit))
        start = grouping.chain_length(found.boundary)
        self._store(chain[start:], chain[start - 1] if start else None, now_s)
        for boundary, kinds in tails(grouping, request, block_tokens, found):
            before = self.keys(blocks, grouping.parent(boundary))
            tail = self.keys(blocks, grouping.tail(boundary, kinds=kinds))
            self._store(tail, before[0] if before else None, now_s, tail=True)

    def _store(self, keys: Sequence[int], parent: int | None, now_s: float, tail: bool = False) -> None:
        """As `Space.reserve` and then its `commit`."""
        pool, filled = self.pool, list[int]()
        for held, each in groupby(zip(pool.held(keys), keys, strict=True), key=itemgetter(0)):
            run = [key for _, key in each]
            if not held:
                if parent is not None and not pool.holds(parent):
                    break
                slots = pool.reserve_chain(run, parent, now_s, tail=tail)
                filled += slots
                if len(slots) < len(run):
                    break
            parent = run[-1]
        pool.commit_all(filled)
        self.inserted_count += len(filled)

    def finished(self, request: TraceRequest, now_s: float) -> None:
        """The request has ended."""
        for last in self.keys(
            request.blocks, self._grouping.parent(self._grouping.floor(len(request.blocks)))
        ):
            self.pool.finished(last, request.output_tokens, now_s)

    def keys(self, blocks: Sequence[int], places: Sequence[Place]) -> list[int]:
        """A number for each block of a group: those of the first group are the trace's own."""
        groups, unique = self._grouping.groups, self._unique_blocks
        return [blocks[(block + 1) * groups[group].span - 1] + group * unique for group, block in places]

    def _held(self, keys: list[int]) -> bytes:
        return bytes(slot is not None for slot in self.pool.find_all(keys))


def tails(grouping: Grouping, request: TraceRequest, block_tokens: int, found: Reach) -> list[Tail]:
    """What a request stores besides the blocks of all tokens: where the same prompt could be taken up again, where the
    turn ends, and where the prompt leaves what is held without being taken up there."""
    complete = min(request.prompt_tokens // block_tokens, len(request.blocks))
    again = min((request.prompt_tokens - 1) // block_tokens, complete)
    ends = {grouping.floor(blocks) for blocks in (again, complete)}
    chosen: dict[int, Sequence[GroupKind]] = dict.fromkeys(ends, tuple(GroupKind))
    if found.full > found.boundary:
        chosen.setdefault(found.full, WINDOWS)
    return [Tail(boundary, chosen[boundary]) for boundary in sorted(chosen) if boundary > found.boundary]


def grouped_replay(
    trace: Trace,
    grouping: Grouping,
    slot_count: int,
    policy: EvictionPolicy,
    on_progress: Callable[[int], None] = lambda requests: None,
) -> Replay:
    """As `replay`, in `slot_count` slots. Hits are blocks of the trace: those before the boundary of each request."""
    tier = GroupedTier(slot_count, policy, grouping, trace.unique_blocks)
    hits_by_request: list[int] = []
    running: list[tuple[float, int]] = []
    for number, request in enumerate(trace.requests):
        now_s = request.arrived_s
        while running and running[0][0] <= now_s:
            finished_s, ended = heapq.heappop(running)
            tier.finished(trace.requests[ended], finished_s)
        found = tier.requested(request.blocks, now_s)
        tier.insert(request, trace.block_tokens, found, now_s)
        hits_by_request.append(found.boundary)
        heapq.heappush(running, (now_s + request.seconds, number))
        if number % PROGRESS_REQUESTS == 0:
            on_progress(number)
    on_progress(len(trace.requests))
    return Replay(
        trace.accesses,
        sum(hits_by_request),
        tier.inserted_count,
        tier.pool.evicted_count,
        tuple(hits_by_request),
    )
