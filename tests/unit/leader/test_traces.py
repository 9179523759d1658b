"""The spans of requests: which parts each has, when they begin and end, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from tests.rigs.leader import HASHES, TABLE, Bench

from kvbm.leader.patience import REPLY_DEADLINE_S
from kvbm.leader.tracked import Answer
from kvbm.observe.spans import Span
from kvbm.protocol import Lookup, Progress
from kvbm.step_plan import StepReport

WALL_NS = 1_700_000_000_000_000_000
"""The system's clock when the bench's clock was at 0."""


class Collected:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[tuple[Span, Mapping[str, str]]] = []

    def put(self, make: Callable[[], Span], parent: Mapping[str, str]) -> None:
        self.spans.append((make(), dict(parent)))

    def take(self) -> Span:
        ((span, _),) = self.spans
        self.spans.clear()
        return span


@pytest.fixture
def sink() -> Collected:
    return Collected()


@pytest.fixture
def bench(make_bench: Callable[..., Bench], sink: Collected) -> Bench:
    bench = make_bench(spans=sink)
    assert bench.leader.traces is not None
    bench.leader.traces.wall_offset_ns = lambda: WALL_NS
    return bench


def at(seconds: float) -> int:
    """Seconds of the bench's clock on the system's, in ns."""
    return WALL_NS + round(seconds * 1e9)


def tree(span: Span) -> list[tuple[str, float, float]]:
    """Each span with its begin and end on the bench's clock, parts behind what they are parts of."""
    mine = (span.name, (span.start_ns - WALL_NS) / 1e9, (span.end_ns - WALL_NS) / 1e9)
    return [mine, *(line for part in span.parts for line in tree(part))]


def part(span: Span, name: str) -> Span:
    (found,) = (part for part in span.parts if part.name == name)
    return found


def test_a_load_from_disk_is_a_tree_of_its_lookup_promotion_and_copies(bench, sink):
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    bench.leader.cost.prefilled(100, 100.0)
    bench.leader.request_added("r", HASHES[:8], b"", 0, trace_headers=headers)  # at 10 s
    (lookup,) = bench.manager.said()
    bench.clock.advance(0.25)
    bench.answer(lookup, 5, ready=2, disk=3, arrival_s=0.5)
    assert bench.leader.matched("r", 0) == Answer(blocks=5)
    bench.clock.advance(0.25)
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert plan.traced
    bench.clock.advance(0.5)
    bench.manager.send(Progress(lookup=lookup.lookup, ready=5, final=True))
    bench.step()
    bench.clock.advance(1.0)
    report = StepReport(loaded={"r": 1.25}, copied={"r": (at(10.5), at(11.75))})
    bench.leader.updated(report, ["r"], set())

    ((request, parent),) = sink.spans
    assert parent == headers
    assert tree(request) == [
        ("kvbm.request", 10.0, 12.0),
        ("kvbm.lookup", 10.0, 10.25),
        ("kvbm.promotion", 10.25, 11.0),
        ("kvbm.load", 10.5, 12.0),
        ("kvbm.copy", 10.5, 11.75),
    ]
    assert request.attributes == {
        "gen_ai.request.id": "r",
        "kvbm.outcome": "loaded",
        "kvbm.lookups": 1,
        "kvbm.asked_tokens": 32,
        "kvbm.found_host_tokens": 8,
        "kvbm.found_disk_tokens": 12,
        "kvbm.found_remote_tokens": 0,
        "kvbm.loaded_tokens": 20,
    }
    assert part(request, "kvbm.lookup").attributes == {"kvbm.blocks": 8, "kvbm.found_blocks": 5}
    assert part(request, "kvbm.promotion").attributes == {
        "kvbm.blocks": 3,
        "kvbm.expected_seconds": 0.5,
        "kvbm.arrived_blocks": 3,
    }
    (copy,) = part(request, "kvbm.load").parts
    assert copy.attributes == {"kvbm.blocks": 5, "kvbm.bytes": 5 * bench.leader.block_bytes}
    bench.leader.finished("r")
    assert len(sink.spans) == 1
    assert len(bench.leader.traces) == 0


