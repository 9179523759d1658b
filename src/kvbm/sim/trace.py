"""A trace in memory: when requests came, which chain of blocks each asked for, and how long they were."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

OUTPUT_SECONDS_PER_TOKEN = 0.03
"""Where a trace does not say how long a request took, its output is assumed to have come at this pace."""


@dataclass(frozen=True, slots=True)
class Request:
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
    requests: Sequence[Request]
    unique_blocks: int

    @cached_property
    def accesses(self) -> int:
        """Blocks asked for, repetitions included."""
        return sum(len(request.blocks) for request in self.requests)

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

    def build(self) -> Trace:
        """The trace, sorted by arrival; times count from the first."""
        self._found.sort(key=lambda entry: entry[:2])
        start_s = self._found[0][0] if self._found else 0.0
        numbers: dict[Hashable, int] = {}
        requests = [
            Request(
                arrived_s - start_s,
                tuple(numbers.setdefault(block, len(numbers)) for block in blocks),
                prompt_tokens,
                output_tokens,
                seconds,
            )
            for arrived_s, _, blocks, prompt_tokens, output_tokens, seconds in self._found
        ]
        return Trace(self._name, self._block_tokens, requests, len(numbers))
