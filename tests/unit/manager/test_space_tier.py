"""`Space` and the tier below: what goes down, what comes back, and a tier that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.hashing import chain_keys
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.disk_side import SLICES_AT_ONCE
from kvbm.manager.recovery import FOUND_TO_RANKED
from kvbm.manager.space import Space
from kvbm.policy import AdmitAll
from kvbm.protocol import HELD, REFUSED
from kvbm.slices import SLICE_BLOCKS
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion
from kvbm.tiers.host import HostArena
from rigs.fake_tier import FakeTier
from rigs.found_blocks import found_blocks
from rigs.space import KEYS, LAYOUT, ME, OTHER, Bench

# ---- the tier below


def test_blocks_go_down_once(bench: Bench) -> None:
    bench.store(KEYS[:3])
    bench.finish_all()
    assert bench.metrics.value("kvbm_offload_blocks_h2d") == 3
    bench.space.lookup(ME, 1, KEYS[:3], 0)
    bench.finish_all()
    bench.space.lookup(ME, 2, KEYS[:3], 0)
    bench.finish_all()
    assert bench.metrics.value("kvbm_offload_blocks_h2d") == 3
    assert len(bench.medium.entries) == 3


def test_a_block_that_goes_down_is_pinned_until_it_is_there(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=2)
    bench.store(KEYS[:2])
    assert bench.tier.pending_count == 2
    assert bench.space.reserve(ME, 50, None, OTHER[:1]) == [REFUSED]
    bench.finish_all()
    assert bench.space.reserve(ME, 51, None, OTHER[:1])[0] >= 0


def test_a_store_that_finds_no_room_is_no_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file on a full filesystem: the tier goes on with what it has."""
    genuine = bench.tier.poll
    monkeypatch.setattr(
        bench.tier,
        "poll",
        lambda: [Completion.of(each.job_id, [BlockEnd(Outcome.RETRY)], 0) for each in genuine()],
    )
    bench.store(KEYS[:2])
    bench.finish_all()
    assert bench.metrics.value("kvbm_failures_total", tier="disk", kind="io") == 0
    assert bench.metrics.value("kvbm_skipped_offloads_total", reason="full") == 2
    assert bench.space.disk is not None
    assert bench.space.disk.pool.counts().filling == 0


def test_a_throttled_tier_is_asked_again(bench: Bench) -> None:
    bench.tier.throttled = True
    bench.store(KEYS[:3])
    bench.space.pump()
    assert (bench.tier.pending_count, bench.space.busy) == (0, True)
    assert bench.space.disk is not None
    assert bench.space.disk.pool.counts().filling == 0
    bench.tier.throttled = False
    bench.finish_all()
    assert len(bench.medium.entries) == 3
    bench.space.clear("host")
    bench.tier.throttled = True
    lease = bench.space.lookup(ME, 99, KEYS[:3], 0)
    assert lease is not None
    bench.tier.throttled = False
    bench.space.pump()
    bench.finish_all()
    assert lease.ready == 3


def test_a_tier_that_breaks_is_left_alone_and_comes_back(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:3])
    lease = bench.space.lookup(ME, 1, KEYS[:3], 0)
    assert lease is not None
    bench.tier.break_down()
    bench.space.pump()
    assert (lease.ready, lease.final) == (0, True)
    assert bench.metrics.value("kvbm_failures_total", tier="disk", kind="io") == 3
    assert bench.space.lookup(ME, 2, KEYS[:3], 0) is None
    assert bench.space.host_pool.counts().filling == 0
    bench.store(OTHER[:2])
    assert bench.space.lookup(ME, 3, OTHER[:2], 0) is not None, "host memory serves on"
    assert bench.metrics.value("kvbm_skipped_offloads_total", reason="tier_off") >= 2
    bench.tier.mend()
    bench.clock.advance(HEAL_S_MAX)
    bench.space.pump()
    assert bench.tier.fault == ""
    again = bench.space.lookup(ME, 4, KEYS[:3], 0)
    assert again is not None
    bench.finish_all()
    assert again.ready == 3


