"""What is removed from a store, by whose clock, and by how many at once."""

from __future__ import annotations

import pytest

from kvbm.clock import ManualClock
from kvbm.tiers.remote.blobs import BlobInfo, BlobStore, StoreError
from kvbm.tiers.remote.collector import LEFT_S, MARK, Collector, Victim, choose
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs, MemoryBlobs

SPACE, OTHER = "a" * 64, "b" * 64
DAY = 86400.0


def pack_name(number: int, space: str = SPACE) -> str:
    name = f"{number:02x}" + f"{number:038x}"
    return f"{space}/packs/{name[:2]}/{name}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1e6)


@pytest.fixture
def blobs(clock: ManualClock) -> MemoryBlobs:
    return MemoryBlobs(clock)


def collector(store: BlobStore, capacity_bytes: int | None = None) -> Collector:
    return Collector(store, ttl_s=DAY, capacity_bytes=capacity_bytes, period_s=1000.0)


def fill(blobs: MemoryBlobs, clock: ManualClock, count: int, step_s: float = 10.0) -> list[str]:
    names = [pack_name(number) for number in range(count)]
    for name in names:
        blobs.put(name, [bytes(100)])
        clock.advance(step_s)
    return names


def test_expired_packs_go_in_every_namespace(blobs: MemoryBlobs, clock: ManualClock) -> None:
    blobs.put(pack_name(1), [bytes(100)])
    blobs.put(pack_name(2, OTHER), [bytes(50)])
    clock.advance(DAY)
    blobs.put(pack_name(3), [bytes(10)])
    clock.advance(1.0)
    done = collector(blobs).run()
    assert sorted(blobs.blobs) == sorted([pack_name(3), MARK])
    assert (done.packs, done.pack_bytes, done.removed_packs, done.removed_bytes) == (3, 160, 2, 150)


def test_a_used_pack_stays(blobs: MemoryBlobs, clock: ManualClock) -> None:
    blobs.put(pack_name(1), [bytes(100)])
    clock.advance(DAY - 1)
    blobs.touch(pack_name(1))
    clock.advance(DAY - 1)
    assert collector(blobs).run().removed_packs == 0


def test_beyond_the_bound_the_least_recently_used_go(blobs: MemoryBlobs, clock: ManualClock) -> None:
    names = fill(blobs, clock, 20)
    blobs.touch(names[0])
    done = collector(blobs, 1000).run()
    left = [name for name in names if name in blobs.blobs]
    assert sum(len(blobs.blobs[name]) for name in left) <= 1000
    assert left == [names[0], *names[-8:]] and done.removed_packs == 11
    assert collector(blobs, 1000).run(in_turn=False).removed_packs == 0


def test_a_dry_run_says_the_same_and_does_nothing(blobs: MemoryBlobs, clock: ManualClock) -> None:
    fill(blobs, clock, 20)
    before = dict(blobs.blobs)
    said = collector(blobs, 1000).run(dry_run=True)
    assert blobs.blobs == before and said.dry_run
    done = collector(blobs, 1000).run()
    assert (said.named, said.removed_bytes) == (done.named, done.removed_bytes)


def test_it_is_done_once_by_all_nodes_together(blobs: MemoryBlobs, clock: ManualClock) -> None:
    assert not collector(blobs).run().skipped
    clock.advance(400.0)
    assert collector(blobs).run().skipped
    assert not collector(blobs).run(in_turn=False).skipped
    clock.advance(501.0)
    assert not collector(blobs).run().skipped
    assert collector(blobs).run().skipped


def test_leftovers_of_dead_writers_go(blobs: MemoryBlobs, clock: ManualClock) -> None:
    dead, alive = f"{SPACE}/log/{'1' * 16}/", f"{SPACE}/log/{'2' * 16}/"
    for sequence in range(3):
        blobs.put(f"{dead}{sequence:08x}", [b"x"])
        blobs.put(f"{alive}{sequence:08x}", [b"x"])
    blobs.put(f"{SPACE}/probe/{'1' * 16}/00000001", [b"x"])
    clock.advance(LEFT_S + 1)
    blobs.put(f"{alive}00000003", [b"x"])
    done = collector(blobs).run()
    assert done.removed_leftovers == 4
    assert sorted(blobs.blobs) == sorted([MARK, *(f"{alive}{sequence:08x}" for sequence in range(4))])


def test_foreign_blobs_are_left_alone(blobs: MemoryBlobs, clock: ManualClock) -> None:
    for name in ("readme", f"{SPACE}/packs/zz/x", "x/packs/00/" + "0" * 40, f"{SPACE}/other/1"):
        blobs.put(name, [b"x"])
    clock.advance(9 * DAY)
    before = set(blobs.blobs)
    assert collector(blobs, 0).run().foreign == 4
    assert before < set(blobs.blobs)


class Between(MemoryBlobs):
    """Something happens after everything was listed, before anything is removed."""

    def listing(self, prefix: str):  # type: ignore[no-untyped-def]
        yield from super().listing(prefix)
        if prefix == "":
            self.happens()

    def happens(self) -> None:
        raise NotImplementedError


def test_a_pack_that_is_used_meanwhile_is_spared(clock: ManualClock) -> None:
    blobs = Between(clock)
    blobs.happens = lambda: blobs.touch(pack_name(1))  # type: ignore[method-assign]
    blobs.put(pack_name(1), [b"x"])
    blobs.put(pack_name(2), [b"x"])
    clock.advance(DAY + 1)
    done = collector(blobs).run()
    assert (done.removed_packs, done.spared) == (1, 1)
    assert sorted(blobs.blobs) == sorted([pack_name(1), MARK])


def test_two_at_once_remove_no_more_than_one_would(clock: ManualClock) -> None:
    blobs = Between(clock)
    ran = []

    def other() -> None:
        blobs.happens = lambda: None  # type: ignore[method-assign]
        ran.append(collector(blobs, 1000).run(in_turn=False))

    fill(blobs, clock, 20)
    blobs.happens = other  # type: ignore[method-assign]
    collector(blobs, 1000).run(in_turn=False)
    assert len(ran) == 1
    assert len([name for name in blobs.blobs if name != MARK]) == 9


def test_an_incomplete_listing_removes_nothing(blobs: MemoryBlobs, clock: ManualClock) -> None:
    names = fill(blobs, clock, 20)
    faulty = FaultyBlobs(blobs, BlobRule(fault=BlobFault.TRUNCATED, operation="listing"))
    with pytest.raises(StoreError):
        collector(faulty, 0).run(in_turn=False)
    assert set(blobs.blobs) == set(names)


def test_a_pack_from_the_future_is_not_expired() -> None:
    assert choose([Victim(pack_name(1), 1, 2e6)], 1e6, 10.0, None) == []


def test_it_stops_when_the_tier_closes(blobs: MemoryBlobs, clock: ManualClock) -> None:
    names = fill(blobs, clock, 5)
    stopping = Collector(blobs, ttl_s=DAY, capacity_bytes=0, period_s=1.0, stopping=lambda: True)
    assert stopping.run().removed_packs == 0
    assert set(names) <= set(blobs.blobs)


def test_times_are_the_stores(clock: ManualClock) -> None:
    info = BlobInfo(pack_name(1), 1, 100.0)
    assert choose([Victim(*info)], 100.0 + DAY + 1, DAY, None) == [Victim(*info)]
    assert choose([Victim(*info)], 100.0 + DAY - 1, DAY, None) == []
