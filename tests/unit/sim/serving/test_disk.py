"""How blocks get onto the simulated disk: as they are stored, within a budget, by the manager's admission policies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.policy import AdmissionPolicy, AdmitAll, DiskFilter, LeafFirstLru, WriteBudget, make_policy
from kvbm.policy.admission.write_budget import DAY_S
from kvbm.sim.serving.disk import DiskRules
from kvbm.sim.serving.engine import Served, SimulatedEngine
from kvbm.sim.serving.machine import Machine
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace, TraceBuilder
from rigs.property_tests import scale_examples
from rigs.serving import BLOCK_BYTES, MACHINE, make_trace
from rigs.traces import random_trace


def run(
    trace: Trace,
    host: int,
    disk: int,
    machine: Machine = MACHINE,
    admission: AdmissionPolicy | None = None,
) -> tuple[Served, SimulatedTier, SimulatedTier]:
    """The events of a run, and the tiers as they were left."""
    upper = SimulatedTier(host, LeafFirstLru(host), insist=True)
    lower = SimulatedTier(disk, LeafFirstLru(disk))
    admit = AdmitAll() if admission is None else admission
    engine = SimulatedEngine(trace, machine, upper, lower, admit, closed_loop=False, writes_in_flight_max=1)
    return engine.run(), upper, lower


# ---- schedules by hand


def test_what_left_is_found_on_disk() -> None:
    trace = make_trace((0.0, "abc"), (10.0, "xyz"), (20.0, "abc"))
    served, _, _ = run(trace, host=3, disk=10)
    assert (served.host_hits, served.disk_hits) == (0, 3)
    assert served.ttft_s[2] == pytest.approx(1.5 + 0.1 + 0.01)
    assert served.written_per_hit == 2.0


def test_what_is_used_once_more_is_not_written_again() -> None:
    trace = make_trace(*((10.0 * i, "abcd") for i in range(4)))
    served, _, _ = run(trace, host=4, disk=10)
    assert served.disk_written_bytes == 4 * BLOCK_BYTES
    assert served.host_hits == 12


def test_the_filter_writes_what_is_used_again() -> None:
    trace = make_trace(*((10.0 * i, letter) for i, letter in enumerate("aabcccdef")))
    served, _, disk = run(trace, host=3, disk=10, admission=DiskFilter())
    assert [disk.holds(block) for block in range(6)] == [True, False, True, False, False, False]
    assert served.disk_written_bytes == 2 * BLOCK_BYTES


def test_what_cannot_be_written_in_time_goes_unwritten() -> None:
    slow = Machine(BLOCK_BYTES, 100.0, float("inf"), 10_000.0, 2_000.0, disk_write_bytes_per_s=1.0)
    trace = make_trace((0.0, "a"), (2.0, "b"), (4.0, "c"), (6.0, "d"), (8.0, "e"), seconds=0.0)
    served, host, _ = run(trace, host=3, disk=10, machine=slow)
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
    for budget in (None, day_bytes):
        host = SimulatedTier(300, LeafFirstLru(300), insist=True)
        disk = SimulatedTier(3000, LeafFirstLru(3000))
        admission = DiskRules("all", budget).admission_policy(3000, block_bytes)
        served = SimulatedEngine(trace, Machine(block_bytes), host, disk, admission).run()
        written[budget] = served.disk_written_bytes
    # An hour's worth at once, the rest evenly.
    most = day_bytes / 24 + (day_bytes * 23 / 24) * (trace.seconds + 60.0) / DAY_S
    assert day_bytes / 24 <= written[day_bytes] <= most < written[None]


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
    rules=st.sampled_from([DiskRules("all"), DiskRules("filter"), DiskRules("all", 10**6)]),
)
def test_laws(
    seed: int, host: int, disk: int, every_s: float, rates: Sequence[float], policy: str, rules: DiskRules
) -> None:
    trace = random_trace(seed, requests=40)
    spaced = make_spaced(trace, every_s)
    upper = SimulatedTier(host, make_policy(policy, host), insist=True)
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


def make_spaced(trace: Trace, every_s: float) -> Trace:
    """The same requests, so many times as far apart."""
    builder = TraceBuilder("law", trace.block_tokens)
    for r in trace.requests:
        builder.add(r.arrived_s * every_s, r.blocks, r.prompt_tokens, 3, 1.0)
    return builder.build()
