"""The queue to disk over small protocols: numbers for keys, and a writer that is neither an arena nor a medium."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from kvbm.block import Outcome, SlotIndex, Tier
from kvbm.clock import ManualClock
from kvbm.manager.offload import Offloader
from kvbm.manager.pool import SlotPool
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll, LeafFirstLru, WriteBudget
from kvbm.tiers.contract import BlockEnd, Completion

SKIPPED = "kvbm_skipped_offloads_total"


class Writer:
    """Takes up to `limit` writes and ends them when the test says so."""

    def __init__(self, limit: int = 8, run_blocks_max: int = 1) -> None:
        self.fault = ""
        self.limit = limit
        self.run_blocks_max = run_blocks_max
        self.asked = 0
        self.runs: list[int] = []
        self.writing: dict[int, tuple[int, int | None]] = {}
        self.written: list[tuple[int, int | None]] = []

    @property
    def trouble(self) -> str:
        return self.fault

    @property
    def room(self) -> int:
        return self.limit - len(self.writing)

    def write_run(
        self, job_id: int, keys: Sequence[int], parent: int | None, source: SlotIndex, target: SlotIndex
    ) -> Outcome:
        self.asked += 1
        if len(self.writing) >= self.limit:
            return Outcome.THROTTLED
        assert len(keys) <= self.run_blocks_max
        self.runs.append(len(keys))
        self.writing[job_id] = keys[0], parent
        return Outcome.PENDING

    def finish(self, offloader: Offloader[int], outcome: Outcome = Outcome.HIT, count: int = 1) -> None:
        """The oldest write ends, of so many blocks."""
        job_id = next(iter(self.writing))
        self.written.append(self.writing.pop(job_id))
        blocks = [BlockEnd(outcome)] * count
        assert offloader.completed(Completion(job_id=job_id, outcome=outcome, bytes_moved=1, blocks=blocks))


class Rig:
    """Host memory and disk of a few slots, and the queue between them."""

    def __init__(self, limit: int = 8, budget: bool = False) -> None:
        self.host: SlotPool[int] = SlotPool(Tier.HOST, 4, LeafFirstLru(4))
        self.disk: SlotPool[int] = SlotPool(Tier.DISK, 16, LeafFirstLru(16))
        self.writer = Writer(limit)
        self.metrics = Metrics()
        self.clock = ManualClock(0.0)
        self.offloader: Offloader[int] = Offloader(
            self.host,
            self.disk,
            self.writer,
            WriteBudget(AdmitAll(), 48, 1) if budget else AdmitAll(),
            self.metrics,
            self.clock,
            count(1),
            in_flight_max=8,
        )

    def store(self, *keys: int, parent: int | None = None) -> None:
        """A chain comes into host memory."""
        self.clock.advance(1.0)
        slots = self.host.reserve_chain(keys, parent, self.clock(), insist=True)
        self.host.commit_all(slots)
        self.offloader.committed(keys, (parent, *keys[:-1]))
        self.offloader.pump()

    def evict(self, key: int) -> None:
        """Host memory gives a block up."""
        slot = self.host.find(key)
        assert slot is not None
        self.host.evict(slot)


def test_blocks_are_written_as_they_come_and_found_once_they_are_written() -> None:
    rig = Rig()
    rig.store(0, 1)
    assert list(rig.writer.writing.values()) == [(0, None), (1, 0)]
    assert rig.host.counts().leased == 2, "their bytes are being read"
    assert rig.disk.find(0) is None
    rig.writer.finish(rig.offloader)
    assert rig.disk.find(0) is not None
    rig.offloader.used([0, 1], None)
    assert rig.offloader.queued_count == 1, "what is on disk, or on its way, is not queued again"
    rig.writer.finish(rig.offloader)
    assert rig.offloader.queued_count == rig.host.counts().leased == 0
    assert not rig.offloader.completed(Completion(job_id=99, outcome=Outcome.HIT, blocks=()))


@pytest.mark.parametrize("budget", [False, True])
def test_a_block_that_host_memory_evicts_before_its_turn_is_skipped(budget: bool) -> None:
    rig = Rig(limit=1, budget=budget)
    rig.store(0)
    rig.store(1)
    assert (len(rig.writer.writing), rig.offloader.queued_count) == (1, 2)
    rig.evict(1)
    rig.writer.finish(rig.offloader)
    rig.offloader.pump()
    assert rig.metrics.value(SKIPPED, reason="evicted") == 1
    assert rig.offloader.queued_count == 0
    if budget:  # a 24th of 48 bytes at once: what was not written was given back
        rig.store(2)
        assert list(rig.writer.writing.values()) == [(2, None)]


@pytest.mark.parametrize(("fault", "reason"), [("", "full"), ("the medium is gone", "")])
def test_a_write_that_fails_leaves_no_block_on_disk(fault: str, reason: str) -> None:
    rig = Rig()
    rig.store(0)
    rig.writer.fault = fault
    rig.writer.finish(rig.offloader, Outcome.RETRY)
    assert rig.disk.counts().free == 16
    failures = rig.metrics.value("kvbm_failures_total", tier="disk", kind="io")
    assert failures == (0 if reason else 1)
    assert not reason or rig.metrics.value(SKIPPED, reason=reason) == 1


def test_a_chain_is_written_in_runs() -> None:
    rig = Rig()
    rig.writer.run_blocks_max = 3
    rig.store(0, 1, 2, 3)
    assert (rig.writer.runs, list(rig.writer.writing.values())) == ([3, 1], [(0, None), (3, 2)])
    assert rig.offloader.queued_count == 4
    rig.writer.finish(rig.offloader, Outcome.HIT, 3)
    assert [rig.disk.find(key) is not None for key in range(4)] == [True, True, True, False]
    assert (rig.offloader.queued_count, rig.host.counts().leased) == (1, 1)


def test_blocks_that_are_no_chain_are_no_run() -> None:
    rig = Rig()
    rig.writer.run_blocks_max = 3
    rig.writer.limit = 0
    rig.store(0)
    rig.store(1)
    rig.store(2, parent=1)
    rig.writer.limit = 8
    rig.offloader.pump()
    assert (rig.writer.runs, list(rig.writer.writing.values())) == ([1, 2], [(0, None), (1, None)])


def test_runs_count_by_their_blocks_against_what_may_be_in_flight() -> None:
    rig = Rig()
    rig.writer.run_blocks_max = 3
    rig.offloader.in_flight_max = 2
    rig.store(0, 1, 2)
    assert rig.writer.runs == [2]
    rig.writer.finish(rig.offloader, Outcome.HIT, 2)
    rig.offloader.pump()
    assert rig.writer.runs == [2, 1]


def test_a_disk_without_room_is_not_asked_and_no_slot_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.writer.limit = 0
    monkeypatch.setattr(rig.disk, "reserve_chain", lambda *_: pytest.fail("a slot was reserved in vain"))
    rig.store(0, 1, 2)
    for _ in range(3):
        rig.offloader.pump()
    assert (rig.writer.asked, rig.offloader.queued_count) == (0, 3)


def test_runs_are_split_where_disk_slots_do_not_follow_one_another() -> None:
    rig = Rig()
    rig.writer.run_blocks_max = 4
    for slot in rig.disk.reserve_chain(range(100, 116), None, 0.0)[::2]:
        rig.disk.abort(slot)
    rig.store(0, 1, 2, 3)
    assert rig.writer.runs == [1, 1, 1, 1]
    assert [parent for _, parent in rig.writer.writing.values()] == [None, 0, 1, 2]


def test_what_is_refused_in_the_middle_of_a_run_waits() -> None:
    """The room that a writer names is an upper bound."""
    rig = Rig()
    rig.writer.run_blocks_max = 4
    rig.writer.limit = 1
    for slot in rig.disk.reserve_chain(range(100, 116), None, 0.0)[::2]:
        rig.disk.abort(slot)
    rig.store(0, 1, 2)
    assert (rig.writer.runs, rig.offloader.queued_count) == ([1], 3)
    assert rig.disk.counts().filling == 8 + 1
    while rig.writer.writing:
        rig.writer.finish(rig.offloader)
        rig.offloader.pump()
    assert [rig.disk.find(key) is not None for key in range(3)] == [True] * 3


def test_blocks_that_are_not_to_be_written_any_more_leave_the_queue_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbm.manager.offload.GONE_MAX", 2)
    rig = Rig(limit=1)
    rig.store(0)
    rig.store(1, 2, 3)
    for key in (3, 2, 1):
        rig.evict(key)
    rig.writer.finish(rig.offloader)
    assert rig.offloader.pump(), "to be called again"
    assert rig.metrics.value(SKIPPED, reason="evicted") == 2
    assert not rig.offloader.pump()
    assert rig.metrics.value(SKIPPED, reason="evicted") == 3
    assert rig.offloader.queued_count == 0


def test_a_chain_that_gets_no_slot_on_disk_leaves_the_queue_as_a_whole_one_at_a_time() -> None:
    """A full disk may refuse thousands of blocks: a turn of the loop does not wait for all of them."""
    rig = Rig()
    rig.writer.run_blocks_max = 4
    rig.writer.limit = 0
    rig.store(0, 1)
    rig.store(10, 11)
    taken = rig.disk.reserve_chain(range(100, 116), None, 0.0)
    rig.writer.limit = 8
    assert rig.offloader.pump(), "to be called again"
    assert (rig.metrics.value(SKIPPED, reason="full"), rig.offloader.queued_count) == (2, 2)
    assert not rig.offloader.pump()
    assert (rig.metrics.value(SKIPPED, reason="full"), rig.offloader.queued_count) == (4, 0)
    rig.disk.abort_all(taken[::-1])
    rig.offloader.used([0, 1], None)
    assert not rig.offloader.pump()
    assert rig.writer.runs == [2]


def test_a_block_that_was_evicted_before_it_was_offered_is_counted() -> None:
    """Long stores are offered some turns after they came."""
    rig = Rig()
    rig.offloader.committed([7], [None])
    assert rig.metrics.value(SKIPPED, reason="evicted") == 1
    rig.offloader.used([8], None)
    assert rig.metrics.value(SKIPPED, reason="evicted") == 1, "it may have been on the device alone"
    assert rig.offloader.queued_count == 0
