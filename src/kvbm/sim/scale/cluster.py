"""Simulates N nodes behind a router: each has host memory, perhaps a remote tier, and one prefill server.

A request:

1. arrives and is sent to a node by the router, where it waits in line.
2. is begun, first come first served: looked up in host memory and the remote tier. Loading goes as deep as makes its
   first token come soonest; the engine serves others meanwhile.
3. is loaded: the engine takes it next and computes the rest of the prompt, which gives the first token. Missing blocks
   enter host memory, and are written through to the remote tier.
4. ends `seconds` later.

Left out: the device's own prefix cache, decoding's share of the engine, copies device → host, a disk, and blocks of
generated tokens, which enter only with a later prompt. A block that is being loaded cannot be lost. Reads and writes of
a node's network do not slow one another.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvbm.policy import make_policy
from kvbm.sim.scale.routing import Loads, Router
from kvbm.sim.scale.traffic import Arrival, ClusterTraffic
from kvbm.sim.serving.events import Events
from kvbm.sim.serving.machine import Link, Machine
from kvbm.sim.serving.prefill import PrefillServer
from kvbm.sim.serving.tier import BlocksChanged, SimulatedTier
from kvbm.sim.traces.trace import PROGRESS_REQUESTS


class Remote(str, Enum):
    """There is no remote tier, or one for each node, or one that all nodes share."""

    NONE = "none"
    PRIVATE = "private"
    SHARED = "shared"


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """The hardware. Sizes are blocks for each node; a shared remote tier is as large as all private ones together.

    `network_bytes_per_s`: between a node and the remote tier. `store_bytes_per_s`: what the shared tier gives to
    all nodes at once; None is no limit.
    """

    nodes: int
    machine: Machine
    block_tokens: int
    host_blocks: int
    remote: Remote = Remote.NONE
    remote_blocks: int = 0
    network_bytes_per_s: float = 25e9
    store_bytes_per_s: float | None = None
    policy: str = "lru"


@dataclass(slots=True)
class Node:
    """One node's tiers, links and line of requests. `computing_s` and `requests` count what was measured."""

    number: int
    host: SimulatedTier
    remote: SimulatedTier | None
    to_device: Link
    network: Link
    server: PrefillServer[_Job]
    computing_s: float = 0.0
    requests: int = 0


