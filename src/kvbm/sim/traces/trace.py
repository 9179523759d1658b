"""A trace in memory: the times, chains of blocks and lengths of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, count
from operator import itemgetter
from typing import Any

import numpy

OUTPUT_SECONDS_PER_TOKEN = 0.03
"""Where a trace does not say how long a request took, its output is assumed to have come at this pace."""
PROGRESS_REQUESTS = 256
"""Progress is reported once in so many requests."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` are numbers dense from 0; equal numbers mean an equal whole prefix up to there.

    `arrived_s` counts from the trace's first request; `seconds` is how long the request took in the recording.
    """

    arrived_s: float
    blocks: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, of blocks of `block_tokens` tokens each, numbered from 0 to `unique_blocks` - 1."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    unique_blocks: int

    @cached_property
    def accesses(self) -> int:
        """Blocks asked for, repetitions included."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def flat(self) -> Any:
        """All requests' blocks one after the other: a numpy array of int64, `accesses` long."""
        joined = chain.from_iterable(request.blocks for request in self.requests)
        return numpy.fromiter(joined, numpy.int64, self.accesses)

    @cached_property
    def starts(self) -> list[int]:
        """Where each request begins in `flat`, and where the last one ends."""
        return [0, *accumulate(len(request.blocks) for request in self.requests)]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrived_s if self.requests else 0.0


class TraceBuilder:
    """Collects requests whose blocks have any hashable names, in any order, and numbers the blocks by first use."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self._name = name
        self._block_tokens = block_tokens
        self._found: list[tuple[float, int, Sequence[Hashable], int, int, float]] = []

    def add(
        self,
        arrived_s: float,
        blocks: Sequence[Hashable],
        prompt_tokens: int,
        output_tokens: int,
        seconds: float | None = None,
    ) -> None:
        """One request; requests without a single block are left out."""
        if not blocks:
            return
        took_s = output_tokens * OUTPUT_SECONDS_PER_TOKEN if seconds is None else seconds
        self._found.append((arrived_s, len(self._found), blocks, prompt_tokens, output_tokens, took_s))

    def build(self, time_scale: float = 1.0, limit: int | None = None) -> Trace:
        """The trace, sorted by arrival, of the first `limit` requests.

        Times count from the first arrival; those between arrivals are multiplied by `time_scale`.
        """
        self._found.sort(key=itemgetter(0, 1))
        start_s = self._found[0][0] if self._found else 0.0
        # A name that is asked for the first time gets the next number.
        numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)
        requests = [
            TraceRequest(
                (arrived_s - start_s) * time_scale,
                tuple(map(numbers.__getitem__, blocks)),
                prompt_tokens,
                output_tokens,
                seconds,
            )
            for arrived_s, _, blocks, prompt_tokens, output_tokens, seconds in self._found[:limit]
        ]
        return Trace(self._name, self._block_tokens, requests, len(numbers))
