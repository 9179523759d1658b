"""What clients of a trace could have said."""

from __future__ import annotations

import pytest

from kvbm.sim.traces.conversations import NO_REQUEST
from kvbm.sim.traces.said import Kind, continuations, told
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace, TraceBuilder

SYSTEM = ("s",)


@pytest.fixture
def trace() -> Trace:
    """Two conversations with one system prompt; the first goes on twice, and once more from its first turn. Before them
    somebody had the system prompt, whom any of them continues."""
    builder = TraceBuilder("t", 16)
    for arrived_s, blocks in (
        (0.0, SYSTEM),
        (1.0, (*SYSTEM, "a1", "dropped")),
        (10.0, (*SYSTEM, "b1")),
        (100.0, (*SYSTEM, "a1", "a2")),
        (300.0, (*SYSTEM, "a1", "a2")),
        (400.0, (*SYSTEM, "a1", "x")),
    ):
        builder.add(arrived_s, blocks, 32, 5, 2.0)
    return builder.build()


def test_a_conversation_goes_on_where_its_new_blocks_are_asked_for(trace: Trace) -> None:
    assert continuations(trace) == [1, 3, NO_REQUEST, 4, NO_REQUEST, NO_REQUEST]


def test_what_is_true(trace: Trace) -> None:
    said = told(trace, Kind.TRUE)
    assert [hint.final for hint in said.hints] == [False, False, True, False, True, True]
    for hint, gap_s in ((said.hints[1], 97.0), (said.hints[3], 198.0)):
        assert hint.expect_s is not None
        assert gap_s / 2 <= hint.expect_s <= gap_s * 2
        assert hint.expect_s != gap_s
    first, other, *rest = [hint.session for hint in said.hints[1:]]
    assert rest[:2] == [first, first]
    assert other != first
    assert rest[2] not in (first, other)  # a branch
    assert said.at_arrival(0) == said.hints[0]


def test_what_is_said_late_is_true_and_not_known_before(trace: Trace) -> None:
    late = told(trace, Kind.LATE)
    assert late.hints == told(trace, Kind.TRUE).hints
    assert late.at_arrival(2).session == late.hints[2].session
    assert not late.at_arrival(2).final
    assert late.at_arrival(1).expect_s is None


def test_what_is_random_knows_the_session_only() -> None:
    trace = chats(ChatShape(conversations=200))
    true, chance = told(trace, Kind.TRUE).hints, told(trace, Kind.RANDOM).hints
    assert [hint.session for hint in chance] == [hint.session for hint in true]
    ends = [hint for hint in chance if hint.final]
    assert 0.4 < len(ends) / len(chance) < 0.6
    assert all((hint.expect_s is None) == hint.final for hint in chance)
    assert told(trace, Kind.RANDOM, seed=1).hints != chance
    assert told(trace, Kind.RANDOM).hints == chance