def tried_within(bench: Bench, seconds: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When so many seconds' turns, one each second, begin an attempt to open the disk, in seconds from now."""
    tries: list[float] = []
    genuine, start_s = bench.tier.heal, bench.clock()

    def heal() -> Outcome:
        tries.append(bench.clock() - start_s)
        return genuine()

    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "heal", heal)
        for _ in range(seconds):
            bench.space.pump()
            bench.clock.advance(1.0)
    return tries


def test_a_disk_that_stays_off_is_opened_after_waits_that_grow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.tier.break_down()
    assert tried_within(bench, 1000, monkeypatch) == [0, 10, 30, 70, 150, 310, 610, 910]
    assert [record.getMessage() for record in caplog.records][:3] == [
        f"disk tier: the next attempt to open it is in {seconds} s" for seconds in (10, 20, 40)
    ]
    assert len(caplog.records) == 8


def test_a_disk_that_opens_and_fails_again_is_not_opened_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    for second in range(700):
        bench.tier.break_down()
        bench.tier.mend()
        tries += [second + each for each in tried_within(bench, 1, monkeypatch)]
    assert tries == [0, 10, 30, 70, 150, 310, 610]
    bench.clock.advance(HEAL_S_MAX)
    bench.space.pump()
    assert bench.tier.fault == ""
    bench.clock.advance(HEAL_S_MAX)
    bench.tier.break_down()
    assert tried_within(bench, 12, monkeypatch) == [0, 10], "it has worked meanwhile"


def test_a_slot_of_the_tier_is_forgotten_when_its_block_goes(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, disk_slots=2)
    bench.store(KEYS[:2])
    bench.finish_all()
    bench.store(OTHER[:2])
    bench.finish_all()
    assert sorted(set(bench.tier.forgotten)) == [0, 1]
    assert {entry.key for entry in bench.medium.entries.values()} == set(OTHER[:2])


def test_recovered_blocks_are_found_and_the_oldest_goes_first(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, disk_slots=4)
    for key in (KEYS[0], OTHER[0]):
        bench.store([key])
        bench.finish_all()
    bench.store([KEYS[1]], KEYS[0])
    bench.finish_all()
    bench.space.close(keep=True)
    bench.tier = FakeTier(bench.medium)
    bench.arena = HostArena(LAYOUT, 4, touch_threads=0)
    bench.space = Space(
        LAYOUT, bench.arena, bench.tier, AdmitAll(), bench.metrics, bench.clock, bench.progressed
    )
    assert bench.space.disk is not None
    assert bench.space.disk.pool.counts().resident == 3
    bench.store(chain_keys(b"2" * 32, range(8), 4))
    bench.finish_all()
    assert not bench.space.disk.pool.holds(OTHER[0]), "the oldest leaf had to go"
    assert bench.space.disk.pool.holds(KEYS[0])
    assert bench.space.disk.pool.holds(KEYS[1])


def test_a_recovered_block_that_names_itself_as_parent_can_still_go(make: Callable[..., Bench]) -> None:
    """No engine makes such a block, but a hostile client could."""
    bench = make(host_slots=2, disk_slots=1)
    bench.space.host_pool.commit(bench.space.host_pool.reserve(KEYS[0], None, 0.0))  # type: ignore[arg-type]
    assert bench.space.disk is not None
    views = bench.arena.slot_views(0)
    bench.tier.submit_store(1, [BlockHead(KEYS[0], KEYS[0])], SlotIndex(0), views)
    bench.tier.release()
    bench.tier.poll()
    bench.tier.break_down()
    bench.tier.mend()
    bench.space.pump()
    assert bench.space.disk.pool.holds(KEYS[0])
    bench.store(OTHER[:1])
    bench.finish_all()
    assert bench.space.disk.pool.holds(OTHER[0])


def test_closing_writes_out_the_whole_queue(make: Callable[..., Bench]) -> None:
    """Far more than the tier takes at once."""
    bench = make(host_slots=80, disk_slots=80, pending_limit=4)
    bench.store(KEYS[:80])
    assert bench.tier.pending_count == 4
    bench.stop()
    assert {entry.key for entry in bench.medium.entries.values()} == set(KEYS[:80])


def test_closing_does_not_wait_for_a_tier_that_takes_nothing(bench: Bench) -> None:
    bench.tier.throttled = True
    bench.store(KEYS[:3])
    bench.stop()
    assert bench.medium.entries == {}


# ---- disk without host


