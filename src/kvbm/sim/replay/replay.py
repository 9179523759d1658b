"""Replay of a trace through one tier: how many blocks hit. A block counts only when everything before it hit too."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from kvbm.policy import EvictionPolicy
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.said import Told
from kvbm.sim.traces.trace import PROGRESS_REQUESTS, Trace


@dataclass(frozen=True, slots=True)
class Replay:
    """The counts of a replay. Blocks are those of prompts."""

    accesses: int
    hits: int
    inserted: int
    evicted: int
    hits_by_request: tuple[int, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of the blocks asked for that hit; 0 for an empty trace."""
        return self.hits / self.accesses if self.accesses else 0.0


def replay(
    trace: Trace,
    capacity: int,
    policy: EvictionPolicy,
    on_progress: Callable[[int], None] = lambda requests: None,
    told: Told | None = None,
) -> Replay:
    """Every request in its order: look up, then insert what missed. Deterministic.

    `capacity` is in blocks, `policy` an object made for as many slots. `on_progress` is called now
    and then with the number of requests that are done. `told` is what clients say.
    """
    tier = SimulatedTier(capacity, policy)
    hits_by_request: list[int] = []
    running: list[tuple[float, int, int, int]] = []
    for number, request in enumerate(trace.requests):
        now_s = request.arrived_s
        while running and running[0][0] <= now_s:
            finished_s, ended, last, output_tokens = heapq.heappop(running)
            if told is not None and told.at_end:
                tier.hinted(last, told.hints[ended], finished_s)
            tier.finished(last, output_tokens, finished_s)
        hits = tier.requested(list(request.blocks), now_s)
        if told is not None:
            tier.hinted(request.blocks[-1], told.at_arrival(number), now_s)
        tier.insert(request.blocks, hits, now_s)
        hits_by_request.append(hits)
        ending = (now_s + request.seconds, number, request.blocks[-1], request.output_tokens)
        heapq.heappush(running, ending)
        if number % PROGRESS_REQUESTS == 0:
            on_progress(number)
    on_progress(len(trace.requests))
    return Replay(
        trace.accesses,
        sum(hits_by_request),
        tier.inserted_count,
        tier.evicted_count,
        tuple(hits_by_request),
    )
