"""A page of metrics counts what engines had done when it was asked for, without a tick of the manager's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvbm.client.channel import readable_among
from kvbm.clock import ManualClock
from kvbm.framing import RECEIVE_BYTES, encode
from kvbm.hashing import join_keys
from kvbm.manager.scrapes import STORES_WAIT_S, Scrapes
from kvbm.observe.metrics import Metrics
from kvbm.protocol import Commit, Lookup, Message, Release, Reserve
from rigs.manager import DEADLINE_S, KEYS, ManagerBench, store

STORED = "kvbm_offload_blocks_d2h"
LOADED = "kvbm_onboard_blocks_h2d"
RESIDENT = 'kvbm_pool_blocks{tier="host",state="resident"}'
FILLING = 'kvbm_pool_blocks{tier="host",state="filling"}'
Ask = Callable[[], Future[str]]


@pytest.fixture
def ask(manager: ManagerBench) -> Iterator[Ask]:
    """Asks for a page in another thread, as the exporter does, and has the manager take one turn."""
    with ThreadPoolExecutor(4) as threads:

        def asked() -> Future[str]:
            page = threads.submit(manager.scrapes.page)
            assert readable_among([manager.scrapes.fileno()], DEADLINE_S), "no question came"
            manager.step(1)
            return page

        yield asked
        manager.close()


def values(page: Future[str]) -> dict[str, float]:
    lines = page.result(DEADLINE_S).splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {series: float(value) for series, value in rows}


def answered(manager: ManagerBench, page: Future[str]) -> dict[str, float]:
    manager.until(lambda: not manager.scrapes.open_count, "no answer")
    return values(page)


def says(client_send: Callable[[bytes], None], *messages: Message) -> None:
    """Say this, and do not let the manager read it."""
    for message in messages:
        client_send(encode(message))


def test_gauges_are_of_this_moment(manager: ManagerBench, ask: Ask) -> None:
    """The clock stands still: there is no tick after the first."""
    manager.step()
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    leader.lookup(1, KEYS[:8])
    page = answered(manager, ask())
    assert (page[RESIDENT], page['kvbm_leased_blocks{tier="host"}'], page["kvbm_leases"]) == (4, 4, 1)
    assert (page["kvbm_engines"], page['kvbm_sessions{role="leader"}']) == (1, 1)
    assert page["kvbm_host_cache_hit_rate"] == 0.5
    leader.send(Release(lookup=1))
    assert answered(manager, ask())["kvbm_leases"] == 0


def test_what_was_said_before_is_counted(manager: ManagerBench, ask: Ask) -> None:
    """However much was said before that: the manager reads so many bytes at a time."""
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    leader.lookup(1, KEYS[:4])
    questions = [Lookup(lookup=10 + i, keys=join_keys(KEYS[100:])) for i in range(10)]
    assert sum(len(encode(question)) for question in questions) > RECEIVE_BYTES
    says(leader.channel.send_frame, *questions, Release(lookup=1, loaded=4, seconds=0.5))
    assert not leader.channel.queued_bytes, "the socket took it all"
    found = answered(manager, ask())
    assert (found[LOADED], found["kvbm_leases"], found['kvbm_lookups_total{outcome="miss"}']) == (4, 0, 10)


def test_a_store_under_way_is_waited_for(manager: ManagerBench, ask: Ask) -> None:
    leader, _ = manager.engine()
    leader.reserve(1, KEYS[:4])
    page = ask()
    manager.step(5)
    assert manager.scrapes.open_count == 1
    leader.send(Commit(store=1))
    found = answered(manager, page)
    assert (found[STORED], found[RESIDENT], found[FILLING]) == (4, 4, 0)


def test_one_that_is_not_read_yet_is_waited_for(manager: ManagerBench, ask: Ask) -> None:
    """The manager may get to the reservation only when the answer has left, and the page is asked for."""
    leader, _ = manager.engine()
    reserve = Reserve(store=1, parent=b"", keys=join_keys(KEYS[:4]))
    says(leader.channel.send_frame, reserve)
    page = ask()
    manager.step(5)
    assert manager.scrapes.open_count == 1
    leader.send(Commit(store=1))
    assert answered(manager, page)[STORED] == 4


def test_the_wait_is_bounded(manager: ManagerBench, ask: Ask) -> None:
    leader, _ = manager.engine()
    leader.reserve(1, KEYS[:4])
    page = ask()
    manager.step(5)
    assert manager.scrapes.wait_s_max == STORES_WAIT_S, "the loop sleeps until then"
    manager.clock.advance(STORES_WAIT_S)
    assert manager.scrapes.wait_s_max == 0.0
    found = answered(manager, page)
    assert (found[STORED], found[FILLING]) == (0, 4)


def test_the_loop_wakes_up_when_the_wait_is_over(
    manager: ManagerBench, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, _ = manager.engine()
    leader.reserve(1, KEYS[:4])
    ask()
    manager.step(5)
    waits: list[float] = []
    monkeypatch.setattr(manager.server._selector, "select", lambda wait_s: waits.append(wait_s) or [])
    manager.server.step(60.0)
    assert waits == [STORES_WAIT_S]


def test_later_stores_are_not_waited_for(manager: ManagerBench, ask: Ask) -> None:
    """Under load there is always one under way."""
    leader, _ = manager.engine()
    leader.reserve(1, KEYS[:4])
    first = ask()
    manager.step(5)
    leader.reserve(2, KEYS[4:6])
    second = ask()
    manager.step(5)
    assert manager.scrapes.open_count == 2
    leader.send(Commit(store=1))
    manager.until(lambda: manager.scrapes.open_count == 1)
    assert values(first)[STORED] == 4
    leader.send(Commit(store=2))
    assert answered(manager, second)[STORED] == 6


@pytest.mark.parametrize("who", ["leader", "both"])
def test_a_store_that_nobody_will_commit_is_not_waited_for(manager: ManagerBench, ask: Ask, who: str) -> None:
    leader, worker = manager.engine()
    leader.reserve(1, KEYS[:4])
    page = ask()
    manager.step(5)
    assert manager.scrapes.open_count == 1
    for client in (leader,) if who == "leader" else (leader, worker):
        client.close()
    found = answered(manager, page)
    assert (found[STORED], found["kvbm_engines"]) == (0, 0 if who == "both" else 1)


def test_the_loop_does_not_wait_before_all_is_read(manager: ManagerBench, ask: Ask) -> None:
    leader, _ = manager.engine()
    says(leader.channel.send_frame, Lookup(lookup=1, keys=join_keys(KEYS[:2])))
    ask()
    assert manager.scrapes.wait_s_max == 0.0


def test_nobody_waits_when_the_manager_ends(manager: ManagerBench, ask: Ask) -> None:
    leader, _ = manager.engine()
    leader.reserve(1, KEYS[:4])
    page = ask()
    manager.step(5)
    manager.close()
    assert STORED in values(page)
    assert f"\n{STORED} 0\n" in manager.scrapes.page()


def test_a_loop_that_is_not_there_is_not_waited_for_long() -> None:
    scrapes = Scrapes(Metrics(), ManualClock(), answer_s_max=0.0)
    assert f"\n{STORED} 0\n" in scrapes.page()
    scrapes.close()
    scrapes.close()