def test_staged_blocks_stay_until_disk_has_them(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=2, staging=True)
    bench.store(KEYS[:2])
    assert bench.space.reserve(ME, 50, None, OTHER[:1]) == [REFUSED]
    assert bench.space.tiers() == {"disk": 16}
    bench.finish_all()
    assert bench.metrics.value("kvbm_offload_blocks_d2d") == 2
    assert bench.metrics.value("kvbm_offload_blocks_d2h") == 0
    assert bench.space.host_pool.counts().leased == 0
    assert bench.space.reserve(ME, 51, None, OTHER[:1])[0] >= 0


def test_what_the_disk_holds_is_not_staged_again(make: Callable[..., Bench]) -> None:
    """Else a conversation longer than the staging area could never store its newest part."""
    bench = make(host_slots=2, staging=True)
    for start in range(0, 6, 2):
        bench.store(KEYS[start : start + 2], KEYS[start - 1] if start else None)
        bench.finish_all()
    slots = bench.space.reserve(ME, 60, None, KEYS[:8])
    assert slots[:6] == [HELD] * 6
    assert min(slots[6:]) >= 0
    bench.space.check()


def test_a_broken_tier_does_not_keep_the_staging_area(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=2, staging=True)
    bench.store(KEYS[:2])
    bench.tier.break_down()
    bench.space.pump()
    assert bench.space.host_pool.counts().leased == 0
    assert bench.space.reserve(ME, 51, None, OTHER[:2])[0] >= 0


def test_what_waits_to_be_staged_when_the_tier_breaks_is_let_go(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, staging=True, pending_limit=1)
    bench.store(KEYS[:4])
    assert (bench.tier.pending_count, bench.space.host_pool.counts().leased) == (1, 4)
    bench.tier.break_down()
    bench.space.pump()
    assert bench.space.host_pool.counts().leased == 0
    assert not bench.space.busy


def test_a_store_that_failed_is_not_found_below(bench: Bench) -> None:
    bench.store(KEYS[:3])
    bench.tier.release(1)
    bench.tier.break_down()
    bench.space.pump()
    assert bench.space.disk is not None
    assert [bench.space.disk.pool.holds(key) for key in KEYS[:3]] == [True, False, False]
    assert bench.space.disk.pool.counts().filling == 0
    assert bench.space.host_pool.counts().leased == 0
    assert bench.metrics.value("kvbm_failures_total", tier="disk", kind="io") == 2


def test_a_run_longer_than_the_staging_area_begins_at_its_beginning(make: Callable[..., Bench]) -> None:
    """Its end was stored last and still lies in host memory: it must not keep its beginning out."""
    bench = make(host_slots=4, staging=True)
    bench.store(KEYS[:4])
    bench.finish_all()
    bench.store(KEYS[4:8], KEYS[3])
    bench.finish_all()
    assert [bench.space.host_pool.find(key) is None for key in KEYS[:8]] == [True] * 4 + [False] * 4
    lease = bench.space.lookup(ME, 90, KEYS[:8], 0)
    assert lease is not None
    assert lease.keys == KEYS[:4]
    bench.finish_all()
    assert (lease.ready, lease.final) == (4, True)
    bench.space.release(ME, 90)
    assert bench.space.host_pool.counts().leased == 0
    bench.space.check()


def test_a_tier_that_is_off_is_not_among_those_that_are_on(bench: Bench) -> None:
    assert bench.space.tiers() == {"host": 8, "disk": 16}
    bench.tier.break_down()
    assert bench.space.tiers() == {"host": 8}


def test_only_a_reset_of_the_disk_ends_its_index(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = 2 * SLICES_AT_ONCE * FOUND_TO_RANKED * SLICE_BLOCKS
    keys = chain_keys(bytes(32), range(slots * 4), 4)
    found = found_blocks((key, keys[i - 1] if i else None, i) for i, key in enumerate(keys))
    monkeypatch.setattr(FakeTier, "recovered", lambda tier: found)
    bench = make(host_slots=8, disk_slots=slots)
    left = bench.space.pools[1].unindexed_count
    assert left > 0
    bench.space.begin_clear("host")
    assert bench.space.pools[1].unindexed_count == left
    bench.space.begin_clear("disk")
    assert not bench.space.indexing
