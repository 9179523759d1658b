"""A snapshot says what a manager holds and has counted, now and a minute ago; only an operator gets one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbm.admin_protocol import Snapshot, SnapshotReply
from kvbm.client.snapshots import SnapshotSource
from kvbm.manager.snapshots import KEPT_EVERY_S, PREFIXES_MAX
from kvbm.observe.view import look
from kvbm.protocol import Release
from kvbm.settings import Settings
from rigs.manager import KEYS, LAYOUT, NAMESPACE, ManagerBench, refusal, store

TOKENS = LAYOUT.block_tokens


class Asker:
    """Asks in a thread, while the test steps the manager."""

    def __init__(self, manager: ManagerBench) -> None:
        self._manager = manager
        self._source = SnapshotSource(Settings(manager=manager.path), 20.0)
        self._threads = ThreadPoolExecutor(1)

    def take(self) -> SnapshotReply:
        taken = self._threads.submit(self._source.take)
        self._manager.until(taken.done)
        return taken.result()

    def close(self) -> None:
        self._source.close()
        self._threads.shutdown()


@pytest.fixture
def asker(manager: ManagerBench) -> Iterator[Asker]:
    asker = Asker(manager)
    yield asker
    asker.close()


def test_a_manager_without_an_engine_has_nothing_to_show(asker: Asker) -> None:
    state = asker.take()
    assert (state.manager.spaces, state.manager.engines, state.prefixes) == ((), (), ())
    view = look(state)
    assert view.tiers == () and [finding.text for finding in view.findings] == ["no engine is connected"]


def test_what_an_engine_did_is_in_the_next_snapshot(manager: ManagerBench, asker: Asker) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    for number in (1, 2):
        leader.lookup(number, KEYS[:6])
    leader.send(Release(lookup=1, loaded=4, seconds=0.5, prefill_s=2.5))
    manager.tick()
    state = asker.take()
    view = look(state)
    assert (view.asked, view.hit, view.loaded, view.saved_s) == (12 * TOKENS, 8 * TOKENS, 4 * TOKENS, 2.5)
    (engine,) = state.manager.engines
    assert (engine.engine, engine.model, engine.leases, engine.leased_blocks) == ("e", NAMESPACE.model, 1, 4)
    assert view.tiers[0].leased_blocks == 4
    (prefix,) = state.prefixes
    assert prefix.name == KEYS[0].hex()[:12]
    assert (prefix.requests, prefix.tokens, prefix.found_tokens) == (2, 6 * TOKENS, 8 * TOKENS)
    assert prefix.tiers == {"host": 4 * TOKENS}
    assert any(flow.bytes_moved for flow in view.flows if (flow.source, flow.target) == ("host", "device"))


def test_a_saving_that_nobody_can_believe_is_left_out(manager: ManagerBench, asker: Asker) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    for number, seconds in enumerate((float("nan"), float("inf"), -1.0, 1e9), start=1):
        leader.lookup(number, KEYS[:4])
        leader.send(Release(lookup=number, loaded=4, seconds=0.5, prefill_s=seconds))
    assert look(asker.take()).saved_s == 0.0


def test_a_prefix_that_is_gone_counts_as_lost(manager: ManagerBench, asker: Asker) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    leader.lookup(1, KEYS[:4])
    leader.send(Release(lookup=1))
    manager.space().clear()
    leader.lookup(2, KEYS[:4])
    state = asker.take()
    assert look(state).lost_lookups == 1.0
    assert (state.prefixes[0].lost, state.prefixes[0].tiers) == (1, {"host": 0})


def test_the_counters_of_a_minute_ago_come_along(manager: ManagerBench, asker: Asker) -> None:
    began = asker.take()
    assert began.earlier.at_s == manager.clock() and began.manager.uptime_s == 0.0
    leader, _ = manager.engine()
    for number in range(40):
        leader.lookup(number, KEYS[:1])
        manager.tick(KEPT_EVERY_S)
    state = asker.take()
    assert 60.0 <= state.now.at_s - state.earlier.at_s < 60.0 + KEPT_EVERY_S
    assert look(state).asked == TOKENS * 60.0 / KEPT_EVERY_S
    assert state.manager.uptime_s == 40 * KEPT_EVERY_S


def test_a_reply_is_bounded(manager: ManagerBench, asker: Asker) -> None:
    leader, _ = manager.engine()
    for number in range(2 * PREFIXES_MAX):
        for again in (0, 1):
            leader.lookup(2 * number + again, KEYS[number : number + 2])
    assert len(asker.take().prefixes) == PREFIXES_MAX


def test_an_engine_gets_none(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    leader.send(Snapshot())
    assert "only to a session of role admin" in refusal(leader)
