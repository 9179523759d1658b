"""Serves a trace with one engine, its host memory and a disk: counts hits by tier and times to the first token.

An event-driven replay. The engine's prefill is one server; the links host → device, disk → host and host → disk each
carry one transfer after the other. A request:

1. arrives and queues. Its chain is looked up, and leased as far as the cost model finds it worth loading. Blocks that
   only the disk has get slots in host memory and are read.
2. is begun, first come first served. The blocks found by now are sent to the device; the engine serves others
   meanwhile.
3. is loaded: the engine takes it next and computes the rest of the prompt, which gives the first token. The computed
   blocks enter host memory.
4. ends `TraceRequest.seconds` later. The next request of the conversation arrives after that, with the same pause as in
   the trace (`conversations`); so an engine that is too slow slows its users down, as in reality.

Left out: the device's own prefix cache, the copies device → host, decoding's share of the engine, and the blocks of
generated tokens, which host memory gets only when a later prompt contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy

from kvbm.policy import AdmissionPolicy
from kvbm.sim.serving.disk import WRITES_IN_FLIGHT_MAX, SimulatedDisk
from kvbm.sim.serving.events import Events
from kvbm.sim.serving.machine import Link, Machine
from kvbm.sim.serving.prefill import PrefillServer
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.conversations import NO_REQUEST, predecessors
from kvbm.sim.traces.said import Told
from kvbm.sim.traces.trace import PROGRESS_REQUESTS, Trace, TraceRequest

LEASE_S = 90.0
"""The blocks found for a waiting request are leased for so long; after that it is looked up again when it begins."""


@dataclass(slots=True)
class Served:
    """The counts of a run. Blocks are those of prompts; `ttft_s` has an entry for each request, in trace order.

    `declined_blocks` were cached, but computing them was going to be faster. `skipped_writes` are blocks that were
    admitted to disk and never got there. `trace_s` is how long the trace took when it was recorded.
    """

    block_bytes: int
    blocks: int
    trace_s: float
    ttft_s: list[float]
    host_hits: int = 0
    disk_hits: int = 0
    declined_blocks: int = 0
    computing_s: float = 0.0
    loaded_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    skipped_writes: int = 0

    @property
    def host_hit_rate(self) -> float:
        """Share of the blocks asked for that came from host memory."""
        return self.host_hits / self.blocks if self.blocks else 0.0

    @property
    def disk_hit_rate(self) -> float:
        """Share of the blocks asked for that came from disk."""
        return self.disk_hits / self.blocks if self.blocks else 0.0

    @property
    def load(self) -> float:
        """Seconds of prefill for each second of the trace. Above 1 the engine cannot keep up."""
        return self.computing_s / self.trace_s if self.trace_s else 0.0

    @property
    def written_per_hit(self) -> float | None:
        """Bytes written to disk for each byte that hit there; None when nothing did."""
        return self.disk_written_bytes / (self.disk_hits * self.block_bytes) if self.disk_hits else None


@dataclass(slots=True)
class _Job:
    """A request in progress: how many of its first blocks are leased and loaded, and which were read from disk."""

    number: int
    request: TraceRequest
    arrived_s: float
    begun: bool = False
    leased: int = 0
    loaded: int = 0
    read: set[int] = field(default_factory=set)


class SimulatedEngine:
    """One engine, for one run over a trace. Without `host` it has no cache; `disk` and `admission` come together, and
    the host tier above them insists.

    `closed_loop`: a user who continues a conversation waits for the previous answer, even where that takes longer than
    it did in the trace. Without it all requests arrive as recorded. `told` is what clients say.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        host: SimulatedTier | None = None,
        disk: SimulatedTier | None = None,
        admission: AdmissionPolicy | None = None,
        closed_loop: bool = True,
        writes_in_flight_max: int = WRITES_IN_FLIGHT_MAX,
        told: Told | None = None,
    ) -> None:
        self._trace = trace
        self._told = told
        self._machine = machine
        self._host = host
        self._disk = disk
        self._events = Events()
        self._block_s = machine.block_s(machine.host_bytes_per_s)
        self._read_s = machine.block_s(machine.disk_read_bytes_per_s)
        self._to_device = Link(machine.host_bytes_per_s)
        self._from_disk = Link(machine.disk_read_bytes_per_s)
        self._to_disk = Link(machine.disk_write_bytes_per_s)
        self._writes: SimulatedDisk | None = None
        if disk is not None:
            assert host is not None and host.insist and admission is not None
            writing = (self._to_disk, machine.block_bytes, self._events, writes_in_flight_max)
            self._writes = SimulatedDisk(host, disk, admission, *writing)
        self._server: PrefillServer[_Job] = PrefillServer(self._events, self)
        self._through = 0
        self._on_progress: Callable[[int], None] = lambda requests: None
        # Blocks that have a slot in host memory and are still being read from disk, and the end of each read.
        self._arriving: dict[int, float] = {}
        self._following: dict[int, list[int]] = {}
        self._before = predecessors(trace) if closed_loop else [NO_REQUEST] * len(trace.requests)
        self._served = Served(machine.block_bytes, trace.accesses, trace.seconds, [0.0] * len(trace.requests))

    def run(self, on_progress: Callable[[int], None] = lambda requests: None) -> Served:
        """Serve the whole trace, once. `on_progress` is called now and then with the number of first tokens."""
        self._on_progress = on_progress
        for number, request in enumerate(self._trace.requests):
            if self._before[number] != NO_REQUEST:
                self._following.setdefault(self._before[number], []).append(number)
            else:
                self._events.at(request.arrived_s, self._arrive, number)
        self._events.pass_until(float("inf"))
        on_progress(len(self._trace.requests))
        served = self._served
        served.loaded_bytes = self._to_device.sent_bytes
        served.disk_read_bytes = self._from_disk.sent_bytes
        served.disk_written_bytes = self._to_disk.sent_bytes
        served.skipped_writes = self._writes.skipped_blocks if self._writes else 0
        return served

    # ---- a request, step by step

    def _arrive(self, now_s: float, number: int) -> None:
        job = _Job(number, self._trace.requests[number], now_s)
        blocks = job.request.blocks
        for tier in (self._host, self._disk):
            if tier is not None:
                tier.requested(list(blocks), now_s)
                if self._told is not None:
                    tier.hinted(blocks[-1], self._told.at_arrival(number), now_s)
        start_s = max(self._server.expected_free_s, now_s)
        depth = 0
        if self._host is not None:
            # Reading begins now, as far as it will pay by the time the engine gets here.
            depth = self._look_up(self._host, job, now_s, start_s)
            self._events.at(now_s + LEASE_S, self._lapsed, job)
            if self._writes is not None:
                self._writes.used(blocks, self._cached(self._host, blocks))
        self._server.expected_free_s = start_s + self._prompt_s(job.request, depth)
        self._server.arrive(now_s, job)

    def begin(self, now_s: float, job: _Job) -> float | None:
        """Load what is worth it by now, as `PrefillUser`."""
        job.begun = True
        if self._host is not None:
            # More may be there by now than when it came.
            job.loaded = self._look_up(self._host, job, now_s, now_s)
            self._served.declined_blocks += self._cached(self._host, job.request.blocks) - job.loaded
        if not job.loaded:
            return None
        blocks = job.request.blocks[: job.loaded]
        from_disk = sum(map(job.read.__contains__, blocks))
        self._served.disk_hits += from_disk
        self._served.host_hits += job.loaded - from_disk
        sent_s = self._to_device.send(now_s, job.loaded * self._machine.block_bytes)
        there_s = max(self._arriving.get(block, 0.0) for block in blocks) if self._arriving else 0.0
        # A block goes on to the device as soon as it has been read.
        return max(sent_s, there_s + self._block_s if there_s > now_s else 0.0)

    def loaded(self, now_s: float, job: _Job) -> None:
        """As `PrefillUser`."""
        self._lease(job, 0)

    def _lapsed(self, now_s: float, job: _Job) -> None:
        if not job.begun:
            self._lease(job, 0)

    def prefill_s(self, job: _Job) -> float:
        """As `PrefillUser`."""
        return self._prompt_s(job.request, job.loaded)

    def computed(self, now_s: float, job: _Job, seconds: float) -> None:
        """The first token is there, as `PrefillUser`; the computed blocks enter host memory."""
        blocks, loaded = job.request.blocks, job.loaded
        self._served.computing_s += seconds
        self._served.ttft_s[job.number] = now_s - job.arrived_s
        # Without its prefix a block could never be found: the manager spends no slot on it.
        if self._host is not None and (loaded == 0 or self._cached(self._host, blocks[loaded - 1 : loaded])):
            new = loaded + self._host.leading(blocks[loaded:])
            self._host.insert(blocks, new, now_s)
            if self._writes is not None:
                self._writes.stored(blocks, new)
        self._events.at(now_s + job.request.seconds, self._finished, job)
        self._through += 1
        if self._through % PROGRESS_REQUESTS == 0:
            self._on_progress(self._through)

    def _finished(self, now_s: float, job: _Job) -> None:
        request = job.request
        for tier in (self._host, self._disk):
            if tier is not None:
                if self._told is not None and self._told.at_end:
                    tier.hinted(request.blocks[-1], self._told.hints[job.number], now_s)
                tier.finished(request.blocks[-1], request.output_tokens, now_s)
        for number in self._following.pop(job.number, ()):
            following = self._trace.requests[number]
            pause_s = following.arrived_s - request.arrived_s - request.seconds
            self._events.at(max(following.arrived_s, now_s + pause_s), self._arrive, number)

    # ---- which blocks are cached, and which are worth loading

    def _look_up(self, host: SimulatedTier, job: _Job, now_s: float, start_s: float) -> int:
        """How many of the first blocks to load when the engine gets to them at `start_s` or after.

        Those of them that only the disk has get slots in host memory, and are queued for reading. The answer ends
        before the first block without a slot.
        """
        blocks = job.request.blocks
        blocks = blocks[: self._cached(host, blocks)]
        there_s = []
        read_s = max(now_s, self._from_disk.free_s)
        for block in blocks:
            if host.holds(block):
                there_s.append(self._arriving.get(block, now_s))
            else:
                read_s += self._read_s
                there_s.append(read_s)
        depth = self._worth_loading(job.request, there_s, now_s, start_s)
        if host.leading(blocks[:depth]) < depth:
            depth = self._raise(host, job, blocks[:depth], now_s)
        self._lease(job, depth)
        return depth

    def _raise(self, host: SimulatedTier, job: _Job, blocks: Sequence[int], now_s: float) -> int:
        """Give blocks that only the disk has a slot in host memory and queue their reads; how many are loadable."""
        held = [block for block in blocks if host.holds(block)]
        host.lease_blocks(held)
        host.insert(blocks, host.leading(blocks), now_s)
        host.unlease_blocks(held)
        before = set(held)
        reads = [block for block in blocks if block not in before and host.holds(block)]
        host.lease_blocks(reads)
        for block in reads:
            self._arriving[block] = self._from_disk.send(now_s, self._machine.block_bytes)
        job.read.update(reads)
        self._events.at(self._from_disk.free_s, self._were_read, reads)
        return host.leading(blocks)

    def _lease(self, job: _Job, depth: int) -> None:
        """Lease the first blocks, and end the leases that the request had before."""
        if self._host is not None:
            blocks = job.request.blocks
            self._host.lease_blocks(blocks[:depth])
            self._host.unlease_blocks(blocks[: job.leased])
            job.leased = depth

    def _were_read(self, now_s: float, blocks: Sequence[int]) -> None:
        assert self._host is not None
        self._host.unlease_blocks(blocks)
        for block in blocks:
            del self._arriving[block]

    def _worth_loading(
        self, request: TraceRequest, there_s: Sequence[float], now_s: float, start_s: float
    ) -> int:
        """How many of the blocks to load for the first token to come soonest.

        `there_s`: for each block, when it is in host memory. Loading deeper takes longer and saves computing; deep in
        a prompt it saves more. Loading costs no time while the engine is busy with others until `start_s`.
        """
        if not there_s:
            return 0
        depths = numpy.arange(len(there_s) + 1)
        sent_s = max(now_s, self._to_device.free_s) + depths * self._block_s
        read_s = numpy.maximum.accumulate([now_s, *there_s])
        ready_s = numpy.maximum(sent_s, numpy.where(read_s > now_s, read_s + self._block_s, now_s))
        ready_s[0] = now_s
        cached = numpy.clip(depths * self._trace.block_tokens, 0, max(request.prompt_tokens - 1, 0))
        first_s = numpy.maximum(ready_s, start_s) + self._machine.prefill_s(cached, request.prompt_tokens)
        # Of equal times the deepest: it leaves more of the engine to others.
        return len(there_s) - int(numpy.argmin(first_s[::-1]))

    def _prompt_s(self, request: TraceRequest, loaded: int) -> float:
        return self._machine.prompt_s(loaded * self._trace.block_tokens, request.prompt_tokens)

    def _cached(self, host: SimulatedTier, blocks: Sequence[int]) -> int:
        """How many of the first blocks host memory or the disk has."""
        found = host.leading(blocks)
        if self._disk is not None:
            while found < len(blocks) and (self._disk.holds(blocks[found]) or host.holds(blocks[found])):
                found += 1
        return found
