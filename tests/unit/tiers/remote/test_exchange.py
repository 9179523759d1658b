"""Each job ends once, and its buffers are touched by whoever holds it alone."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.clock import ManualClock
from kvbm.tiers.contract import BlockEnd, BlockHead
from kvbm.tiers.remote.catalogue import Span
from kvbm.tiers.remote.exchange import Exchange, LoadJob, StoreJob

HIT = (BlockEnd(Outcome.HIT),)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def exchange(clock: ManualClock) -> Iterator[Exchange]:
    exchange = Exchange(clock, 100)
    yield exchange
    if exchange._eventfd >= 0:
        exchange.stop("test", 0.0)


def load_job(number: int, deadline_s: float = 2.0) -> LoadJob:
    return LoadJob(
        job_id=number,
        begun_s=0.0,
        deadline_s=deadline_s,
        keys=(BlockKey(bytes(32)),),
        place=0,
        span=Span("a", 0, 10, [0, 10]),
        targets=(),
        tenant=None,
    )


def store_job(number: int) -> StoreJob:
    head = BlockHead(BlockKey(bytes(32)), None)
    return StoreJob(
        job_id=number, begun_s=0.0, deadline_s=2.0, blocks=(head,), sources=(), tenant=None, tail=False
    )


def outcomes(exchange: Exchange) -> dict[int, Outcome]:
    return {completion.job_id: completion.outcome for completion in exchange.collect()}


def test_a_job_ends_once(exchange: Exchange) -> None:
    job = load_job(1)
    exchange.accept(job)
    assert exchange.uncollected(LoadJob) == 1 and exchange.uncollected(StoreJob) == 0
    assert exchange.hold(job)
    assert exchange.finish(job, HIT) and not exchange.finish(job, HIT) and not exchange.retry(job, "")
    assert select.select([exchange.fileno()], [], [], 0.0)[0]
    (completion,) = exchange.collect()
    assert (completion.outcome, completion.bytes_moved) == (Outcome.HIT, 100)
    assert exchange.uncollected(LoadJob) == 0 and exchange.over(job)
    assert not select.select([exchange.fileno()], [], [], 0.0)[0]


def test_a_late_job_ends_at_once_and_cannot_be_held(exchange: Exchange, clock: ManualClock) -> None:
    late, later = load_job(1), load_job(2, deadline_s=3.0)
    exchange.accept(late)
    exchange.accept(later)
    assert exchange.expire("") == []
    clock.advance(2.0)
    assert exchange.expire("silence") == [late]
    assert not exchange.hold(late) and exchange.hold(later)
    assert outcomes(exchange) == {1: Outcome.RETRY}


def test_a_load_that_is_held_at_its_deadline_ends_as_it_does(exchange: Exchange, clock: ManualClock) -> None:
    job = load_job(1)
    exchange.accept(job)
    assert exchange.hold(job)
    clock.advance(9.0)
    assert exchange.expire("") == [job] and exchange.expire("") == []
    assert exchange.collect() == [], "somebody touches its targets"
    assert exchange.finish(job, HIT)
    assert outcomes(exchange) == {1: Outcome.HIT}


def test_a_store_that_is_late_ends_when_its_sources_are_let_go(
    exchange: Exchange, clock: ManualClock
) -> None:
    job = store_job(1)
    exchange.accept(job)
    assert exchange.hold(job)
    clock.advance(9.0)
    exchange.expire("")
    assert exchange.collect() == []
    assert not exchange.let_go(job)
    assert outcomes(exchange) == {1: Outcome.RETRY}


def test_a_store_goes_on_when_it_is_let_go_in_time(exchange: Exchange, clock: ManualClock) -> None:
    job = store_job(1)
    exchange.accept(job)
    assert exchange.hold(job) and exchange.let_go(job)
    clock.advance(9.0)
    exchange.expire("")
    assert outcomes(exchange) == {1: Outcome.RETRY}
    assert not exchange.finish(job, HIT)


def test_a_request_hangs_from_the_deadline_until_it_returns(exchange: Exchange, clock: ManualClock) -> None:
    asked, waits, ended = load_job(1), load_job(2), load_job(3)
    for job in (asked, waits, ended):
        exchange.accept(job)
    assert exchange.begin_request(asked) and exchange.begin_request(ended)
    exchange.finish(ended, HIT)
    clock.advance(2.0)
    exchange.expire("")
    assert (exchange.count_hanging(LoadJob), exchange.count_hanging(StoreJob)) == (1, 0)
    assert not exchange.begin_request(waits), "it is over"
    exchange.collect()
    exchange.end_request(waits)
    assert not select.select([exchange.fileno()], [], [], 0.0)[0]
    exchange.end_request(asked)
    assert exchange.count_hanging(LoadJob) == 0
    assert select.select([exchange.fileno()], [], [], 0.0)[0], "the owner learns that there is room"


def test_what_follows_from_an_end_comes_before_it(exchange: Exchange) -> None:
    job, seen = load_job(1), list[int]()
    exchange.accept(job)
    exchange.finish(job, HIT, then=lambda: seen.append(len(exchange._completions)))
    assert seen == [0]
    exchange.finish(job, HIT, then=lambda: seen.append(1))
    assert seen == [0], "it was over"


def test_stopping_ends_everything(clock: ManualClock) -> None:
    exchange = Exchange(clock, 100)
    held, free = store_job(1), load_job(2)
    exchange.accept(held)
    exchange.accept(free)
    assert exchange.hold(held)
    exchange.stop("closed", 0.0)
    assert outcomes(exchange) == {2: Outcome.RETRY}
    assert not exchange.let_go(held)
    assert outcomes(exchange) == {1: Outcome.RETRY}
