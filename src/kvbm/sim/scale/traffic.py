"""Traffic for many nodes made of one trace.

A trace has the traffic of a few nodes. For more it is played several times at once. Every copy

- begins at a moment of its own, so that peaks do not meet, and lasts `minutes` at most;
- has blocks of its own: its conversations are other people's. Only the trunk, blocks that more than `trunk_share` of
  all the trace's requests ask for (a system prompt that everybody has), is the same in all copies;
- leaves out conversations by chance where less than whole copies are wanted. A conversation is all requests that ask
  for the same first block below the trunk; it stays or goes as one, so its own pauses stay what they are.

A user who continues a conversation waits for the previous answer, and then as long as in the trace (`conversations`): a
cluster that is too slow slows its users down, as in reality. Requests after the end are left out.

Caches are empty when a copy begins: hit rates are counted after a warm-up only, and reuse after longer than warm-up and
measurement together is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from kvbm.sim.replay.sampling import TRUNK_SHARE
from kvbm.sim.serving.machine import Machine
from kvbm.sim.traces.conversations import NO_REQUEST, predecessors
from kvbm.sim.traces.trace import Trace


class Arrival(NamedTuple):
    """One request to the cluster: the trace's `number` in a `copy`. `blocks` are numbered across all copies."""

    arrived_s: float
    copy: int
    number: int
    conversation: int
    blocks: list[int]
    prompt_tokens: int
    output_tokens: int
    seconds: float


class ClusterTraffic:
    """Requests of `copies` copies of a trace (a fraction is a thinned copy each), in order, for `seconds` at most.

    Iterating, which can be done any number of times, gives those that follow no other; `following` the rest. Without
    `closed_loop` none follows another: all arrive as recorded. The same seed gives the same requests.
    """

    def __init__(
        self,
        trace: Trace,
        copies: float,
        seconds: float,
        seed: int,
        closed_loop: bool = True,
        trunk_share: float = TRUNK_SHARE,
    ) -> None:
        assert copies > 0.0 and seconds > 0.0
        self.trace = trace
        self.seconds = min(seconds, math.nextafter(trace.seconds, math.inf))
        asked = numpy.bincount(trace.flat, minlength=trace.unique_blocks)
        trunk = asked > trunk_share * len(trace.requests)
        # Chains nest: the blocks before a block of the trunk are asked for at least as often.
        self._depths = [_depth(trunk, request.blocks) for request in trace.requests]
        self._roots = [
            request.blocks[min(depth, len(request.blocks) - 1)]
            for request, depth in zip(trace.requests, self._depths, strict=True)
        ]
        self.copies = math.ceil(copies - 1e-9)
        self._before = predecessors(trace) if closed_loop else [NO_REQUEST] * len(trace.requests)
        self._following: dict[int, list[int]] = {}
        for number, before in enumerate(self._before):
            if before != NO_REQUEST and self._roots[before] != self._roots[number]:
                # Only those of one conversation stay together when copies are thinned.
                self._before[number] = NO_REQUEST
            elif before != NO_REQUEST:
                self._following.setdefault(before, []).append(number)
        self._starts_s: list[float] = []
        self._draw(copies / self.copies, seed)

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[Arrival]:
        first = self._first
        rows = (self._times[first].tolist(), self._copies[first].tolist(), self._numbers[first].tolist())
        return map(self._arrival, *rows)

    def following(self, arrival: Arrival, finished_s: float) -> Iterator[Arrival]:
        """The requests that continue the conversation of one that has ended, as far as they arrive before the end."""
        numbers = self._following.get(arrival.number)
        if not numbers:
            return
        requests, start_s = self.trace.requests, self._starts_s[arrival.copy]
        before = requests[arrival.number]
        for number in numbers:
            recorded_s = requests[number].arrived_s
            pause_s = recorded_s - before.arrived_s - before.seconds
            arrived_s = max(recorded_s - start_s, finished_s + pause_s)
            if arrived_s < self.seconds:
                yield self._arrival(arrived_s, arrival.copy, number)

    def _arrival(self, arrived_s: float, copy: int, number: int) -> Arrival:
        request, depth = self.trace.requests[number], self._depths[number]
        # Copy 0 has the trace's own numbers.
        shift = copy * self.trace.unique_blocks
        own = [block + shift for block in request.blocks[depth:]]
        return Arrival(
            arrived_s,
            copy,
            number,
            self._roots[number] + shift,
            [*request.blocks[:depth], *own] if depth else own,
            request.prompt_tokens,
            request.output_tokens,
            request.seconds,
        )

    def _draw(self, share: float, seed: int) -> None:
        """Draw when each request of each copy comes, and note those that follow no other."""
        before = numpy.array(self._before)
        arrived_s = numpy.array([request.arrived_s for request in self.trace.requests])
        _, trees = numpy.unique(self._roots, return_inverse=True)
        tree_count = int(trees.max()) + 1
        times, copies, numbers, firsts = [], [], [], []
        for copy in range(self.copies):
            chance = numpy.random.default_rng((seed, copy))
            start_s = chance.random() * max(self.trace.seconds - self.seconds, 0.0)
            kept = chance.random(tree_count) < share
            first, last = numpy.searchsorted(arrived_s, (start_s, start_s + self.seconds))
            chosen = first + numpy.flatnonzero(kept[trees[first:last]])
            self._starts_s.append(start_s)
            times.append(arrived_s[chosen] - start_s)
            firsts.append(before[chosen] < first)
            copies.append(numpy.full(len(chosen), copy))
            numbers.append(chosen)
        joined_s = numpy.concatenate(times)
        order = numpy.argsort(joined_s, kind="stable")
        self._times, self._copies = joined_s[order], numpy.concatenate(copies)[order]
        self._numbers, self._first = numpy.concatenate(numbers)[order], numpy.concatenate(firsts)[order]


def trace_load(trace: Trace, machine: Machine) -> float:
    """Nodes that the trace would keep busy with prefill if there was no cache: seconds of prefill per second."""
    prompts = numpy.array([request.prompt_tokens for request in trace.requests])
    # One more mean gap after the last arrival: a trace of one request has no length of its own.
    seconds = trace.seconds * len(prompts) / max(len(prompts) - 1, 1)
    return float(machine.prefill_s(0, prompts).sum()) / seconds if seconds else 0.0


def _depth(trunk: Any, blocks: Sequence[int]) -> int:
    """How many of the first blocks are of the trunk."""
    return next((i for i, block in enumerate(blocks) if not trunk[block]), len(blocks))
