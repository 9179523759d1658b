"""Disk written when host memory gives blocks up: what goes down, when, and what must not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvbm.block import BlockKey, Tier
from kvbm.policy import AdmissionPolicy, DiskFilter
from kvbm.policy.admission.write_budget import DAY_S, WriteBudget
from kvbm.policy.departures import AHEAD_SHARE
from kvbm.protocol import REFUSED
from rigs.space import KEYS, LAYOUT, ME, OTHER, PEER, Bench

SIZE = LAYOUT.block_bytes


@pytest.fixture
def make(make: Callable[..., Bench]) -> Callable[..., Bench]:
    return partial(make, on_eviction=True)


def on_disk(bench: Bench) -> list[BlockKey]:
    """In the order in which they got there."""
    return [entry.key for entry in sorted(bench.medium.entries.values(), key=lambda entry: entry.sequence)]


def skipped(bench: Bench, reason: str) -> float:
    return bench.metrics.value("kvbm_skipped_offloads_total", reason=reason)


def test_nothing_is_written_while_there_is_room(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16)
    bench.store(KEYS[:15])
    bench.space.lookup(ME, 1, KEYS[:15], 0)
    bench.finish_all()
    assert (on_disk(bench), bench.space.busy) == ([], False)
    assert bench.metrics.value("kvbm_skipped_offloads_total", reason="filter") == 0


def test_what_would_go_next_is_written_ahead_of_need(make: Callable[..., Bench]) -> None:
    """A sixteenth of the slots is free or clean: the last one is taken, so the block used longest ago goes down."""
    bench = make(host_slots=16)
    for i in range(16):
        bench.store([OTHER[i]])
        bench.finish_all()
        bench.clock.advance(1.0)
    assert 16 // AHEAD_SHARE == 1
    assert on_disk(bench) == OTHER[:1]
    assert bench.space.host_pool.find(OTHER[0]) is not None, "it stays until its slot is needed"
    assert bench.space.reserve(ME, 50, None, KEYS[:1])[0] >= 0
    assert bench.space.host_pool.find(OTHER[0]) is None
    bench.finish_all()
    assert on_disk(bench) == OTHER[:2]
    assert bench.space.lookup(PEER, 60, OTHER[:1], 0) is not None, "it is found on disk"


def test_with_a_block_goes_its_prefix_first(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4)
    bench.store(KEYS[:4])
    bench.finish_all()
    assert on_disk(bench) == KEYS[:4]
    assert bench.metrics.value("kvbm_offload_blocks_h2d") == 4
    bench.store(OTHER[:4])
    bench.finish_all()
    assert bench.metrics.value("kvbm_offload_blocks_h2d") == 8, "nothing was written twice"
    assert on_disk(bench) == KEYS[:4] + OTHER[:4]
    parents = {entry.key: entry.parent for entry in bench.medium.entries.values()}
    assert [parents[key] for key in KEYS[:4]] == [None, *KEYS[:3]]


def test_a_slot_is_not_given_away_while_it_is_being_written(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=2)
    bench.store(KEYS[:2])
    bench.space.pump()
    assert bench.tier.pending_count == 2
    assert bench.space.reserve(ME, 50, None, OTHER[:1]) == [REFUSED]
    bench.finish_all()
    assert bench.space.reserve(ME, 51, None, OTHER[:2])[1] >= 0
    assert on_disk(bench) == KEYS[:2]


def test_a_reservation_waits_for_no_write(make: Callable[..., Bench]) -> None:
    """More is needed at once than was prepared: what no write has begun for goes unwritten, and is counted."""
    bench = make(host_slots=8)
    bench.tier.throttled = True
    for i in range(8):
        bench.store([OTHER[i]])
        bench.clock.advance(1.0)
    answer = bench.space.reserve(ME, 50, None, KEYS[:6])
    assert min(answer) >= 0
    assert [bench.space.host_pool.find(key) is None for key in OTHER[:8]] == [True] * 6 + [False] * 2
    bench.tier.throttled = False
    bench.finish_all()
    assert not set(on_disk(bench)) & set(OTHER[:6])
    assert skipped(bench, "evicted") == 6


def test_what_is_used_again_stays(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16)
    for i in range(16):
        bench.store([OTHER[i]])
        bench.finish_all()
        bench.clock.advance(1.0)
    assert on_disk(bench) == OTHER[:1]
    bench.space.lookup(ME, 1, OTHER[:1], 0)
    bench.finish_all()
    bench.space.release(ME, 1)
    bench.clock.advance(1.0)
    assert bench.space.reserve(ME, 50, None, KEYS[:3])[2] >= 0
    assert bench.space.host_pool.find(OTHER[0]) is not None
    assert [bench.space.host_pool.find(key) is None for key in OTHER[1:5]] == [True] * 3 + [False]
    bench.finish_all()
    assert on_disk(bench).count(OTHER[0]) == 1


def test_what_gets_a_continuation_stays_with_its_prefix(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=5)
    bench.space.disk.departures.ahead = 3  # type: ignore[union-attr]
    bench.store(KEYS[:2])
    bench.clock.advance(1.0)
    bench.store(OTHER[:2])
    bench.finish_all()
    assert on_disk(bench) == KEYS[:2]
    assert bench.space.host_pool.is_leased(bench.space.host_pool.find(KEYS[1])) is False  # type: ignore[arg-type]
    bench.clock.advance(1.0)
    bench.store(KEYS[2:3], KEYS[1])
    bench.store(KEYS[20:22])
    assert [bench.space.host_pool.find(key) is not None for key in KEYS[:3]] == [True] * 3
    assert [bench.space.host_pool.find(key) is None for key in OTHER[:2]] == [True] * 2
    bench.space.check()


@pytest.mark.parametrize("eviction", ["gittins", "lru"])
def test_a_chain_longer_than_host_memory_keeps_its_head(make: Callable[..., Bench], eviction: str) -> None:
    """Room for its next blocks is not made of those before them, which nobody writes down: nothing would be found."""
    bench = make(host_slots=16, eviction=eviction, admission=DiskFilter())
    for start in range(0, 40, 4):
        bench.store(KEYS[start : start + 4], KEYS[start - 1] if start else None)
        bench.finish_all()
        bench.clock.advance(0.1)
    lease = bench.space.lookup(ME, 100, KEYS[:40], 0)
    assert lease is not None
    assert lease.ready == 16


def test_a_filter_lets_pass_what_was_used_or_comes_back(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, admission=DiskFilter(100.0))
    bench.store(KEYS[:1])
    bench.store(KEYS[10:11])
    bench.space.lookup(ME, 1, KEYS[:1], 0)
    bench.space.pump()
    bench.space.release(ME, 1)
    for i in range(4):
        bench.clock.advance(1.0)
        bench.store(OTHER[i : i + 1])
        bench.finish_all()
    assert on_disk(bench) == KEYS[:1], "the other one was offered for the first time"
    assert skipped(bench, "filter") >= 1
    assert bench.space.host_pool.find(KEYS[10]) is None
    bench.clock.advance(1.0)
    bench.store(KEYS[10:11])
    for i in range(4):
        bench.clock.advance(1.0)
        bench.store(OTHER[10 + i : 11 + i])
        bench.finish_all()
    assert KEYS[10] in on_disk(bench), "the second time"


def test_a_tier_that_is_off_keeps_nothing_in_host_memory(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4)
    bench.store(KEYS[:4])
    bench.space.pump()
    assert bench.tier.pending_count == 4
    bench.tier.break_down()
    bench.space.pump()
    assert bench.space.host_pool.counts().leased == 0
    assert min(bench.space.reserve(ME, 51, None, OTHER[:4])) >= 0
    assert skipped(bench, "tier_off") > 0
    bench.space.check()


def test_every_slot_can_be_had_again(make: Callable[..., Bench]) -> None:
    """Also where all that is not leased has been set aside."""
    for slots in (1, 2, 3):
        bench = make(host_slots=slots)
        for start in range(0, 30, slots):
            assert min(bench.store(OTHER[start : start + slots])) >= 0
            bench.finish_all()
        bench.space.check()


def test_closing_writes_what_was_never_offered(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, pending_limit=4)
    bench.store(KEYS[:5])
    bench.clock.advance(1.0)
    bench.store(OTHER[:3])
    assert on_disk(bench) == []
    bench.stop()
    assert on_disk(bench) == OTHER[:3] + KEYS[:5], "what was used last is safe first"


def test_clearing_host_memory_leaves_nothing_set_aside(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4)
    bench.tier.throttled = True
    bench.store(KEYS[:4])
    bench.space.pump()
    assert bench.space.clear("host") == (4, 0)
    bench.tier.throttled = False
    bench.finish_all()
    assert on_disk(bench) == []
    assert min(bench.store(OTHER[:4])) >= 0
    bench.space.check()


# ---- the write budget, on eviction and at once


def budget(blocks: int, inner: AdmissionPolicy | None = None) -> WriteBudget:
    return WriteBudget(inner or DiskFilterOff(), blocks * SIZE, SIZE, 100.0)


class DiskFilterOff:
    """Everything may enter."""

    def offered(self, key: BlockKey, now_s: float) -> bool:
        return True

    def hit(self, key: BlockKey, now_s: float) -> None:
        return None


@pytest.mark.parametrize("on_eviction", [False, True])
def test_no_more_is_written_than_the_budget_allows(make: Callable[..., Bench], on_eviction: bool) -> None:
    bench = make(host_slots=8, admission=budget(72), on_eviction=on_eviction)  # three blocks at once
    bench.store(KEYS[:8])
    bench.finish_all()
    bench.store(OTHER[:8])
    bench.finish_all()
    assert on_disk(bench) == KEYS[:3], "the beginning of the chain"
    assert skipped(bench, "budget") > 0
    bench.clock.advance(DAY_S / 24)
    bench.store(KEYS[20:28])
    bench.finish_all()
    bench.store(KEYS[30:38])
    bench.finish_all()
    assert len(on_disk(bench)) in (5, 6)


@pytest.mark.parametrize("on_eviction", [False, True])
def test_what_was_not_written_costs_nothing(make: Callable[..., Bench], on_eviction: bool) -> None:
    bench = make(host_slots=4, admission=budget(96), on_eviction=on_eviction)  # four blocks at once
    bench.tier.throttled = True
    bench.store(OTHER[:4])
    bench.space.pump()
    bench.space.clear("host")
    bench.tier.throttled = False
    bench.finish_all()
    assert (on_disk(bench), skipped(bench, "evicted")) == ([], 4)
    bench.store(KEYS[:4])
    bench.finish_all()
    assert len(on_disk(bench)) == 4


def test_a_budget_holds_for_a_staging_area_too(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=8, staging=True, on_eviction=False, admission=budget(48))  # two blocks at once
    bench.store(KEYS[:4])
    bench.finish_all()
    assert on_disk(bench) == KEYS[:2]
    assert bench.space.host_pool.counts().leased == 0
    assert min(bench.store(OTHER[:8])) >= 0, "what was refused is in nobody's way"


def test_bytes_written_and_bytes_hit_are_counted(make: Callable[..., Bench]) -> None:
    bench = make(on_eviction=False)
    bench.only_on_disk(KEYS[:4])
    bench.space.lookup(ME, 1, KEYS[:2], 0)
    assert bench.metrics.value("kvbm_hit_bytes_total", tier=Tier.DISK.name.lower()) == 2 * SIZE
    assert bench.metrics.value("kvbm_transfer_bytes_total", source="host", target="disk") == 4 * SIZE
