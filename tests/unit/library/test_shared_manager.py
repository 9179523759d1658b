"""A client of a shared manager: others' blocks, slots that change hands, a manager that stops, goes and comes back."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

import kvbm
from kvbm.client.channel import Channel
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.protocol import Fence, ReserveReply
from kvbm.transfer import CpuCopier
from rigs.library import BLOCK_TOKENS, NAMESPACE, SharedHouse, content, layout, new_cache
from rigs.served import DEADLINE_S

TOKENS = list(range(6 * BLOCK_TOKENS))
KEYS = kvbm.Chain(layout(), NAMESPACE, TOKENS).keys


@pytest.fixture
def house(tmp_path: Path) -> Iterator[SharedHouse]:
    house = SharedHouse(tmp_path)
    yield house
    house.close()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Session]:
    """The manager's latest session of each role."""
    found: dict[str, Session] = {}
    send = Session.send

    def noting(session: Session, message: Any, fds: Any = ()) -> None:
        if session.hello is not None:
            found[session.hello.role] = session
        send(session, message, fds)

    monkeypatch.setattr(Session, "send", noting)
    return found


def leased(space: Space) -> int:
    return space.host_pool.counts().leased


def filling(space: Space) -> int:
    return space.host_pool.counts().filling


def slot_of(space: Space, block: int) -> int:
    slot = space.host_pool.find(KEYS[block])
    assert slot is not None
    return slot


# ---- with others


def test_clients_share_blocks_and_what_one_holds_another_may_not_clear(house: SharedHouse) -> None:
    first, second = house.open(), house.connect()
    cache, other = new_cache(1), new_cache(2)
    assert first.offload(TOKENS, cache, range(6)) == 6
    assert second.offload(TOKENS, other, range(6)) == 0, "they are held already"
    with second.match(TOKENS) as hit:
        assert (hit.blocks, hit.host) == (6, 6)
        assert hit.onboard(other, range(10, 16)) == 6
        assert house.with_space(leased) == 6
    assert torch.equal(content(other, range(10, 16)), content(cache, range(6)))
    assert second.clear() == 0, "another client has the namespace too"
    second.close()
    assert house.with_space(leased) == 0
    while house.served is not None and house.served.ask(lambda server: server.engine_count) > 1:
        pass
    assert first.clear() == 6
    with first.match(TOKENS) as hit:
        assert hit.blocks == 0
    first.close()


def test_a_client_that_goes_holds_nothing(house: SharedHouse) -> None:
    with house.open() as manager:
        manager.offload(TOKENS, new_cache(1), range(6))
        client = house.connect()
        held = client.match(TOKENS)
        held.__enter__()
        assert house.with_space(leased) == 6
        client.close()
        while house.with_space(leased):
            pass
        assert manager.status()["namespace"] == NAMESPACE.short


def test_what_the_manager_counts_is_what_was_loaded(house: SharedHouse) -> None:
    with house.open() as manager:
        cache = new_cache(1)
        manager.offload(TOKENS, cache, range(6))
        with manager.match(TOKENS) as hit:
            assert hit.onboard(cache, range(10, 14)) == 4
        with manager.match(TOKENS):
            pass
        manager.status()  # answered after all that was said before
        assert house.metrics.value("kvbm_matched_tokens") == 4 * BLOCK_TOKENS
        assert house.metrics.value("kvbm_onboard_blocks_h2d") == 4
        assert house.metrics.value("kvbm_unloaded_blocks_total", reason="unused") == 2 + 6
        assert manager.metrics.value("kvbm_onboard_blocks_h2d") == 4


# ---- slots that are not what they were


def test_a_slot_that_changed_hands_is_not_copied(house: SharedHouse) -> None:
    with house.open() as manager:
        cache = new_cache(1)
        manager.offload(TOKENS, cache, range(6))
        before = content(cache, [13])
        with manager.match(TOKENS) as hit:
            house.with_space(lambda space: space.arena.invalidate(slot_of(space, 3)))
            assert hit.onboard(cache, range(10, 16)) == 3
        assert torch.equal(content(cache, [13]), before)
        manager.status()
        assert house.metrics.value("kvbm_failures_total", tier="host", kind="load") == 3


