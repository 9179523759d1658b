"""Times to first token against schedules worked out by hand, and laws that hold for every run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.policy import AdmitAll, DiskFilter, LeafFirstLru
from kvbm.sim.serving.engine import SimulatedEngine
from kvbm.sim.serving.events import Events
from kvbm.sim.serving.machine import Link, Machine
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.conversations import NO_REQUEST, predecessors
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import TraceBuilder
from rigs.property_tests import scale_examples
from rigs.serving import BLOCK_BYTES, BLOCK_TOKENS, make_trace, serve
from rigs.traces import random_trace

# ---- the machine


def test_attention_doubles_a_token_at_its_length() -> None:
    machine = Machine(1, prefill_tokens_per_s=10.0, attention_tokens=100.0)
    assert machine.prefill_s(100, 101) == pytest.approx(0.2, rel=0.01)
    # In pieces or at once: the same.
    assert machine.prefill_s(0, 400) == pytest.approx(machine.prefill_s(0, 150) + machine.prefill_s(150, 400))


def test_a_link_carries_one_transfer_after_the_other() -> None:
    link = Link(100.0)
    assert [link.send(0.0, 50), link.send(0.2, 100), link.send(9.0, 10)] == [0.5, 1.5, 9.1]
    assert link.sent_bytes == 160


def test_events_come_in_order_and_may_ask_for_more() -> None:
    events, seen = Events(), []

    def note(now_s: float, name: str) -> None:
        seen.append((now_s, name))
        if name == "first":
            events.at(now_s, note, "more")

    for when_s, name in ((2.0, "last"), (1.0, "first"), (1.0, "second"), (5.0, "never")):
        events.at(when_s, note, name)
    events.pass_until(2.0)
    assert seen == [(1.0, "first"), (1.0, "second"), (1.0, "more"), (2.0, "last")]


# ---- schedules by hand


def test_without_a_cache_requests_queue_for_prefill() -> None:
    served = serve(make_trace((0.0, "abc"), (1.0, "abc"), (10.0, "a")))
    # 3.01 s of work each for the first two; the second begins when the first is through.
    assert served.ttft_s == pytest.approx([3.01, 3.01 + 3.01 - 1.0, 1.01])
    assert served.computing_s == pytest.approx(7.03)
    assert served.load == pytest.approx(0.703)


def test_a_hit_in_host_memory_is_loaded_and_the_rest_computed() -> None:
    served = serve(make_trace((0.0, "abc"), (5.0, "abcd")), host=10)
    # Three blocks take 0.3 s; the fourth and the last token are computed.
    assert served.ttft_s[1] == pytest.approx(0.3 + 1.01)
    assert (served.host_hits, served.disk_hits) == (3, 0)
    assert served.loaded_bytes == 3 * BLOCK_BYTES


def test_blocks_are_there_once_they_were_computed_not_before() -> None:
    served = serve(make_trace((0.0, "abc"), (1.0, "abc")), host=10)
    # It came when nothing was there, and is looked up again when the engine turns to it.
    assert served.ttft_s[1] == pytest.approx(2.01 + 0.3 + 0.01)
    served = serve(make_trace((0.0, "abc"), (1.0, "xyz"), (1.5, "abc")), host=10)
    assert served.ttft_s[2] == pytest.approx(1.51 + 3.01 + 0.3 + 0.01)


def test_while_one_loads_another_computes() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), host_bytes_per_s=1_500.0)
    # Both begin at 6.0: the first loads for 2 s, the second computes 1.01 s meanwhile.
    served = serve(make_trace((0.0, "abc"), (5.0, "z"), (5.5, "abc"), (5.6, "y")), host=10, machine=slow)
    free_s = 5.0 + 1.01
    assert served.ttft_s[2] == pytest.approx(free_s + 2.0 + 0.01 - 5.5)
    assert served.ttft_s[3] == pytest.approx(free_s + 1.01 - 5.6)


def test_what_computes_faster_than_it_loads_is_computed() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), host_bytes_per_s=900.0)
    served = serve(make_trace((0.0, "abc"), (5.0, "abc")), host=10, machine=slow)
    assert served.ttft_s[1] == pytest.approx(3.01)
    assert (served.host_hits, served.declined_blocks) == (0, 3)


def test_a_hit_on_disk_goes_through_host_memory() -> None:
    # Host memory holds one chain: the second request drives the first out, to be read back from disk.
    trace = make_trace((0.0, "abc"), (10.0, "xyz"), (20.0, "abc"))
    served = serve(trace, host=3, disk=10)
    # Read block by block, 1.5 s; the last goes on to the device 0.1 s after it was read.
    assert served.ttft_s[2] == pytest.approx(1.5 + 0.1 + 0.01)
    assert (served.host_hits, served.disk_hits) == (0, 3)
    assert served.disk_read_bytes == 3 * BLOCK_BYTES
    assert served.disk_written_bytes == 6 * BLOCK_BYTES
    assert served.written_per_hit == 2.0
    assert served.disk_hit_rate == pytest.approx(3 / 9)


def test_reading_begins_when_a_request_comes_not_when_the_engine_is_free() -> None:
    trace = make_trace((0.0, "abc"), (10.0, "xyz"), (20.0, "q"), (20.0, "abc"))
    served = serve(trace, host=3, disk=10)
    # "q" takes until 21.01; by then two of the three blocks have been read.
    assert served.ttft_s[3] == pytest.approx(1.5 + 0.1 + 0.01)
    assert served.disk_hits == 3


def test_only_as_much_of_a_disk_hit_is_read_as_pays() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), 10_000.0, disk_read_bytes_per_s=900.0)
    trace = make_trace((0.0, "abc"), (10.0, "xyz"), (20.0, "abc"))
    served = serve(trace, host=3, disk=10, machine=slow)
    assert served.ttft_s[2] == pytest.approx(3.01)
    assert (served.disk_hits, served.disk_read_bytes, served.declined_blocks) == (0, 0, 3)


def test_the_filter_lets_what_was_used_again_onto_disk() -> None:
    trace = make_trace((0.0, "ab"), (10.0, "abc"), (20.0, "xyz"), (30.0, "abc"))
    served = serve(trace, host=3, disk=10, admission=DiskFilter())
    # Of the first three requests only a and b were there when they were used again; c came a second time at the end.
    assert served.disk_written_bytes == 3 * BLOCK_BYTES
    assert (served.host_hits, served.disk_hits) == (2, 2)
    assert served.ttft_s[3] == pytest.approx(1.0 + 0.1 + 1.01)


def test_what_leaves_host_memory_before_it_is_written_is_skipped() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), 10_000.0, 2_000.0, disk_write_bytes_per_s=100.0)
    trace = make_trace((0.0, "a"), (10.0, "b"), (12.0, "c"), (14.0, "d"), seconds=0.0)
    served = serve(trace, host=2, disk=10, machine=slow)
    # A write takes 10 s: a and b are leased meanwhile, so d drives c out before its turn.
    assert served.disk_written_bytes == 3 * BLOCK_BYTES
    assert served.skipped_writes == 1


# ---- conversations


def test_predecessors() -> None:
    trace = make_trace(
        (0.0, "sabc"), (1.0, "sxyz"), (10.0, "sabcdef"), (20.0, "sxyuv"), (30.0, "sqr"), (40.0, "sabcdefg")
    )
    # Its last block was not full, then: z is not in the next prompt. s alone says nothing.
    assert predecessors(trace) == [NO_REQUEST, NO_REQUEST, 0, 1, NO_REQUEST, 2]


def test_who_was_not_answered_yet_is_no_predecessor() -> None:
    assert predecessors(make_trace((0.0, "abc"), (1.0, "abcd"), seconds=5.0)) == [NO_REQUEST, NO_REQUEST]


def test_users_wait_for_answers() -> None:
    trace = make_trace((0.0, "abc"), (2.0, "abcd"), (2.1, "x"))
    opened, closed = serve(trace, closed_loop=False), serve(trace, closed_loop=True)
    assert opened.ttft_s[1] == pytest.approx(3.01 + 4.01 - 2.0)
    # Answered at 3.51, and a pause of 1.5 s as in the trace: it comes at 5.01, after "x" was served.
    assert closed.ttft_s[1] == pytest.approx(4.01)
    assert closed.ttft_s[2] == pytest.approx(3.01 + 1.01 - 2.1)


# ---- laws


@settings(max_examples=scale_examples(40))
@given(
    seed=st.integers(0, 5000),
    host=st.integers(1, 30),
    disk=st.integers(0, 60),
    every_s=st.sampled_from([0.1, 1.0, 10.0]),
    rates=st.tuples(*[st.sampled_from([300.0, 3000.0, 1e9])] * 3),
    closed_loop=st.booleans(),
    filtered=st.booleans(),
)
def test_laws(
    seed: int, host: int, disk: int, every_s: float, rates: Sequence[float], closed_loop: bool, filtered: bool
) -> None:
    source = random_trace(seed, requests=40)
    builder = TraceBuilder("law", BLOCK_TOKENS)
    for r in source.requests:
        builder.add(r.arrived_s * every_s, r.blocks, BLOCK_TOKENS * len(r.blocks), 3, 1.0)
    trace = builder.build()
    tiers = [SimulatedTier(n, LeafFirstLru(n), insist=bool(disk)) if n else None for n in (host, disk)]
    admission = (DiskFilter() if filtered else AdmitAll()) if disk else None
    engine = SimulatedEngine(
        trace, Machine(BLOCK_BYTES, 100.0, 500.0, *rates), tiers[0], tiers[1], admission, closed_loop
    )
    served = engine.run()
    assert 0 <= served.host_hits + served.disk_hits <= trace.accesses
    assert served.loaded_bytes == (served.host_hits + served.disk_hits) * BLOCK_BYTES
    assert served.disk_read_bytes >= served.disk_hits * BLOCK_BYTES
    assert all(ttft_s > 0.0 for ttft_s in served.ttft_s)
    # Whatever is loaded is not computed, and nothing else is spared.
    baseline = serve(trace, machine=Machine(BLOCK_BYTES, 100.0, 500.0))
    assert served.computing_s <= baseline.computing_s + 1e-9
    # Every lease has ended.
    assert not any(tier.counts().leased for tier in tiers if tier is not None)
    assert not engine._arriving


def test_the_same_run_gives_the_same_times() -> None:
    trace = chats(ChatShape(conversations=60, conversations_per_s=2.0))
    first, second = (serve(trace, 200, 800, Machine(BLOCK_BYTES), closed_loop=True) for _ in range(2))
    assert first == second


def test_a_cache_is_worth_something() -> None:
    trace = chats(ChatShape(conversations=80, conversations_per_s=1.0))
    machine = Machine(64 * 131_072)
    without, with_cache = (serve(trace, host, machine=machine, closed_loop=True) for host in (0, 2000))
    assert sum(with_cache.ttft_s) < 0.5 * sum(without.ttft_s)
    assert with_cache.host_hit_rate > 0.7
