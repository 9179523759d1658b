"""Leaders of engines that neither pass reports on nor ask twice: ranks report through the manager, and a request is
looked up and answered in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbm.block import Tier
from kvbm.client.mirror import Mirror
from kvbm.leader.first_contact import ask_once
from kvbm.leader.rank_reports import OPEN_MAX, RankReports
from kvbm.leader.tracked import Scheduled
from kvbm.protocol import Commit, HeldBlocks, Lookup, Progress, RankReport, Reserve
from rigs.leader import HASHES, TABLE, Bench


def test_a_store_counts_when_all_ranks_have_reported_it() -> None:
    reports = RankReports(3)
    assert reports.add(RankReport(rank=0, stored={7: ((), 1.0)})) is None
    assert reports.add(RankReport(rank=2, stored={7: ((1,), 3.0)}, loaded={"r": 2.0})) is None
    told = reports.add(RankReport(rank=1, stored={7: ((4,), 2.0)}))
    assert told is not None
    assert told.stored == {7: (3, (1, 4), 3.0)}
    assert not told.loaded


def test_a_rank_that_says_it_twice_counts_once() -> None:
    reports = RankReports(2)
    assert reports.add(RankReport(rank=0, stored={7: ((), 1.0)}, loaded={"r": 1.0})) is None
    assert reports.add(RankReport(rank=0, stored={7: ((), 1.0)}, loaded={"r": 1.0})) is None
    told = reports.add(RankReport(rank=1, stored={7: ((), 1.0)}, loaded={"r": 4.0}))
    assert told is not None
    assert told.loaded == {"r": 4.0}


def test_what_is_open_is_bounded() -> None:
    reports = RankReports(2)
    for number in range(OPEN_MAX + 5):
        reports.add(RankReport(rank=0, stored={number: ((), 1.0)}, loaded={str(number): 1.0}))
    assert reports.add(RankReport(rank=1, stored={4: ((), 1.0)}, loaded={"4": 1.0})) is None, "forgotten"
    assert reports.add(RankReport(rank=1, stored={OPEN_MAX: ((), 1.0)})) is not None


def test_another_session_waits_for_nothing() -> None:
    reports = RankReports(2)
    reports.add(RankReport(rank=0, stored={7: ((), 1.0)}, loaded={"r": 1.0}))
    reports.clear()
    assert reports.add(RankReport(rank=1, stored={7: ((), 1.0)}, loaded={"r": 1.0})) is None


@pytest.fixture
def at_once() -> Iterator[Callable[..., Bench]]:
    """Makes leaders that are asked once."""
    made: list[Bench] = []

    def make(**modes: object) -> Bench:
        made.append(Bench(promise_early=False, at_once=True, **modes))
        return made[-1]

    yield make
    for bench in made:
        bench.leader.close()
        bench.manager.close()


def test_a_leader_commits_what_all_ranks_told_the_manager(at_once: Callable[..., Bench]) -> None:
    bench = at_once(rank_count=2)
    bench.add(on_device=8, blocks=9)
    store = bench.store(complete=2)
    bench.manager.send(RankReport(rank=0, stored={store.store: ((), 1.0)}))
    bench.leader.receive()
    assert bench.manager.said() == []
    bench.manager.send(RankReport(rank=1, stored={store.store: ((1,), 1.0)}))
    bench.leader.receive()
    (commit,) = bench.manager.said()
    assert isinstance(commit, Commit)
    assert commit.failed == (1,)


def test_a_load_ends_when_all_ranks_told_the_manager(at_once: Callable[..., Bench]) -> None:
    bench = at_once(rank_count=2)
    plan = bench.load()
    bench.manager.said()
    bench.manager.send(RankReport(rank=0, loaded={"r": 0.5}), RankReport(rank=0, loaded={"r": 0.5}))
    bench.leader.receive()
    assert bench.leader.lookups.loads("r")
    bench.manager.send(RankReport(rank=1, loaded={"r": 0.25}))
    bench.leader.receive()
    (release,) = bench.manager.said()
    assert (release.lookup, release.loaded, release.seconds) == (plan.lookup, 5, 0.5)


def test_stores_that_no_plan_has_are_given_up_and_the_others_may_be_read(
    at_once: Callable[..., Bench],
) -> None:
    bench = at_once()
    bench.add(on_device=8, blocks=9)
    store = bench.store(complete=2)
    bench.step({"r": 4})
    bench.manager.said()
    assert bench.leader.stores.give_up("r"), "a rank may be copying the first two"
    (given_back,) = bench.manager.said()
    assert given_back.failed == (0, 1)
    assert bench.leader.stores.give_up("r", begun=True)
    bench.manager.send(RankReport(rank=0, stored={store.store: ((), 1.0)}))
    bench.leader.receive()
    (commit,) = bench.manager.said()
    assert commit.failed == (0, 1), "its blocks were overwritten meanwhile"
    assert not bench.leader.stores.give_up("r")


def test_slots_that_come_at_once_are_filled_after_the_same_step(at_once: Callable[..., Bench]) -> None:
    bench = at_once()
    bench.add(on_device=8, blocks=9)
    answered: list[Reserve] = []

    def wait(seconds: float) -> float:
        answered.extend(bench.manager.said())
        bench.grant(answered[0])
        return 0.0

    bench.leader._link.wait = wait
    plan = bench.leader.step([Scheduled("r", 2, lambda: TABLE)], (), 40, idle=False)
    assert [store.device_blocks for store in plan.stores] == [tuple(TABLE[:2])]
    assert len(answered) == 1


def test_a_request_that_comes_again_at_once_is_not_taken_for_the_one_that_ended(
    at_once: Callable[..., Bench],
) -> None:
    """What is released is copied before the forward pass, and the new life's blocks are computed by it."""
    bench = at_once()
    bench.add(on_device=8, blocks=9)
    before = bench.store(complete=2)
    bench.leader.stores.give_up("r")
    bench.leader.finished("r")
    bench.manager.said()
    bench.add(on_device=8, blocks=9)

    def wait(seconds: float) -> float:
        for reserve in bench.manager.said():
            bench.grant(reserve)
        return 0.0

    bench.leader._link.wait = wait
    plan = bench.leader.step([Scheduled("r", 3, lambda: TABLE)], (), 40, idle=False)
    assert [store.device_blocks for store in plan.stores] == [tuple(TABLE[:3])]
    assert plan.released == (before.store,)


