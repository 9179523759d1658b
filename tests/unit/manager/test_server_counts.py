"""The manager's counts of lookups and loads are those that the help texts describe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.block import Outcome, Tier
from kvbm.hashing import join_keys
from kvbm.observe.metric_table import BY_NAME
from kvbm.observe.metrics import Histogram
from kvbm.protocol import (
    UNLOADED_REASONS,
    Commit,
    Lookup,
    LookupReply,
    Progress,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
)
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, LAYOUT, ManagerBench, store

HOST = bytes([Tier.HOST])


def unloaded(manager: ManagerBench) -> dict[str, float]:
    """By reason, without the zeros."""
    values = {
        reason: manager.metrics.value("kvbm_unloaded_blocks_total", reason=reason)
        for reason in UNLOADED_REASONS
    }
    return {reason: value for reason, value in values.items() if value}


def test_every_reason_that_a_leader_may_give_has_its_series() -> None:
    (label,) = BY_NAME["kvbm_unloaded_blocks_total"].labels
    assert label.values == UNLOADED_REASONS


def test_an_engine_says_what_it_tries_again(manager: ManagerBench) -> None:
    leader, _ = manager.engine()

    def retries() -> tuple[float, float]:
        lookups, stores = (
            manager.metrics.value("kvbm_retries_total", operation=name) for name in ("lookup", "store")
        )
        return lookups, stores

    for again, expected in ((False, (0, 0)), (True, (1, 1))):
        leader.send(Lookup(lookup=1 + again, keys=join_keys(KEYS[:2]), again=again))
        leader.expect(LookupReply)
        leader.send(Reserve(store=5 + again, parent=b"", keys=join_keys(KEYS[:2]), again=again))
        leader.expect(ReserveReply)
        assert retries() == expected


def test_a_wait_for_slots_is_counted_where_it_is_a_time(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    for number, answer_s in enumerate((0.25, 0.0, -1.0, float("nan"), float("inf")), 1):
        leader.reserve(number, KEYS[number : number + 1])
        leader.send(Commit(store=number, answer_s=answer_s))
    (rows,) = (
        rows for metric, rows in manager.metrics.series() if metric.name == "kvbm_reserve_answer_seconds"
    )
    ((_, histogram),) = rows
    assert isinstance(histogram, Histogram)
    assert (sum(histogram.counts), histogram.total) == (1, 0.25)


def test_matched_tokens_are_those_that_a_scheduler_was_promised(manager: ManagerBench) -> None:
    """Once for each request, whatever became of the load; found and not promised is not matched."""
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:6])
    for number in (2, 3):
        assert len(leader.lookup(number, KEYS[:6]).slots) == 6
    assert manager.metrics.value("kvbm_matched_tokens") == 0
    leader.send(Release(lookup=2, loaded=3, failed=2, seconds=0.1, unloaded={"cost": 1, "failed": 2}))
    leader.send(Release(lookup=3, unloaded={"cost": 6}))
    manager.step()
    assert manager.metrics.value("kvbm_matched_tokens") == 5 * LAYOUT.block_tokens
    assert manager.metrics.value("kvbm_onboard_blocks_h2d") == 3
    assert manager.metrics.value("kvbm_failures_total", tier="host", kind="load") == 2
    assert unloaded(manager) == {"cost": 7, "failed": 2}


def test_a_lease_that_has_ended_takes_no_count_with_it(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.send(Release(lookup=2))
    leader.send(Release(lookup=2, unloaded={"deadline": 2}))
    leader.send(Release(lookup=77, loaded=1))
    manager.step()
    assert unloaded(manager) == {"deadline": 2}
    assert manager.metrics.value("kvbm_matched_tokens") == LAYOUT.block_tokens


def test_counts_that_make_no_sense_change_nothing(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    leader.send(Release(lookup=2, loaded=-3, failed=-1, unloaded={"cost": -5, "because": 3, "stale": 1}))
    manager.step()
    assert unloaded(manager) == {"stale": 1}
    assert manager.metrics.value("kvbm_matched_tokens") == 0
    assert manager.server.engine_count == 1


@pytest.fixture
def staged(make_manager: Callable[..., ManagerBench], below: FakeTier) -> ManagerBench:
    """A disk, and host memory only as the way to it: room for eight blocks."""
    return make_manager(
        host_blocks=None, disk_blocks=32, staging_bytes=8 * LAYOUT.slot_bytes, disk_offload_filter=False
    )


def test_what_is_found_in_a_staging_area_is_a_disk_hit(staged: ManagerBench, below: FakeTier) -> None:
    leader, worker = staged.engine()
    store(leader, worker, 1, KEYS[:4])
    below.release()
    reply = leader.lookup(2, KEYS[:4])
    assert reply.sources == HOST * 4, "what loading takes depends on where they lie"
    leader.send(Release(lookup=2, loaded=4, seconds=0.1))
    staged.tick()
    value = staged.metrics.value
    assert value("kvbm_hit_blocks_total", tier="host") == value("kvbm_hit_bytes_total", tier="host") == 0
    assert value("kvbm_hit_blocks_total", tier="disk") == 4
    assert value("kvbm_hit_bytes_total", tier="disk") == 4 * LAYOUT.block_bytes
    assert (value("kvbm_onboard_blocks_h2d"), value("kvbm_onboard_blocks_d2d")) == (0, 4)
    assert (value("kvbm_host_cache_hit_rate"), value("kvbm_disk_cache_hit_rate")) == (0.0, 1.0)
    up = {
        values
        for metric, rows in staged.metrics.series()
        for values, _ in rows
        if metric.name == "kvbm_tier_up"
    }
    assert up == {("disk",)}, "host memory is no tier that was configured"


@pytest.mark.parametrize("cut", [False, True])
def test_a_load_that_fails_counts_where_the_blocks_were_found(
    make_manager: Callable[..., ManagerBench], below: FakeTier, cut: bool
) -> None:
    """Two blocks in host memory before two on disk; what the lease lost meanwhile, disk did not give."""
    manager = make_manager(disk_blocks=32, disk_offload_filter=False)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    below.release()
    manager.step()
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == 4
    store(leader, worker, 2, KEYS[:2])
    below.release()
    manager.step()
    reply = leader.lookup(3, KEYS[:4])
    assert reply.sources == bytes((Tier.HOST, Tier.HOST, Tier.DISK, Tier.DISK))
    if cut:
        (slot,) = (slot for slot, entry in below.medium.entries.items() if entry.key == KEYS[2])
        below.medium.corrupt(slot)
        below.release()
        assert leader.expect(Progress) == Progress(lookup=3, ready=2, final=True, at_s=manager.clock())
    leader.send(Release(lookup=3, loaded=1, failed=3, seconds=0.1))
    manager.step()
    assert failures(manager) == (1, 2)


def test_a_load_that_fails_where_disk_is_the_only_tier(staged: ManagerBench, below: FakeTier) -> None:
    leader, worker = staged.engine()
    store(leader, worker, 1, KEYS[:4])
    below.release()
    leader.lookup(2, KEYS[:4])
    leader.send(Release(lookup=2, loaded=1, failed=3, seconds=0.1))
    leader.send(Release(lookup=77, failed=2))
    staged.step()
    assert failures(staged) == (0, 5)


def failures(manager: ManagerBench) -> tuple[float, float]:
    """Blocks of loads that failed, of host memory and of disk."""
    host, disk = (
        manager.metrics.value("kvbm_failures_total", tier=tier, kind="load") for tier in ("host", "disk")
    )
    return host, disk


def test_what_has_no_room_to_come_up_is_said_and_is_no_hit(staged: ManagerBench, below: FakeTier) -> None:
    leader, worker = staged.engine()
    for start in (0, 4, 8):
        parent = KEYS[start - 1] if start else b""
        slots = leader.reserve(100 + start, KEYS[start : start + 4], parent)
        assert min(slots) >= 0
        leader.send(Commit(store=100 + start))
        below.release()
        staged.step()
    reply = leader.lookup(2, KEYS[:12])
    assert (len(reply.slots), reply.no_room, reply.refused) == (8, 4, 0)
    assert staged.metrics.value("kvbm_hit_blocks_total", tier="disk") == 8
    assert staged.metrics.value("kvbm_queried_blocks_total") == 12
    nothing = leader.lookup(3, KEYS[8:12])
    assert (nothing.slots, nothing.no_room, nothing.refused) == ((), 4, 0)
    assert staged.metrics.value("kvbm_lookups_total", outcome="miss") == 1
    assert worker.take() == []


def test_what_the_tier_refuses_at_once_is_said_and_is_no_hit(
    make_manager: Callable[..., ManagerBench], below: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(disk_blocks=32, disk_offload_filter=False)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:3])
    below.release()
    manager.step()
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == 3
    monkeypatch.setattr(below, "submit_load", lambda *_: Outcome.RETRY)
    leader.send(Lookup(lookup=2, keys=join_keys(KEYS[:3])))
    *_, reply = leader.take()
    assert reply == LookupReply(lookup=2, refused=3)
    assert manager.metrics.value("kvbm_lookups_total", outcome="hit") == 0
    assert manager.metrics.value("kvbm_hit_blocks_total", tier="disk") == 0
