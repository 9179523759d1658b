"""How blocks get onto the simulated disk: on eviction, within a budget, and by the manager's admission policies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.policy import AdmissionPolicy, AdmitAll, DiskFilter, LeafFirstLru, WriteBudget, make_policy
from kvbm.policy.admission.write_budget import DAY_S
from kvbm.policy.departures import Departures
from kvbm.sim.serving.disk import WRITES, DiskRules
from kvbm.sim.serving.engine import Served, SimulatedEngine
from kvbm.sim.serving.machine import Machine
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace, TraceBuilder
from rigs.property_tests import scale_examples
from rigs.serving import BLOCK_BYTES, MACHINE, make_trace, serve
from rigs.traces import random_trace


def on_eviction(
    trace: Trace,
    host: int,
    disk: int,
    machine: Machine = MACHINE,
    admission: AdmissionPolicy | None = None,
) -> tuple[Served, SimulatedTier, SimulatedTier]:
    """The events of a run, and the tiers as they were left."""
    upper = SimulatedTier(host, Departures(LeafFirstLru(host), host), insist=True)
    lower = SimulatedTier(disk, LeafFirstLru(disk))
    admit = AdmitAll() if admission is None else admission
    engine = SimulatedEngine(trace, machine, upper, lower, admit, closed_loop=False, writes_in_flight_max=1)
    return engine.run(), upper, lower


# ---- schedules by hand


def test_nothing_is_written_while_there_is_room() -> None:
    trace = make_trace((0.0, "abc"), (10.0, "abcd"), (20.0, "abc"))
    # A sixteenth of the slots, one at least, is kept free or clean.
    served, _, _ = on_eviction(trace, host=5, disk=10)
    assert (served.host_hits, served.disk_written_bytes) == (6, 0)
    assert serve(trace, host=5, disk=10, admission=AdmitAll()).disk_written_bytes == 4 * BLOCK_BYTES


def test_with_a_block_go_those_before_it() -> None:
    served, host, disk = on_eviction(make_trace((0.0, "abcd"), (20.0, "x")), host=4, disk=10)
    # Full, host memory sets d aside; on disk it is found only behind a, b and c. x takes its place.
    assert served.disk_written_bytes == 4 * BLOCK_BYTES
    assert [host.holds(block) for block in range(5)] == [True, True, True, False, True]
    assert [disk.holds(block) for block in range(5)] == [True, True, True, True, False]


def test_what_left_is_found_on_disk() -> None:
    trace = make_trace((0.0, "abc"), (10.0, "xyz"), (20.0, "abc"))
    served, _, _ = on_eviction(trace, host=3, disk=10)
    assert (served.host_hits, served.disk_hits) == (0, 3)
    assert served.ttft_s[2] == pytest.approx(1.5 + 0.1 + 0.01)
    assert served.written_per_hit == 2.0


def test_what_is_used_once_more_is_not_written_again() -> None:
    letters = "abcd"
    trace = make_trace(*((10.0 * i, letters) for i in range(4)))
    served, _, _ = on_eviction(trace, host=4, disk=10)
    # Each use takes d back, each full tier sets it aside again: it lies on disk already.
    assert served.disk_written_bytes == 4 * BLOCK_BYTES
    assert served.host_hits == 12


def test_the_filter_knows_by_then_how_often_a_block_was_used() -> None:
    trace = make_trace(*((10.0 * i, letter) for i, letter in enumerate("aabcccdef")))
    served, _, disk = on_eviction(trace, host=3, disk=10, admission=DiskFilter())
    # a and c were used again while they were there; the others never.
    assert [disk.holds(block) for block in range(6)] == [True, False, True, False, False, False]
    assert served.disk_written_bytes == 2 * BLOCK_BYTES


def test_what_a_prompt_needs_at_once_goes_unwritten_in_part() -> None:
    served, _, _ = on_eviction(make_trace((0.0, "abc"), (20.0, "xyz")), host=3, disk=10)
    # One was set aside and written in time, with its prefix; the other two are on disk for that reason alone.
    assert (served.disk_written_bytes, served.skipped_writes) == (6 * BLOCK_BYTES, 0)
    served, _, disk = on_eviction(make_trace((0.0, "a"), (1.5, "b"), (3.0, "c"), (20.0, "xyz")), 3, 10)
    # b and c were not set aside before they had to go.
    assert [disk.holds(block) for block in range(3)] == [True, False, False]
    assert served.skipped_writes == 2


def test_what_cannot_be_written_in_time_goes_unwritten() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), 10_000.0, 2_000.0, disk_write_bytes_per_s=1.0)
    trace = make_trace((0.0, "a"), (2.0, "b"), (4.0, "c"), (6.0, "d"), (8.0, "e"), seconds=0.0)
    served, host, _ = on_eviction(trace, host=3, disk=10, machine=slow)
    # a is being written, and leased, all the time; b and c wait behind it until d and e need their places.
    assert [host.holds(block) for block in range(5)] == [True, False, False, True, True]
    assert served.skipped_writes == 2
    assert len(served.ttft_s) == 5


# ---- budgets


def test_a_budget_bounds_what_is_written() -> None:
    trace = chats(ChatShape(conversations=60))
    assert trace.seconds < DAY_S
    block_bytes = 64 * 131_072
    day_bytes = 4800 * block_bytes
    written = {}
    for write in WRITES:
        for budget in (None, day_bytes):
            rules = DiskRules("all", write, budget)
            host = SimulatedTier(300, rules.host_policy(LeafFirstLru(300), 300), insist=True)
            disk = SimulatedTier(3000, LeafFirstLru(3000))
            admission = rules.admission_policy(3000, block_bytes)
            served = SimulatedEngine(trace, Machine(block_bytes), host, disk, admission).run()
            written[write, budget] = served.disk_written_bytes
    for write in WRITES:
        # An hour's worth at once, the rest evenly.
        most = day_bytes / 24 + (day_bytes * 23 / 24) * (trace.seconds + 60.0) / DAY_S
        assert day_bytes / 24 <= written[write, day_bytes] <= most < written[write, None]


def test_what_was_admitted_and_not_written_is_given_back() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), 10_000.0, 2_000.0, disk_write_bytes_per_s=100.0)
    trace = make_trace((0.0, "a"), (10.0, "b"), (12.0, "c"), (14.0, "d"), seconds=0.0)
    budget = WriteBudget(AdmitAll(), 96 * BLOCK_BYTES, BLOCK_BYTES)
    tiers = [SimulatedTier(n, LeafFirstLru(n), insist=True) for n in (2, 10)]
    served = SimulatedEngine(trace, slow, *tiers, budget, closed_loop=False, writes_in_flight_max=1).run()
    assert served.skipped_writes == 1
    # Four at once and some 92 more evenly over the day: d and the one that was given back are left, and no more.
    assert [budget.spend(16.0) for _ in range(3)] == [True, False, False]


# ---- rules


def test_rules_that_are_none() -> None:
    with pytest.raises(SettingsError, match=r"--admission='x' cannot be used: one of filter, all, ghost"):
        DiskRules("x").check()
    with pytest.raises(SettingsError, match=r"--write='x' cannot be used: one of through, eviction"):
        DiskRules(write="x").check()
    with pytest.raises(SettingsError, match=r"--write-budget=15 cannot be used: at least 20 bytes, 2 blocks"):
        DiskRules(budget_bytes_per_day=15).admission_policy(100, 10)
    assert isinstance(DiskRules(budget_bytes_per_day=20).admission_policy(100, 10), WriteBudget)


# ---- laws


@settings(max_examples=scale_examples(60))
@given(
    seed=st.integers(0, 5000),
    host=st.integers(1, 40),
    disk=st.integers(1, 60),
    every_s=st.sampled_from([0.1, 1.0, 10.0]),
    rates=st.tuples(*[st.sampled_from([300.0, 3000.0, 1e9])] * 3),
    policy=st.sampled_from(["lru", "gittins"]),
    rules=st.sampled_from(
        [DiskRules("all", "eviction"), DiskRules("filter", "eviction"), DiskRules("all", "eviction", 10**6)]
    ),
)
def test_laws(
    seed: int, host: int, disk: int, every_s: float, rates: Sequence[float], policy: str, rules: DiskRules
) -> None:
    trace = random_trace(seed, requests=40)
    spaced = make_spaced(trace, every_s)
    upper = SimulatedTier(host, rules.host_policy(make_policy(policy, host), host), insist=True)
    lower = SimulatedTier(disk, make_policy(policy, disk))
    admission = rules.admission_policy(disk, BLOCK_BYTES)
    engine = SimulatedEngine(spaced, Machine(BLOCK_BYTES, 100.0, 500.0, *rates), upper, lower, admission)
    served = engine.run()
    assert 0 <= served.host_hits + served.disk_hits <= spaced.accesses
    assert served.disk_written_bytes == (lower.counts().resident + lower.evicted_count) * BLOCK_BYTES
    assert all(ttft_s > 0.0 for ttft_s in served.ttft_s)
    # Every lease has ended, nothing is on its way any more, and no place was lost.
    for tier in (upper, lower):
        tier.check()
        assert tier.counts().leased == tier.counts().filling == 0
    writes = engine._writes
    assert writes is not None and not writes.queued_count
    # What is to be written and what may go is there, each once.
    departures = upper.policy
    assert isinstance(departures, Departures)
    assert not departures.writing
    assert all(upper.find(upper.key_of(slot)) == slot for slot in departures.ready)


def make_spaced(trace: Trace, every_s: float) -> Trace:
    """The same requests, so many times as far apart."""
    builder = TraceBuilder("law", trace.block_tokens)
    for r in trace.requests:
        builder.add(r.arrived_s * every_s, r.blocks, r.prompt_tokens, 3, 1.0)
    return builder.build()
