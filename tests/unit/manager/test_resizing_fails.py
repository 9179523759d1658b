"""What fails in the turn in which a manager goes over to other host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvbm.admin_protocol import Pin, Pinned
from kvbm.block import BlockKey
from kvbm.hashing import join_keys
from kvbm.manager.carrying import Carrying
from kvbm.manager.pool import SlotPool
from rigs.manager import KEYS, LAYOUT, OTHER, ManagerBench, store
from rigs.resizing import come_back, holds, operator, resize, sent_away


def test_no_thread_is_to_be_had(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[100:106])
    store(leader, worker, 2, KEYS[:2])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert resize(operator(manager), 40).refusal == ""
    monkeypatch.undo()
    assert (
        "host memory is given back at once, and engines wait for that: can't start new thread" in caplog.text
    )
    sent_away(leader, worker)
    leader, worker = come_back(manager)
    assert holds(leader, worker, 1, KEYS[:2]) == 2
    assert holds(leader, worker, 2, KEYS[100:106]) == 6


@pytest.mark.swallows("^KeyError: 'a defect'$")
@pytest.mark.parametrize("where", ["resident_but_not_in", "find_leading"])
def test_a_namespace_that_fails_is_off_and_the_other_has_the_new_size(
    make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    manager = make_manager(namespaces=2, host_blocks=32)
    first, second = manager.engine("a"), manager.engine("b", namespace=OTHER)
    for leader, worker in (first, second):
        store(leader, worker, 1, KEYS[:6])
    admin = operator(manager)
    admin.send(Pin(fingerprint=OTHER.fingerprint.hex(), keys=join_keys(KEYS[:3]), seconds=600.0))
    assert admin.expect(Pinned).blocks == 3
    broken, method, moved = manager.space(1), getattr(SlotPool, where), Carrying.finish

    def fails(pool: SlotPool[BlockKey], *arguments: Any) -> Any:
        if going and pool in broken.pools:
            raise KeyError("a defect")
        return method(pool, *arguments)

    def finish(carrying: Carrying, share: float) -> int:
        going.append(carrying)
        return moved(carrying, share)

    going: list[Carrying] = []
    monkeypatch.setattr(SlotPool, where, fails)
    monkeypatch.setattr(Carrying, "finish", finish)
    refusal = resize(admin, 16).refusal
    assert "1 of 2 namespaces failed" in refusal
    assert "a defect" in refusal
    assert broken.failure
    assert manager.space(0).failure == ""
    assert manager.space(0).arena.slot_count == 8
    assert manager.server.spaces.settings.host_bytes == 16 * LAYOUT.block_bytes
    sent_away(*first)
    leader, worker = come_back(manager, "a")
    assert holds(leader, worker, 1, KEYS[:6]) == 6
    # Whoever comes to the other one finds nothing, and no wrong bytes.
    assert broken.lookup(99, 1, KEYS[:6], 0) is None


@pytest.mark.swallows("^RuntimeError: no$")
def test_a_policy_that_fails_while_leases_end_is_told(
    make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager()
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:8])
    leader.lookup(1, KEYS[:3])

    def fails(slots: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(manager.space().host_pool.policy, "evictable", fails)
    assert "1 of 1 namespaces failed" in resize(operator(manager), 32).refusal
    assert "RuntimeError: no" in manager.space().failure
