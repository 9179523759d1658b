"""Replay of a trace through several nodes with host memory each, and perhaps a store that they share. It takes no time:
what is asked for is there at once, and a block counts only when everything before it hit too."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbm.policy import make_policy
from kvbm.sim.serving.store import SimulatedStore, StoreRules, StoreUse
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.conversations import NO_REQUEST, predecessors
from kvbm.sim.traces.trace import PROGRESS_REQUESTS, Trace

ROUTES = ("round-robin", "session", "random")
"""How requests come to nodes: one after the other, conversations staying on one node, or by chance."""


def routed(trace: Trace, node_count: int, how: str, seed: int = 0) -> list[int]:
    """The node of each request. New conversations go to one node after the other, where `how` is `session`."""
    if how == "random":
        chance = random.Random(seed)
        return [int(chance.random() * node_count) for _ in trace.requests]
    if how == "round-robin":
        return [number % node_count for number in range(len(trace.requests))]
    assert how == "session"
    nodes: list[int] = []
    begun = 0
    for before in predecessors(trace):
        if before == NO_REQUEST:
            begun += 1
        nodes.append(begun % node_count if before == NO_REQUEST else nodes[before])
    return nodes


@dataclass(slots=True)
class FleetReplay:
    """The counts of a replay. Blocks are those of prompts; `hits_by_request` has (host memory, store) for each."""

    accesses: int
    host_hits: int = 0
    store_hits: int = 0
    use: StoreUse | None = None
    store_blocks: int = 0
    """What lay in the store in the end."""
    hits_by_request: list[tuple[int, int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the blocks asked for that hit, wherever."""
        return (self.host_hits + self.store_hits) / self.accesses if self.accesses else 0.0

    @property
    def store_hit_rate(self) -> float:
        """Share of the blocks asked for that came from the store."""
        return self.store_hits / self.accesses if self.accesses else 0.0


def fleet_replay(
    trace: Trace,
    nodes: Sequence[int],
    node_count: int,
    host_blocks: int,
    policy: str,
    store: StoreRules | None = None,
    on_progress: Callable[[int], None] = lambda requests: None,
) -> FleetReplay:
    """Every request in its order, on the node that `nodes` says: look up, load, insert what missed. Deterministic.

    Each node has `host_blocks` blocks of host memory, at least one, under the eviction policy of that name.
    """
    # Above a store host memory takes every newcomer, as in the manager: it is the way into it.
    insist = store is not None
    hosts = [SimulatedTier(host_blocks, make_policy(policy, host_blocks), insist) for _ in range(node_count)]
    fleet = _Fleet(hosts, SimulatedStore(store, hosts) if store is not None else None)
    found = FleetReplay(trace.accesses)
    running: list[tuple[float, int]] = []
    for number, (request, node) in enumerate(zip(trace.requests, nodes, strict=True)):
        while running and running[0][0] <= request.arrived_s:
            finished_s, ended = heapq.heappop(running)
            before = trace.requests[ended]
            hosts[nodes[ended]].finished(before.blocks[-1], before.output_tokens, finished_s)
        from_host, from_store = fleet.serve(node, request.blocks, request.arrived_s)
        found.host_hits += from_host
        found.store_hits += from_store
        found.hits_by_request.append((from_host, from_store))
        heapq.heappush(running, (request.arrived_s + request.seconds, number))
        if number % PROGRESS_REQUESTS == 0:
            on_progress(number)
    on_progress(len(trace.requests))
    if fleet.store is not None:
        fleet.store.finish(trace.seconds)
        found.use, found.store_blocks = fleet.store.use, fleet.store.block_count
    return found


@dataclass(frozen=True, slots=True)
class _Fleet:
    hosts: Sequence[SimulatedTier]
    store: SimulatedStore | None

    def serve(self, node: int, blocks: Sequence[int], now_s: float) -> tuple[int, int]:
        """A request: how many of its first blocks came from host memory, and how many from the store."""
        host, store = self.hosts[node], self.store
        # Policies learn of a request before what is read for it can have come, as in the manager.
        in_host = host.requested(list(blocks), now_s)
        if store is None:
            host.insert(blocks, in_host, now_s)
            return in_host, 0
        store.advance(now_s)
        found = in_host
        while found < len(blocks) and (host.holds(blocks[found]) or store.holds(node, blocks[found], now_s)):
            found += 1
        reached, read = self._bring_up(node, blocks[:found], in_host, now_s)
        # As the manager does: what was found first, then what was computed.
        store.offered(node, blocks[:found], None, now_s)
        if reached == 0 or host.holds(blocks[reached - 1]) or store.holds(node, blocks[reached - 1], now_s):
            host.insert(blocks, reached, now_s)
            store.offered(node, blocks[reached:], blocks[reached - 1] if reached else None, now_s)
        return reached - read, read

    def _bring_up(self, node: int, blocks: Sequence[int], in_host: int, now_s: float) -> tuple[int, int]:
        """Read what only the store has into host memory, as far as there is room. How many of the blocks are there
        then, and how many were read."""
        host, store = self.hosts[node], self.store
        assert store is not None
        missing = [block for block in blocks[in_host:] if not host.holds(block)]
        if not missing:
            return len(blocks), 0
        held = [block for block in blocks if host.holds(block)]
        # A request keeps what it has found until it has loaded all.
        host.lease_blocks(held)
        host.insert(blocks, in_host, now_s, insist=True)
        host.unlease_blocks(held)
        reached = host.leading(blocks)
        before = set(held)
        read = [block for block in blocks[:reached] if block not in before]
        if read:
            store.read(node, read, now_s)
        return reached, len(read)
