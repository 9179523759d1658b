"""The records of other projects, and how each becomes a `RecordedRequest`. Unknown fields are ignored."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from kvbm.sim.traces.formats.sessions import NAMES_END, ChainedNames, RecordedRequest, Source, scoped_prefixes
from kvbm.sim.traces.formats.text import unusable

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(gt=0)]
Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]

MOONCAKE_BLOCK_TOKENS = 512
QWEN_BLOCK_TOKENS = 16
_MS = 1e3


class MooncakeRecord(msgspec.Struct):
    """kvcache-ai/Mooncake, FAST'25 release: a line per request, 512-token blocks, the last one perhaps not full.

    `timestamp` is in ms. A block's hash covers the prefix before it (FAST'25 paper, §4), so names are prefixes.
    """

    timestamp: Time
    input_length: Count
    output_length: Count
    hash_ids: list[Count]

    def request(self) -> RecordedRequest:
        """The same in our words."""
        return RecordedRequest(
            self.timestamp / _MS, self.hash_ids, self.input_length, self.output_length, None
        )


class QwenRecord(msgspec.Struct):
    """alibaba-edu/qwen-bailian-usagetraces-anon: a line per request, 16-token blocks, `timestamp` in seconds.

    Its README has every block hashed on its own ("salted SipHash-2-4 to each block"), so names must be chained.
    """

    chat_id: int
    timestamp: Time
    input_length: Count
    output_length: Count
    hash_ids: list[Count]

    def request(self, names: ChainedNames) -> RecordedRequest:
        """The same in our words."""
        return RecordedRequest(
            self.timestamp, names.prefixes(self.hash_ids), self.input_length, self.output_length, None
        )


class SessionRequest(msgspec.Struct, rename={"input": "in", "output": "out", "at_s": "t"}):
    """A request of a session, or (`requests`) a sub-agent with requests of its own."""

    at_s: Time
    input: Count = 0
    output: Count = 0
    api_time: Time | None = None
    hash_ids: list[Count] | None = None
    hash_runs: list[tuple[Count, Count]] | None = None
    requests: list[SessionRequest] | None = None


class SessionRecord(msgspec.Struct):
    """A session of a coding agent, as callanjfox/agentic-coding-analysis describes it (docs/TRACE_FORMAT.md).

    `t` is in seconds from the session's start, and inside a sub-agent from the sub-agent's. Block hashes are chained
    there. `hash_id_scope` is `local` where names mean something inside the session only, else `global`.
    `hash_runs`, our own shorter form, is a list of [first name, how many].
    """

    block_size: Positive
    requests: list[SessionRequest]
    hash_id_scope: Literal["local", "global"] = "local"

    def add_to(self, source: Source, place: str) -> None:
        """Append the session; sub-agents' requests are merged in by time. A session of no request is one too."""
        scope = len(source.sessions) if self.hash_id_scope == "local" else None
        found = []
        for at_s, request, steps in _flat(self.requests, 0.0, "requests"):
            prefixes = _prefixes(request, scope, f"{place}: {steps}")
            found.append(RecordedRequest(at_s, prefixes, request.input, request.output, request.api_time))
        found.sort(key=lambda request: request.at_s)
        source.sessions.append(found)


def _flat(
    requests: Sequence[SessionRequest], start_s: float, steps: str
) -> Iterator[tuple[float, SessionRequest, str]]:
    """Every request with its time and where it stands, sub-agents' among them."""
    for position, request in enumerate(requests):
        here = f"{steps}[{position}]"
        if request.requests is None:
            yield start_s + request.at_s, request, here
        elif request.requests:
            # Some releases of the format count a sub-agent's time from the session's start.
            absolute = 0.0 < request.at_s <= request.requests[0].at_s
            inner_s = start_s if absolute else start_s + request.at_s
            yield from _flat(request.requests, inner_s, f"{here}.requests")


def _prefixes(request: SessionRequest, scope: int | None, place: str) -> array[int]:
    if request.hash_runs is not None:
        runs = [range(first, first + count) for first, count in request.hash_runs]
    elif request.hash_ids is not None:
        runs = [range(name, name + 1) for name in request.hash_ids]
    else:
        raise unusable(place, "hash_ids", None, "a list of numbers (or hash_runs: a list of [first, count])")
    for run in runs:
        if run.stop > NAMES_END:
            raise unusable(place, "hash_ids", run.stop - 1, "numbers below 2^40")
    return scoped_prefixes(scope, runs)
