"""`Space` over a tier that moves runs: blocks of a chain in consecutive slots are one read and one write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.manager.leases import Lease
from kvbm.manager.onboard import WAITING_CHECKED_EACH
from kvbm.tiers.contract import BlockEnd, Completion
from rigs.space import KEYS, ME, OTHER, PEER, Bench


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make(host_slots=16, disk_slots=32, run_blocks_max=4)


def runs_of(bench: Bench) -> list[int]:
    """The lengths of the runs that the tier took since the last call."""
    lengths, bench.tier.runs = bench.tier.runs, []
    return lengths


def look_up(bench: Bench, keys: Sequence[BlockKey], owner: int = ME) -> Lease:
    lease = bench.space.lookup(owner, next(bench.numbers), keys, 0)
    assert lease is not None
    return lease


def holds(bench: Bench, lease: Lease) -> bool:
    """Every slot of the lease has its block's own bytes."""
    oracle = {key: bench.content(slot) for key, slot in zip(lease.keys, lease.slots, strict=True)}
    for key, slot in zip(lease.keys, lease.slots, strict=True):
        bench.fill(slot, key)
        if bench.content(slot) != oracle[key]:
            return False
    return True


def test_a_chain_goes_down_and_comes_back_in_runs(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:10])
    assert runs_of(bench) == [4, 4, 2]
    assert bench.metrics.value("kvbm_offload_blocks_h2d") == 10
    lease = look_up(bench, KEYS[:10])
    assert (runs_of(bench), lease.ready) == ([4, 4, 2], 0)
    for ready in (4, 8, 10):
        bench.tier.release(1)
        bench.space.pump()
        assert lease.ready == ready
    assert [(ready, final) for _, ready, final in bench.progress] == [(4, False), (8, False), (10, True)]
    assert holds(bench, lease)
    moved = bench.metrics.value("kvbm_transfer_bytes_total", source="disk", target="host")
    assert moved == 10 * bench.space.layout.block_bytes


def test_blocks_that_do_not_follow_one_another_are_runs_of_their_own(bench: Bench) -> None:
    """On disk every second slot is another chain's."""
    for pair in zip(KEYS[:6], OTHER[:6], strict=True):
        bench.store([pair[0]], None if pair[0] == KEYS[0] else KEYS[KEYS.index(pair[0]) - 1])
        bench.store([pair[1]], None if pair[1] == OTHER[0] else OTHER[OTHER.index(pair[1]) - 1])
        bench.finish_all()
    bench.space.clear("host")
    runs_of(bench)
    lease = look_up(bench, KEYS[:6])
    bench.finish_all()
    assert (runs_of(bench), lease.ready) == ([1] * 6, 6)
    assert holds(bench, lease)


def test_one_corrupt_block_of_a_run_costs_that_block(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:8])
    assert bench.space.disk is not None
    struck = bench.space.disk.pool.find(KEYS[2])
    assert struck is not None
    bench.medium.corrupt(struck)
    lease = look_up(bench, KEYS[:8])
    bench.finish_all()
    assert (lease.ready, lease.final, lease.keys) == (2, True, KEYS[:2])
    assert holds(bench, lease)
    assert [key for key in KEYS[:8] if bench.space.host_pool.find(key) is None] == [KEYS[2]]
    assert not bench.space.disk.pool.holds(KEYS[2])
    assert bench.metrics.value("kvbm_failures_total", tier="disk", kind="corrupt") == 1
    bench.space.release(ME, lease.number)
    assert bench.space.host_pool.counts().leased == bench.space.disk.pool.counts().leased == 0


