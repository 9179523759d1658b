"""What the policies learn after the answers: in order, in slices, and no more than there is memory for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.block import BlockKey
from kvbm.hashing import chain_keys
from kvbm.manager.usage import OFFERED_AT_ONCE
from kvbm.policy import AdmitAll, GhostAdmission
from rigs.space import ME, Bench

LONG = chain_keys(bytes(32), range(4 * (2 * OFFERED_AT_ONCE + 10)), 4)


class Counted(AdmitAll):
    """How many blocks it was offered in each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def offered_all(self, keys: object, now_s: float) -> list[bool]:
        self.calls.append(len(keys))  # type: ignore[arg-type]
        return super().offered_all(keys, now_s)  # type: ignore[arg-type]


def reserve_and_commit(bench: Bench, keys: list[BlockKey]) -> None:
    bench.space.reserve(ME, 1, None, keys)
    bench.space.commit(ME, 1)


def test_a_long_chain_is_offered_to_disk_in_slices(make: Callable[..., Bench]) -> None:
    admission = Counted()
    bench = make(host_slots=len(LONG), disk_slots=len(LONG), admission=admission)
    reserve_and_commit(bench, LONG)
    assert admission.calls == []
    assert bench.space.busy, "they are on their way to disk"
    slices = 0
    while bench.space.catch_up():
        slices += 1
        assert sum(admission.calls) <= slices * OFFERED_AT_ONCE
    assert sum(admission.calls) == len(LONG)
    assert not bench.space.behind
    bench.finish_all()
    assert bench.space.disk is not None
    assert bench.space.disk.pool.counts().resident == len(LONG)
    assert not bench.space.busy


def test_blocks_in_a_staging_area_are_safe_at_once(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=len(LONG), disk_slots=len(LONG), staging=True)
    reserve_and_commit(bench, LONG)
    assert bench.space.host_pool.counts().leased == len(LONG)
    bench.finish_all()
    assert bench.space.host_pool.counts().leased == 0


def test_what_is_on_disk_or_queued_is_not_offered_again(make: Callable[..., Bench]) -> None:
    admission = Counted()
    bench = make(host_slots=16, disk_slots=16, admission=admission)
    bench.store(LONG[:8])
    assert admission.calls == [8]
    for number in (2, 3):
        bench.space.lookup(ME, number, LONG[:8], 0)
        bench.space.pump()
    bench.finish_all()
    bench.space.lookup(ME, 4, LONG[:8], 0)
    bench.space.pump()
    assert sum(admission.calls) == 8


def test_a_policy_of_single_blocks_is_asked_block_by_block(make: Callable[..., Bench]) -> None:
    class Single:
        """As an installed policy may be: two methods."""

        def __init__(self) -> None:
            self.inner = GhostAdmission(16)
            self.offers = self.hits = 0

        def offered(self, key: BlockKey, now_s: float) -> bool:
            self.offers += 1
            return self.inner.offered(key, now_s)

        def hit(self, key: BlockKey, now_s: float) -> None:
            self.hits += 1

    admission = Single()
    bench = make(host_slots=16, disk_slots=16, admission=admission)
    bench.store(LONG[:4])
    for number in (2, 3):
        bench.space.lookup(ME, number, LONG[:4], 0)
        bench.finish_all()
    assert (admission.offers, admission.hits) == (8, 4)


def test_the_oldest_news_are_forgotten_where_there_are_too_many(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.manager.usage.PENDING_KEYS_MAX", 20)
    bench = make(disk=False)
    bench.store(LONG[:4])
    requests: list[int] = []
    bench.space.host_pool.policy.requested = lambda keys, slots, now_s: requests.append(len(keys))  # type: ignore[method-assign]
    for number, count in enumerate((9, 8, 7, 2), start=50):
        bench.space.lookup(ME, number, LONG[:count], 0)
    bench.space.pump()
    assert requests == [8, 7, 2]


def test_completions_are_taken_as_long_as_there_is_time(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, disk_slots=16)
    for number in range(3):  # three writes: the blocks belong to no chain
        bench.store([LONG[10 * number]])
    bench.space.move(bench.clock())
    while bench.tier.release():
        pass
    assert bench.space.disk is not None
    pool = bench.space.disk.pool
    written = []
    while True:
        left = bench.space.move(bench.clock())  # the time is over: one in any case
        written.append(pool.counts().resident)
        if not left:
            break
    assert written == [1, 2, 3]