def test_a_slot_that_changes_hands_under_the_copy_did_not_arrive(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house.open() as manager:
        cache = new_cache(1)
        manager.offload(TOKENS, cache, range(6))
        load = CpuCopier.load

        def overtaken(copier: CpuCopier, pairs: Any, after: Any = None) -> None:
            load(copier, pairs, after)
            house.with_space(lambda space: space.arena.invalidate(slot_of(space, 2)))

        monkeypatch.setattr(CpuCopier, "load", overtaken)
        with manager.match(TOKENS) as hit:
            assert hit.onboard(cache, range(10, 16)) == 2


def test_a_store_whose_reservation_has_ended_is_not_copied(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch, sessions: dict[str, Session]
) -> None:
    """The client was stopped: the fence that ended it lies before it with the answer."""
    send = Session.send

    def too_late(session: Session, message: Any, fds: Any = ()) -> None:
        if isinstance(message, ReserveReply):
            send(sessions["worker"], Fence(fence=77, stores=(message.store,)))
        send(session, message, fds)

    with house.open() as manager:
        manager.status()
        before = house.with_space(lambda space: bytes(space.arena.region(0)))
        with monkeypatch.context() as patch:
            patch.setattr(Session, "send", too_late)
            assert manager.offload(TOKENS, new_cache(1), range(6)) == 0
        assert house.with_space(lambda space: bytes(space.arena.region(0))) == before
        assert manager.status()
        assert house.with_space(filling) == 0
        assert manager.offload(TOKENS, new_cache(1), range(6)) == 6


def test_a_copy_that_fails_leaves_nothing_that_can_be_found(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("device-side error")

    with house.open() as manager:
        with monkeypatch.context() as patch:
            patch.setattr(CpuCopier, "store", fails)
            with pytest.raises(RuntimeError):
                manager.offload(TOKENS, new_cache(1), range(6))
        with manager.match(TOKENS) as hit:
            assert hit.blocks == 0
        assert house.with_space(filling) == 0


@pytest.mark.parametrize("call", ["match", "offload"])
def test_a_call_that_is_interrupted_while_it_waits_holds_nothing(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with house.open() as manager:
        manager.offload(TOKENS[: 3 * BLOCK_TOKENS], new_cache(1), range(3))
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.match(TOKENS).__enter__() if call == "match" else manager.offload(
                    TOKENS, new_cache(1), range(6)
                )
        while not manager.status():
            pass  # the answer that nobody waited for is taken first
        assert house.with_space(leased) == house.with_space(filling) == 0
        assert manager.offload(TOKENS, new_cache(1), range(6)) == 3


# ---- a manager that stops, goes, comes back


@pytest.mark.parametrize("after", [False, True])
def test_a_manager_may_go_at_any_message(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Before it gets it, or before it can answer: the call fails open, and the next manager serves."""
    send = Channel.send

    def onboarded(manager: kvbm.BlockManager) -> int:
        target = new_cache(2)
        with manager.match(TOKENS) as hit:
            arrived = hit.onboard(target, range(10, 16))
        assert torch.equal(content(target, range(10, 10 + arrived)), content(cache, range(arrived)))
        return arrived

    cache = new_cache(1)
    for fatal in itertools.count():
        manager, sent = house.open(), itertools.count()

        def sending(channel: Channel, message: Any, fatal: int = fatal, sent: Iterator[int] = sent) -> None:
            now = next(sent) == fatal
            if now and not after:
                house.close()
            send(channel, message)
            if now and after:
                house.close()

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", sending)
            manager.offload(TOKENS[: 4 * BLOCK_TOKENS], cache, range(4))
            onboarded(manager)
            manager.offload(TOKENS, cache, range(6))
            onboarded(manager)
            manager.status()
        went = next(sent) > fatal
        if went:
            house.open().close()
            while not manager.status():
                pass  # it tries again after a while
            assert manager.offload(TOKENS, cache, range(6)) == 6
            assert onboarded(manager) == 6
        manager.close()
        if not went:
            break
    assert fatal == 9, "reserve, commit, lookup, release: two of each, and a status"


def test_a_manager_that_does_not_answer_costs_one_wait(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And once it does, the lease and the slots that nobody waits for any more are free."""
    house.open().close()
    assert house.served is not None
    lookups = house.metrics.value("kvbm_lookups_total", outcome="miss")
    manager, cache, go_on = house.connect(reply_timeout_s=DEADLINE_S), new_cache(1), threading.Event()
    manager.offload(TOKENS, cache, range(6))
    patience = manager.backend
    patience.reply_timeout_s = 0.0  # type: ignore[attr-defined]
    stopped = threading.Event()
    held_up = house.served.begin(lambda server: stopped.set() or go_on.wait(DEADLINE_S))
    assert stopped.wait(DEADLINE_S)
    with manager.match(TOKENS) as hit:
        assert hit.blocks == 0
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send", pytest.fail)  # it would wait in a buffer that has an end
        for _ in range(3):
            with manager.match(TOKENS) as hit:
                assert hit.blocks == 0
            assert manager.offload(list(range(900, 950)), cache, range(6)) == 0
    assert sum("it is not asked until" in record.getMessage() for record in caplog.records) == 1
    go_on.set()
    assert held_up.result(DEADLINE_S)
    patience.reply_timeout_s = DEADLINE_S  # type: ignore[attr-defined]
    while not manager.status():
        pass
    assert house.with_space(leased) == house.with_space(filling) == 0
    with manager.match(TOKENS) as hit:
        assert hit.blocks == 6
    assert house.metrics.value("kvbm_lookups_total", outcome="miss") == lookups
    assert house.metrics.value("kvbm_lookups_total", outcome="hit") == 2, "the others were not asked"
    manager.close()


def test_what_was_found_is_loaded_though_the_manager_has_gone_and_the_next_one_is_joined(
    house: SharedHouse, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache = new_cache(1)
    manager = house.open()
    manager.offload(TOKENS, cache, range(6))
    with manager.match(TOKENS) as hit:
        house.close()
        assert hit.onboard(cache, range(10, 16)) == 6, "nobody overwrites a dead manager's memory"
    assert torch.equal(content(cache, range(10, 16)), content(cache, range(6)))
    with manager.match(TOKENS) as hit:
        assert hit.blocks == 0
    assert manager.offload(TOKENS, cache, range(6)) == 0
    assert manager.status() == {}
    assert not manager.flush()
    with pytest.raises(kvbm.ManagerUnavailable, match=r"no manager answers at .*m\.sock"):
        manager.clear()
    assert sum("manager lost" in record.getMessage() for record in caplog.records) == 1
    house.open().close()
    while not manager.status():
        pass  # it tries again after a while
    assert manager.offload(TOKENS, cache, range(6)) == 6
    with manager.match(TOKENS) as hit:
        assert hit.onboard(cache, range(20, 26)) == 6
    assert torch.equal(content(cache, range(20, 26)), content(cache, range(6)))
    manager.close()


def test_a_hit_of_an_earlier_life_means_nothing_in_the_next(house: SharedHouse) -> None:
    cache = new_cache(1)
    manager = house.open()
    manager.offload(TOKENS, cache, range(6))
    before = content(cache, range(10, 16))
    with manager.match(TOKENS) as hit:
        house.close()
        house.open().close()
        while not manager.status():
            pass
        assert hit.onboard(cache, range(10, 16)) == 0
    assert torch.equal(content(cache, range(10, 16)), before)
    manager.close()


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_a_session_that_the_manager_ends_is_begun_anew(
    house: SharedHouse, sessions: dict[str, Session], role: str
) -> None:
    """A defect of the manager's costs the session, and the next call joins again."""
    cache = new_cache(1)
    with house.open() as manager:
        manager.offload(TOKENS, cache, range(6))
        assert house.served is not None
        house.served.ask(lambda server: setattr(sessions[role], "closed", True))
        house.served.ask(lambda server: None)  # a step later
        while not manager.status():
            pass
        with manager.match(TOKENS) as hit:
            assert hit.onboard(cache, range(10, 16)) == 6


# ---- that cannot be joined


def test_there_is_nobody(tmp_path: Path) -> None:
    with pytest.raises(kvbm.ManagerUnavailable, match=r"no manager answers at .*nobody\.sock after 0 s"):
        kvbm.BlockManager.connect(str(tmp_path / "nobody.sock"), layout(), NAMESPACE, join_timeout_s=0.0)


def test_a_socket_that_cannot_be_one_is_named() -> None:
    with pytest.raises(kvbm.SettingsError, match=r"socket='.*at most 107 bytes"):
        kvbm.BlockManager.connect("/" + 200 * "x", layout(), NAMESPACE)


def test_a_manager_that_is_stopped_is_waited_for_no_longer_than_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts the connection, and nobody answers."""
    introduce, waits = Channel.introduce, list[float]()

    def noting(channel: Channel, hello: Any, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return introduce(channel, hello, 0.0)

    monkeypatch.setattr(Channel, "introduce", noting)
    path = str(tmp_path / "m.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(kvbm.ManagerUnavailable, match="no manager answers"):
            kvbm.BlockManager.connect(path, layout(), NAMESPACE, join_timeout_s=0.0, reply_timeout_s=0.5)
    assert set(waits) == {0.5}


def test_another_layout_under_one_namespace_is_refused(house: SharedHouse) -> None:
    with house.open():
        assert house.served is not None
        other = kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=layout().shard_bytes * 2)
        with pytest.raises(kvbm.ManagerRefused, match="differs from this namespace's"):
            kvbm.BlockManager.connect(house.served.path, other, NAMESPACE)


def test_a_namespace_that_the_manager_has_no_room_for_is_refused(house: SharedHouse) -> None:
    with house.open():
        assert house.served is not None
        other = kvbm.Namespace(model="test", fields=(("weights", "2"),))
        with pytest.raises(kvbm.ManagerRefused, match="cannot be served"):
            kvbm.BlockManager.connect(house.served.path, layout(), other)