def test_leases_that_want_the_same_blocks_share_the_read(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:8])
    runs_of(bench)
    first = look_up(bench, KEYS[:8])
    whole = look_up(bench, KEYS[:8], PEER)
    middle = bench.space.lookup(PEER, 900, KEYS[:6], 2)
    other_end = look_up(bench, [*KEYS[:3], *OTHER[:2]], PEER)
    assert middle is not None
    assert bench.tier.pending_count == 2
    bench.finish_all()
    assert runs_of(bench) == [4, 4]
    assert [lease.ready for lease in (first, whole, middle, other_end)] == [8, 8, 4, 3]
    assert first.slots == whole.slots and middle.slots == first.slots[2:6]
    bench.space.release(ME, first.number)
    assert all(holds(bench, lease) for lease in (whole, middle, other_end))


def test_a_request_that_is_gone_costs_the_disk_nothing(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, disk_slots=32, run_blocks_max=4, pending_limit=1)
    bench.only_on_disk(KEYS[:12])
    runs_of(bench)
    lease = look_up(bench, KEYS[:12])
    assert runs_of(bench) == [4], "the others wait"
    bench.space.release(ME, lease.number)
    bench.finish_all()
    assert runs_of(bench) == []
    assert bench.space.host_pool.counts().filling == 0