def test_a_store_of_a_request_that_comes_again_at_once_is_planned_when_its_answer_comes(
    at_once: Callable[..., Bench],
) -> None:
    bench = at_once()
    bench.add(on_device=8, blocks=9)
    bench.leader.finished("r")
    bench.manager.said()
    bench.add(on_device=8, blocks=9)
    assert bench.step({"r": 2}).stores == ()
    (reserve,) = bench.manager.said()
    assert isinstance(reserve, Reserve), "and not given up"
    bench.grant(reserve)
    plan = bench.step()
    assert [store.store for store in plan.stores] == [reserve.store]
    assert plan.released == ()


# ---- the first contact


def test_an_answer_that_comes_within_the_budget_is_used(at_once: Callable[..., Bench]) -> None:
    bench = at_once()

    def wait(seconds: float) -> float:
        (lookup,) = bench.manager.said()
        bench.answer(lookup, 5)
        return 0.0

    bench.leader._link.wait = wait
    assert ask_once(bench.leader, "r", HASHES[:8], b"", 0, 7) == 5
    assert ask_once(bench.leader, "s", HASHES[:8], b"", 0, 3) == 3, "the last token is computed in any case"


def test_an_answer_that_comes_later_is_a_miss_and_counted(at_once: Callable[..., Bench]) -> None:
    bench = at_once()
    bench.leader._link.wait = lambda seconds: seconds
    assert ask_once(bench.leader, "r", HASHES[:8], b"", 0, 7) == 0
    lookup, release = bench.manager.said()
    assert release.lookup == lookup.lookup, "its lease is given back before it is known"
    bench.answer(lookup, 5)
    bench.leader.receive()
    assert bench.leader.lookups.unloaded["deadline"] == 5


def test_what_is_on_disk_alone_is_brought_up_for_the_next_time(at_once: Callable[..., Bench]) -> None:
    bench = at_once()

    def wait(seconds: float) -> float:
        (lookup,) = bench.manager.said()
        bench.answer(lookup, 5, ready=0, disk=5, arrival_s=0.1)
        return 0.0

    bench.manager.ready(lease_blocks=100)
    bench.leader._link.wait = wait
    assert ask_once(bench.leader, "r", HASHES[:8], b"", 0, 7) == 0
    bench.leader.finished("r")
    assert bench.manager.said() == [], "its lease is kept while the blocks come"
    (number,) = bench.leader.lookups._rising._waiting
    bench.manager.send(Progress(lookup=number, ready=5, final=True))
    bench.leader.receive()
    (release,) = bench.manager.said()
    assert release.lookup == number


def test_leases_that_outlive_their_requests_are_bounded(at_once: Callable[..., Bench]) -> None:
    bench = at_once()

    def wait(seconds: float) -> float:
        lookup = bench.manager.said()[-1]
        bench.answer(lookup, 5, ready=0, disk=5)
        return 0.0

    bench.manager.ready(lease_blocks=48)
    bench.leader._link.wait = wait
    for number in range(4):
        ask_once(bench.leader, f"r{number}", HASHES[:8], b"", 0, 7)
        bench.step()
    assert len(bench.leader.lookups._rising) == 2, "a quarter of what the engine may lease"


def test_two_requests_of_one_step_load_the_same_blocks(at_once: Callable[..., Bench]) -> None:
    """None of them can wait for the other."""
    bench = at_once()

    def wait(seconds: float) -> float:
        lookup = [each for each in bench.manager.said() if isinstance(each, Lookup)][-1]
        bench.answer(lookup, 5)
        return 0.0

    bench.leader._link.wait = wait
    for request in ("r", "s"):
        assert ask_once(bench.leader, request, HASHES[:8], b"", 0, 7) == 5
        bench.leader.allocated(request, 5, TABLE)
    assert len(bench.step().loads) == 2


def test_a_certain_miss_is_told_and_not_waited_for(at_once: Callable[..., Bench]) -> None:
    mirror = Mirror()
    bench = at_once(mirror=mirror)
    waited: list[float] = []

    def wait(seconds: float) -> float:
        waited.append(seconds)
        return 0.0

    bench.leader._link.wait = wait
    ask_once(bench.leader, "r", HASHES[:8], b"", 2, 7)
    assert waited, "the mirror does not know everything yet"
    mirror.take_in(HeldBlocks(stored={int(Tier.HOST): b"".join(HASHES[:2])}, complete=True))
    waited.clear()
    assert ask_once(bench.leader, "s", HASHES[:8], b"", 2, 7) == 0
    assert not waited, "nothing behind the device's two blocks is held"
    assert any(isinstance(each, Lookup) for each in bench.manager.said()), "`kvbm why` knows of it"
    ask_once(bench.leader, "t", HASHES[:8], b"", 1, 7)
    assert waited, "one is"
