"""What the clients of a trace could have said about their requests: traces do not say it, but their blocks show it.

A request's conversation goes on with the first later request that asks again for the first block that was new in it (of
a request without new blocks, for its last). Sessions of agents and chats alike know their pauses and ends so; that of a
sub-agent is a conversation of its own. What comes after the end of the trace counts as never.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy

from kvbm.hints import Hint
from kvbm.sim.traces.conversations import NO_REQUEST
from kvbm.sim.traces.trace import Trace

CLIENT = "trace"
_RANDOM_S = (1.0, 3600.0)


class Kind(Enum):
    """What is said, and when."""

    TRUE = "true"
    """With the request: whether its conversation goes on, and when, within a factor of two either way."""
    LATE = "late"
    """The same, when the request has ended; before, only the session is known."""
    RANDOM = "random"
    """With the request: one or the other, by chance."""


class Told(NamedTuple):
    """A hint for each request of a trace, told with it, or `at_end` only."""

    kind: Kind
    hints: Sequence[Hint]
    at_end: bool

    def at_arrival(self, number: int) -> Hint:
        """What is known of a request when it comes."""
        hint = self.hints[number]
        return Hint(session=hint.session) if self.at_end else hint


def told(trace: Trace, kind: Kind, seed: int = 0) -> Told:
    """The hints for a trace. The same seed gives the same ones."""
    chance = random.Random(seed)
    following = continuations(trace)
    sessions: dict[int, str] = {}
    hints = []
    for number, (request, following_number) in enumerate(zip(trace.requests, following, strict=True)):
        session = sessions.pop(number, str(number))
        if following_number != NO_REQUEST:
            sessions.setdefault(following_number, session)
        expect_s = None
        if kind is Kind.RANDOM:
            low, high = _RANDOM_S
            expect_s = low * (high / low) ** chance.random() if chance.random() < 0.5 else None
        elif following_number != NO_REQUEST:
            ended_s = request.arrived_s + request.seconds
            gap_s = max(0.0, trace.requests[following_number].arrived_s - ended_s)
            expect_s = gap_s * 2 ** chance.uniform(-1.0, 1.0)
        hints.append(Hint(session=session, final=expect_s is None, expect_s=expect_s))
    return Told(kind, hints, kind is Kind.LATE)


def continuations(trace: Trace) -> list[int]:
    """For each request, the later one with which its conversation goes on, or NO_REQUEST."""
    deciding, known_count = [], 0
    for request in trace.requests:
        # Blocks are numbered by first use.
        new = next((block for block in request.blocks if block >= known_count), request.blocks[-1])
        deciding.append(new)
        known_count = max(known_count, max(request.blocks) + 1)
    flat, starts = trace.flat, trace.starts
    later = numpy.full(trace.unique_blocks, NO_REQUEST)
    found = [NO_REQUEST] * len(trace.requests)
    for number in range(len(trace.requests) - 1, -1, -1):
        found[number] = int(later[deciding[number]])
        later[flat[starts[number] : starts[number + 1]]] = number
    return found