@pytest.mark.parametrize(("told_s", "end_s"), [(10.75, 10.75), (0.0, 12.0), (99.0, 12.0), (3.0, 10.25)])
def test_the_manager_tells_when_the_last_block_came_within_reason(bench, sink, told_s, end_s):
    lookup = bench.add()
    bench.clock.advance(0.25)
    bench.answer(lookup, 5, ready=2, disk=3)
    assert bench.leader.matched("r", 0) == Answer(blocks=5)
    bench.clock.advance(1.75)
    bench.manager.send(Progress(lookup=lookup.lookup, ready=5, final=True, at_s=told_s))
    bench.leader.matched("r", 0)
    bench.leader.allocated("r", 0, ())
    assert tree(sink.take())[2] == ("kvbm.promotion", 10.25, end_s)


def test_the_copies_of_several_ranks_are_one_from_the_first_to_the_last(make_bench, sink):
    bench = make_bench(spans=sink, rank_count=2)
    bench.leader.traces.wall_offset_ns = lambda: WALL_NS
    bench.load(5)
    bench.clock.advance(2.0)
    first = StepReport(loaded={"r": 1.0}, copied={"r": (at(10.5), at(11.0))})
    second = StepReport(loaded={"r": 1.0}, copied={"r": (at(10.25), at(10.75))})
    third = StepReport(loaded={"r": 1.0}, copied={"r": (at(10.75), at(11.5))})
    bench.leader.updated(first.merge(second), (), set())
    bench.leader.updated(third, ["r"], set())
    assert tree(sink.take())[-1] == ("kvbm.copy", 10.25, 11.5)


def test_a_request_that_is_computed_says_why_and_one_that_finds_nothing_does_too(bench, sink):
    bench.promise(5)
    bench.leader.allocated("r", 0, ())
    span = sink.take()
    assert span.attributes["kvbm.outcome"] == "computed"
    assert span.attributes["kvbm.computed_tokens.unused"] == 20
    assert [part.name for part in span.parts] == ["kvbm.lookup"]
    bench.manager.said()
    lookup = bench.add("q")
    bench.answer(lookup, 0)
    assert bench.leader.matched("q", 0) == Answer()
    bench.leader.allocated("q", 0, ())
    assert sink.take().attributes["kvbm.outcome"] == "nothing_found"


def test_a_load_of_which_a_part_fails_says_how_much(bench, sink):
    plan = bench.load(5)
    bench.arrive(plan, {TABLE[3]})
    span = sink.take()
    assert span.attributes["kvbm.outcome"] == "loaded_in_part"
    assert span.attributes["kvbm.loaded_tokens"] == 12
    assert span.attributes["kvbm.computed_tokens.failed"] == 8
    assert span.fault == part(span, "kvbm.load").fault == "2 of 5 blocks did not arrive"


def test_an_answer_that_never_comes_is_a_fault_of_the_lookup(bench, sink):
    bench.add()
    bench.clock.advance(REPLY_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    span = sink.take()
    assert part(span, "kvbm.lookup").fault == "no answer in time"
    assert tree(span) == [("kvbm.request", 10.0, 10.25), ("kvbm.lookup", 10.0, 10.25)]


def test_an_aborted_request_has_a_span_and_nothing_is_kept_of_it(bench, sink):
    bench.add()
    bench.leader.finished("r")
    span = sink.take()
    assert span.attributes["kvbm.outcome"] == "aborted"
    assert part(span, "kvbm.lookup").fault == ""
    bench.manager.said()
    plan = bench.load(5, request="s")
    bench.leader.finished("s")
    assert not sink.spans, "its load runs"
    bench.arrive(plan)
    assert sink.take().attributes["kvbm.outcome"] == "loaded"
    assert len(bench.leader.traces) == 0


def test_a_request_that_comes_back_after_preemption_has_a_span_each_time(bench, sink):
    bench.arrive(bench.load(5))
    sink.take()
    bench.manager.said()
    bench.clock.advance(5.0)
    bench.step(preempted=["r"])
    assert bench.leader.matched("r", 0).later
    (lookup,) = (message for message in bench.manager.said() if isinstance(message, Lookup))
    bench.answer(lookup, 5)
    assert bench.leader.matched("r", 0) == Answer(blocks=5)
    bench.leader.allocated("r", 0, ())
    assert tree(sink.take())[1] == ("kvbm.lookup", 15.0, 15.0)
    bench.leader.finished("r")
    assert not sink.spans


def test_without_a_lookup_there_is_no_span(bench, sink):
    bench.leader.request_added("r", HASHES[:8], b"", on_device=8)
    bench.leader.allocated("r", 0, ())
    bench.leader.finished("r")
    assert not sink.spans


def test_without_a_sink_nothing_is_traced(make_bench):
    bench = make_bench()
    assert bench.leader.traces is None
    assert not bench.load(5).traced