@dataclass(slots=True)
class ClusterRun:
    """The counts of one run, for requests that arrived after the warm-up. Blocks are those of prompts.

    `declined_blocks` were cached, but computing them was going to be faster. `remote_reads` and `remote_writes` are
    blocks over the nodes' networks. `computing_s` and `requests` have an entry for each node.
    """

    seconds: float
    block_bytes: int
    blocks: int = 0
    host_hits: int = 0
    remote_hits: int = 0
    declined_blocks: int = 0
    remote_writes: int = 0
    no_cache_s: float = 0.0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    computing_s: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the blocks asked for that were loaded, from wherever."""
        return (self.host_hits + self.remote_hits) / self.blocks if self.blocks else 0.0

    @property
    def host_hit_rate(self) -> float:
        """Share of the blocks asked for that came from the node's own host memory."""
        return self.host_hits / self.blocks if self.blocks else 0.0

    @property
    def offered_load(self) -> float:
        """Seconds of prefill for each node and second, if there was no cache."""
        return self.no_cache_s / self.seconds / len(self.computing_s)

    @property
    def load(self) -> float:
        """Seconds of prefill for each node and second. Near 1 the nodes cannot keep up."""
        return sum(self.computing_s) / self.seconds / len(self.computing_s)

    @property
    def imbalance(self) -> float:
        """Prefill of the busiest node over that of the mean one: 1 is even."""
        mean = sum(self.computing_s) / len(self.computing_s)
        return max(self.computing_s) / mean if mean else 1.0

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes that the mean node reads from the remote tier, a second."""
        return self.remote_hits * self.block_bytes / self.seconds / len(self.computing_s)

    @property
    def written_bytes_per_s(self) -> float:
        """Bytes that the mean node writes to the remote tier, a second."""
        return self.remote_writes * self.block_bytes / self.seconds / len(self.computing_s)


@dataclass(slots=True)
class _Job:
    """A request in progress. `expected`: blocks that the router expected its node to compute."""

    arrival: Arrival
    node: Node
    expected: int
    loaded: int = 0


class Cluster:
    """The nodes of `shape` behind a router, for one run. `loads` are those that the router reads."""

    def __init__(self, shape: ClusterShape, router: Router, loads: Loads) -> None:
        self._shape = shape
        self._router = router
        self._loads = loads
        self._events = Events()
        self._machine = shape.machine
        self._host_s = shape.machine.block_s(shape.machine.host_bytes_per_s)
        rate = min(shape.network_bytes_per_s, shape.store_bytes_per_s or shape.network_bytes_per_s)
        self._remote_s = shape.machine.block_s(rate)
        self._store = Link(shape.store_bytes_per_s) if shape.store_bytes_per_s else None
        shared = None
        if shape.remote is Remote.SHARED:
            # Every node reaches it at the same price, so the router need not know what it holds.
            shared = self._tier(shape.remote_blocks * shape.nodes)
        self.nodes = [self._node(number, shared) for number in range(shape.nodes)]
        self._warm_up_s = 0.0
        self._arrived = 0
        self._following: Callable[[Arrival, float], Iterable[Arrival]] = lambda arrival, now_s: ()
        self._on_progress: Callable[[int], None] = lambda requests: None
        self._run = ClusterRun(0.0, shape.machine.block_bytes)

    def run(
        self,
        traffic: ClusterTraffic,
        warm_up_s: float = 0.0,
        on_progress: Callable[[int], None] = lambda requests: None,
    ) -> ClusterRun:
        """Serve all traffic, once. Requests that arrive before `warm_up_s` are served but not counted.

        `on_progress` is called now and then with the number of requests that have arrived.
        """
        assert 0.0 <= warm_up_s < traffic.seconds
        self._warm_up_s, self._following = warm_up_s, traffic.following
        self._on_progress = on_progress
        for arrival in traffic:
            self._events.pass_until(arrival.arrived_s)
            self._arrive(arrival.arrived_s, arrival)
        self._events.pass_until(float("inf"))
        on_progress(self._arrived)
        run = self._run
        run.seconds = traffic.seconds - warm_up_s
        run.computing_s = [node.computing_s for node in self.nodes]
        run.requests = [node.requests for node in self.nodes]
        return run

    # ---- a request, step by step

    def _arrive(self, now_s: float, arrival: Arrival) -> None:
        blocks = arrival.blocks
        number, overlap = self._router.choose(arrival.conversation, blocks)
        node = self.nodes[number]
        job = _Job(arrival, node, len(blocks) - overlap)
        self._loads.active[number] += len(blocks)
        self._loads.waiting[number] += job.expected
        if arrival.arrived_s >= self._warm_up_s:
            node.requests += 1
            self._run.blocks += len(blocks)
            self._run.no_cache_s += self._prompt_s(arrival, 0)
        self._arrived += 1
        if self._arrived % PROGRESS_REQUESTS == 0:
            self._on_progress(self._arrived)
        node.server.arrive(now_s, job)

    def begin(self, now_s: float, job: _Job) -> float | None:
        """Look the request up and load what is worth it, as `PrefillUser`."""
        node, blocks = job.node, job.arrival.blocks
        in_host = node.host.requested(blocks, now_s)
        found = in_host
        if node.remote is not None:
            node.remote.requested(blocks, now_s)
            remote, host = node.remote.holds, node.host.holds
            while found < len(blocks) and (remote(blocks[found]) or host(blocks[found])):
                found += 1
        job.loaded = self._worth_loading(now_s, job, in_host, found)
        from_host, from_remote = min(job.loaded, in_host), max(job.loaded - in_host, 0)
        if job.arrival.arrived_s >= self._warm_up_s:
            self._run.host_hits += from_host
            self._run.remote_hits += from_remote
            self._run.declined_blocks += found - job.loaded
        if not job.loaded:
            return None
        size = self._machine.block_bytes
        there_s = node.to_device.send(now_s, from_host * size) if from_host else now_s
        if from_remote:
            there_s = max(there_s, node.network.send(now_s, from_remote * size))
            if self._store is not None:
                there_s = max(there_s, self._store.send(now_s, from_remote * size))
        return there_s

    def loaded(self, now_s: float, job: _Job) -> None:
        """As `PrefillUser`."""

    def prefill_s(self, job: _Job) -> float:
        """As `PrefillUser`."""
        return self._prompt_s(job.arrival, job.loaded)

    def computed(self, now_s: float, job: _Job, seconds: float) -> None:
        """The first token is there, as `PrefillUser`; the computed blocks enter the tiers."""
        node, arrival = job.node, job.arrival
        self._loads.waiting[node.number] -= job.expected
        node.host.insert(arrival.blocks, 0, now_s)
        written = node.remote.insert(arrival.blocks, 0, now_s) if node.remote is not None else 0
        if arrival.arrived_s >= self._warm_up_s:
            node.computing_s += seconds
            self._run.ttft_s.append(now_s - arrival.arrived_s)
            self._run.remote_writes += written
        self._events.at(now_s + arrival.seconds, self._finished, job)

    def _finished(self, now_s: float, job: _Job) -> None:
        node, arrival = job.node, job.arrival
        self._loads.active[node.number] -= len(arrival.blocks)
        for tier in (node.host, node.remote):
            if tier is not None:
                tier.finished(arrival.blocks[-1], arrival.output_tokens, now_s)
        for following in self._following(arrival, now_s):
            self._events.at(following.arrived_s, self._arrive, following)

    # ---- which blocks are worth loading, and how long that takes

    def _worth_loading(self, now_s: float, job: _Job, in_host: int, found: int) -> int:
        """How many of the blocks found to load for the first token to come soonest.

        Each tier's blocks take equally long, and the deeper a block the more computing it saves. So of each tier all
        blocks are worth loading or none; of equal times the deepest counts, which leaves more of the engine to others.
        """
        if not found:
            return 0
        node = job.node
        best = 0
        best_s = self._prompt_s(job.arrival, 0)
        for depth in (in_host, found):
            load_s = min(depth, in_host) * self._host_s
            if load_s:
                load_s += max(node.to_device.free_s - now_s, 0.0)
            if depth > in_host:
                store_s = self._store.free_s if self._store is not None else 0.0
                queue_s = max(node.network.free_s, store_s) - now_s
                load_s = max(load_s, max(queue_s, 0.0) + (depth - in_host) * self._remote_s)
            seconds = load_s + self._prompt_s(job.arrival, depth)
            if depth and seconds <= best_s:
                best, best_s = depth, seconds
        return best

    def _prompt_s(self, arrival: Arrival, loaded: int) -> float:
        return self._machine.prompt_s(loaded * self._shape.block_tokens, arrival.prompt_tokens)

    # ---- building the nodes

    def _tier(self, slot_count: int, *on_changes: BlocksChanged) -> SimulatedTier:
        return SimulatedTier(slot_count, make_policy(self._shape.policy, slot_count), False, *on_changes)

    def _node(self, number: int, shared: SimulatedTier | None) -> Node:
        shape, router = self._shape, self._router
        own: list[SimulatedTier] = []

        # The router learns of a block once: when the first of the node's own tiers gets it, and when the last loses it.
        def stored(blocks: Sequence[int]) -> None:
            router.stored(number, [b for b in blocks if sum(tier.holds(b) for tier in own) == 1])

        def evicted(blocks: Sequence[int]) -> None:
            router.removed(number, [b for b in blocks if not any(tier.holds(b) for tier in own)])

        on_changes = (stored, evicted) if router.listens else ()
        own.append(self._tier(shape.host_blocks, *on_changes))
        if shape.remote is Remote.PRIVATE:
            own.append(self._tier(shape.remote_blocks, *on_changes))
        return Node(
            number=number,
            host=own[0],
            remote=own[1] if len(own) > 1 else shared,
            to_device=Link(shape.machine.host_bytes_per_s),
            network=Link(shape.network_bytes_per_s),
            server=PrefillServer(self._events, self),
        )