def test_queued_reads_of_requests_that_are_gone_end_in_portions(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies may leave thousands of blocks in the queue: a turn of the loop does not wait for all."""
    monkeypatch.setattr("kvbm.manager.onboard.UNREAD_MAX", 4)
    bench = make(host_slots=16, disk_slots=32, run_blocks_max=2, pending_limit=1)
    bench.only_on_disk(KEYS[:14])
    lease = look_up(bench, KEYS[:14])
    bench.space.release(ME, lease.number)
    pool = bench.space.host_pool
    assert pool.counts().filling == 14
    bench.tier.release()
    left = []
    while bench.space.move(0.0):
        left.append(pool.counts().filling)
    assert (left, pool.counts().filling) == ([8, 4, 0], 0)


def test_of_a_queued_run_only_what_is_still_wanted_is_read(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, disk_slots=32, run_blocks_max=4, pending_limit=1)
    bench.only_on_disk(KEYS[:8])
    runs_of(bench)
    whole = look_up(bench, KEYS[:8])
    part = bench.space.lookup(PEER, 900, KEYS[:7], 5)
    assert part is not None
    bench.space.release(ME, whole.number)
    bench.finish_all()
    assert runs_of(bench) == [4, 2], "the first run was being read"
    assert (part.ready, part.final) == (2, True)
    assert holds(bench, part)
    again = look_up(bench, KEYS[:8])
    bench.finish_all()
    assert again.ready == 8
    assert holds(bench, again)


def test_a_run_ends_before_a_block_that_an_engine_is_storing(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:6])
    assert bench.space.disk is not None
    number = next(bench.numbers)
    assert bench.space.reserve(PEER, number, KEYS[2], KEYS[3:4])[0] >= 0
    lease = look_up(bench, KEYS[:6])
    bench.finish_all()
    assert (lease.ready, lease.keys) == (3, KEYS[:3])


def test_a_chain_with_a_block_twice_ends_well(bench: Bench) -> None:
    """No engine sends one, but a hostile client could."""
    bench.only_on_disk(KEYS[:6])
    keys = [*KEYS[:3], KEYS[1], KEYS[2], *KEYS[3:6]]
    lease = look_up(bench, keys)
    bench.finish_all()
    assert (lease.ready, lease.keys) == (8, keys)
    assert holds(bench, lease)
    bench.space.release(ME, lease.number)
    assert bench.space.host_pool.counts().leased == 0


def test_the_end_of_a_long_run_makes_room_for_its_beginning(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=6, disk_slots=16, run_blocks_max=4, staging=True)
    bench.store(KEYS[:6])
    bench.finish_all()
    bench.store(KEYS[6:12], KEYS[5])
    bench.finish_all()
    lease = look_up(bench, KEYS[:12])
    bench.finish_all()
    assert (lease.ready, lease.keys) == (6, KEYS[:6])
    assert holds(bench, lease)


def test_evicted_blocks_are_forgotten_before_their_slots_are_written_again(
    make: Callable[..., Bench],
) -> None:
    bench = make(host_slots=8, disk_slots=4, run_blocks_max=4)
    bench.store(KEYS[:4])
    bench.finish_all()
    bench.store(OTHER[:4])
    bench.finish_all()
    assert sorted(set(bench.tier.forgotten)) == [0, 1, 2, 3]
    assert {entry.key for entry in bench.medium.entries.values()} == set(OTHER[:4])
    bench.space.clear("disk")
    assert bench.medium.entries == {}, "what was cleared does not wait for the next turn"


def test_blocks_of_a_run_for_which_the_medium_has_no_room_are_skipped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = bench.tier.poll

    def without_room(done: Completion) -> Completion:
        ends = [BlockEnd(Outcome.HIT), *[BlockEnd(Outcome.RETRY)] * (len(done.blocks) - 1)]
        return Completion(job_id=done.job_id, outcome=Outcome.RETRY, bytes_moved=1, blocks=ends)

    monkeypatch.setattr(bench.tier, "poll", lambda: list(map(without_room, genuine())))
    bench.store(KEYS[:4])
    bench.finish_all()
    assert bench.space.disk is not None
    assert [bench.space.disk.pool.holds(key) for key in KEYS[:4]] == [True, False, False, False]
    assert bench.metrics.value("kvbm_skipped_offloads_total", reason="full") == 3
    assert bench.metrics.value("kvbm_failures_total", tier="disk", kind="io") == 0
    assert bench.space.host_pool.counts().leased == 0


def test_a_recovered_chain_has_its_parents(bench: Bench) -> None:
    bench.store(KEYS[:3], None)
    bench.finish_all()
    bench.store(KEYS[3:7], KEYS[2])
    bench.finish_all()
    by_key = {entry.key: entry.parent for entry in bench.medium.entries.values()}
    assert by_key == {KEYS[0]: None, **{after: before for before, after in pairwise(KEYS[:7])}}


@pytest.mark.parametrize("told", [0, 3, 5])
def test_blocks_whose_end_the_tier_does_not_tell_are_never_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    """An installed tier that tells the ends of fewer blocks, or of more, must not bring what the slots held before."""
    bench.only_on_disk(KEYS[:4])
    genuine = bench.tier.poll

    def careless(done: Completion) -> Completion:
        return Completion(
            job_id=done.job_id, outcome=Outcome.HIT, bytes_moved=1, blocks=[BlockEnd(Outcome.HIT)] * told
        )

    monkeypatch.setattr(bench.tier, "poll", lambda: list(map(careless, genuine())))
    lease = look_up(bench, KEYS[:4])
    bench.tier.release()
    with pytest.raises(ValueError, match="zip"):
        bench.space.pump()
    assert lease.ready == 0
    assert [bench.space.host_pool.find(key) for key in KEYS[:4]] == [None] * 4
    bench.tier.kill()
    monkeypatch.undo()


def test_slots_of_a_read_that_did_not_end_are_not_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.only_on_disk(KEYS[:4])
    genuine = bench.tier.poll

    def endless(done: Completion) -> Completion:
        ends = [BlockEnd(Outcome.RETRY)] * len(done.blocks)
        return Completion(job_id=done.job_id, outcome=Outcome.RETRY, still_in_use=True, blocks=ends)

    monkeypatch.setattr(bench.tier, "poll", lambda: list(map(endless, genuine())))
    lease = look_up(bench, KEYS[:4])
    bench.finish_all()
    assert (lease.ready, lease.final) == (0, True)
    assert bench.space.host_pool.counts().filling == 4
    assert bench.space.disk is not None
    bench.space.disk.onboarder.healed()
    assert bench.space.host_pool.counts().filling == 0
    assert bench.space.host_pool.find(KEYS[0]) is None
    assert bench.space.disk.pool.find(KEYS[0]) == SlotIndex(0)


def test_the_arrival_of_a_lease_is_foretold_from_the_queue_and_the_speed_of_reads(bench: Bench) -> None:
    bench.only_on_disk([*KEYS[:8], *OTHER[:6]])
    first = look_up(bench, KEYS[:8])
    assert bench.space.arrival_s(first) == 0.0, "nothing was read yet"
    bench.clock.advance(2.0)
    bench.tier.release(1)  # four blocks in two seconds
    bench.space.pump()
    second = look_up(bench, OTHER[:6], PEER)
    assert bench.space.arrival_s(second) == pytest.approx((4 + 6) / 2), "behind those of the first"
    bench.finish_all()
    assert bench.space.arrival_s(second) == 0.0
    again = look_up(bench, OTHER[:6])
    assert bench.space.arrival_s(again) == 0.0, "they are here"


def test_a_lease_that_waits_for_what_another_asked_for_arrives_before_what_is_queued_behind(
    make: Callable[..., Bench],
) -> None:
    bench = make(host_slots=16, disk_slots=32, run_blocks_max=4, pending_limit=1)
    bench.only_on_disk([*KEYS[:6], *OTHER[:8]])
    look_up(bench, KEYS[:6])
    bench.clock.advance(2.0)
    bench.tier.release(1)  # four blocks in two seconds
    bench.space.pump()
    behind = look_up(bench, OTHER[:8])
    assert bench.space.arrival_s(behind) == pytest.approx((2 + 8) / 2)
    reading = look_up(bench, KEYS[:6], PEER)
    assert bench.space.arrival_s(reading) == pytest.approx(2 / 2), "it is being read already"
    part = look_up(bench, OTHER[:2], PEER)
    assert bench.space.arrival_s(part) == pytest.approx((2 + 4) / 2), "in front of the second run"
    bench.finish_all()
    assert (reading.ready, part.ready, behind.ready) == (6, 2, 8)


def test_leases_that_end_while_a_read_hangs_are_not_kept(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:4])
    kept = look_up(bench, KEYS[:4])
    ended = []
    for _ in range(4 * WAITING_CHECKED_EACH):
        ended.append(look_up(bench, KEYS[:4], PEER))
        bench.space.release(PEER, ended[-1].number)
    ours = 3  # the list's reference, the loop's and the call's
    assert sum(sys.getrefcount(lease) > ours for lease in ended) <= WAITING_CHECKED_EACH
    bench.finish_all()
    assert (kept.ready, holds(bench, kept)) == (4, True)


def test_a_run_that_nobody_waits_for_gives_its_host_slots_back_before_its_turn(bench: Bench) -> None:
    """Behind a disk that does not take more: the slots of what was given up are free for stores."""
    bench.only_on_disk(KEYS[:8])
    bench.store(OTHER[:4])
    bench.finish_all()
    bench.space.clear("host")
    bench.tier.throttled = True
    first, second = look_up(bench, KEYS[:8]), look_up(bench, OTHER[:4], PEER)
    assert bench.space.host_pool.counts().filling == 12
    bench.space.release(ME, first.number)
    bench.space.pump()
    assert bench.space.host_pool.counts().filling == 4
    assert bench.space.disk is not None and bench.space.disk.pool.counts().leased == 4
    again = look_up(bench, KEYS[:8])
    bench.tier.throttled = False
    bench.space.pump()
    bench.finish_all()
    for lease, keys in ((second, OTHER[:4]), (again, KEYS[:8])):
        assert (lease.ready, lease.keys) == (len(keys), keys)
        assert holds(bench, lease)


def test_what_one_of_two_leases_still_waits_for_is_read(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:8])
    bench.tier.throttled = True
    first, second = look_up(bench, KEYS[:8]), look_up(bench, KEYS[:6], PEER)
    bench.space.release(ME, first.number)
    bench.space.pump()
    bench.tier.throttled = False
    bench.space.pump()
    bench.finish_all()
    assert second.ready == 6 and holds(bench, second)
    assert bench.space.host_pool.counts().filling == 0
