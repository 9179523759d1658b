"""The server over real Unix sockets: who gets in, and what it says of itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvbm.client.channel import Channel
from kvbm.errors import ManagerRefused
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.door import SESSIONS_MAX
from kvbm.manager.session import Session
from kvbm.protocol import (
    HELD,
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Ready,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    Welcome,
)
from kvbm.testing.oracle import block_bytes
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER, Client, ManagerBench, refusal, store

MakeBench = Callable[..., ManagerBench]


# ---- who gets in


def test_an_engine_is_ready_when_all_its_ranks_are_there(manager: ManagerBench) -> None:
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = manager.leader("e")
    assert leader.take() == []
    first = manager.worker("e", rank=1, rank_count=2, shard=1, layout=layout)
    assert not leader.expect(Ready).ready
    second = manager.worker("e", rank=0, rank_count=2, shard=0, layout=layout)
    ready = leader.expect(Ready)
    assert ready.ready
    assert ready.fingerprint == NAMESPACE.fingerprint
    assert ready.block_bytes == layout.block_bytes
    assert ready.epoch == first.welcome.epoch == second.welcome.epoch == manager.server.epoch
    assert ready.tiers == {"host": 16}
    assert (first.welcome.slot_count, first.welcome.slot_bytes) == (16, 4096)
    (region, table), (other_region, same_table) = inodes(first), inodes(second)
    assert region != other_region
    assert table == same_table


def inodes(worker: Client) -> list[int]:
    """Of the files that came with its welcome."""
    fds = worker.channel.take_fds()
    found = [os.fstat(fd).st_ino for fd in fds]
    for fd in fds:
        os.close(fd)
    return found


def test_the_leader_may_come_last(manager: ManagerBench) -> None:
    manager.worker("e")
    leader = manager.leader("e")
    assert leader.expect(Ready).ready


def test_another_version_is_refused_with_both_named(manager: ManagerBench) -> None:
    client = manager.client()
    client.send(Hello(version=PROTOCOL_VERSION + 1, role="leader"))
    reason = refusal(client)
    assert f"version={PROTOCOL_VERSION + 1}" in reason
    assert f"speaks {PROTOCOL_VERSION}" in reason


@pytest.mark.parametrize(
    ("hello", "word"),
    [
        ({"role": "poet"}, "role='poet'"),
        ({"role": "worker"}, "namespace, layout"),
        ({"role": "worker", "namespace": NAMESPACE, "layout": LAYOUT, "shard": 1}, "shard"),
        ({"role": "worker", "namespace": NAMESPACE, "layout": LAYOUT, "rank": -1}, "rank=-1"),
        ({"role": "worker", "namespace": NAMESPACE, "layout": LAYOUT, "rank": 3, "rank_count": 3}, "rank=3"),
        (
            {"role": "worker", "namespace": NAMESPACE, "layout": LAYOUT, "rank_count": 10**9},
            "rank=0 of 1000000000",
        ),
        (
            {
                "role": "worker",
                "namespace": NAMESPACE,
                "layout": BlockLayout(block_tokens=1, shard_bytes=1, shard_count=1000),
            },
            "shard_count=1000",
        ),
    ],
)
def test_a_hello_that_cannot_be_used_is_refused(
    manager: ManagerBench, hello: dict[str, Any], word: str
) -> None:
    client = manager.client()
    client.send(Hello(version=PROTOCOL_VERSION, engine="e", **hello))
    assert word in refusal(client)
    assert manager.server.engine_count == 0


@pytest.mark.parametrize("field", ["block_tokens", "shard_bytes", "shard_count"])
@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_a_layout_of_nothing_is_refused(manager: ManagerBench, field: str, value: int) -> None:
    hello = msgspec.to_builtins(manager.worker_hello())
    hello["layout"][field] = value
    body = msgspec.msgpack.encode(hello)
    client = manager.client()
    client.channel.send_frame(len(body).to_bytes(4, "little") + body)
    assert field in refusal(client)


def test_a_foreign_namespace_is_refused_with_both_named_and_the_remedy(manager: ManagerBench) -> None:
    manager.engine("a")
    client = manager.client()
    client.send(manager.worker_hello("b", namespace=OTHER))
    reason = refusal(client)
    for part in (
        NAMESPACE.short,
        OTHER.short,
        "weights is",
        "'aa'",
        "'bb'",
        "--namespaces 2",
        "another manager",
    ):
        assert part in reason


def test_the_same_namespace_with_another_layout_is_refused(manager: ManagerBench) -> None:
    manager.engine("a")
    client = manager.client()
    client.send(manager.worker_hello("b", layout=BlockLayout(block_tokens=4, shard_bytes=8192)))
    assert "layout" in refusal(client)


def test_ranks_of_one_engine_must_agree(make_manager: MakeBench) -> None:
    manager = make_manager(namespaces=2)
    manager.worker("e", rank=0, rank_count=2)
    for hello, word in (
        ({"rank": 0, "rank_count": 2}, "attached already"),
        ({"rank": 1, "rank_count": 3}, "says 3 ranks, its peers 2"),
        ({"rank": 1, "rank_count": 2, "namespace": OTHER}, "weights is"),
    ):
        client = manager.client()
        client.send(manager.worker_hello("e", **hello))
        assert word in refusal(client)
    assert len(list(manager.server.spaces)) == 1, "a refused rank leaves no namespace behind"


def test_a_second_leader_is_refused(manager: ManagerBench) -> None:
    for with_worker in (False, True):
        name = f"e{with_worker}"
        if with_worker:
            manager.worker(name)
        manager.leader(name)
        client = manager.client()
        client.send(Hello(version=PROTOCOL_VERSION, role="leader", engine=name))
        assert "has a leader already" in refusal(client)


def test_two_namespaces_are_kept_apart(make_manager: MakeBench) -> None:
    manager = make_manager(namespaces=2)
    leader_a, worker_a = manager.engine("a")
    leader_b, worker_b = manager.engine("b", namespace=OTHER)
    assert worker_a.welcome.slot_count == worker_b.welcome.slot_count == 8, "each has its share"
    # Engines of two models that are asked the same have the same keys.
    slots = store(leader_a, worker_a, 1, KEYS[:2])
    assert leader_b.lookup(2, KEYS[:2]).slots == ()
    slots_b = leader_b.reserve(3, KEYS[:2])
    for slot, key in zip(slots_b, KEYS, strict=False):
        worker_b.write(slot, key, nonce=9)
    for slot, key in zip(slots, KEYS, strict=False):
        assert worker_a.read(slot) == block_bytes(key, 0, 4096)
    third = manager.client()
    third.send(manager.worker_hello("c", namespace=Namespace(model="third", fields=())))
    assert "--namespaces 3" in refusal(third)


def test_two_engines_of_one_namespace_share(manager: ManagerBench) -> None:
    leader_a, worker_a = manager.engine("a")
    leader_b, worker_b = manager.engine("b")
    store(leader_a, worker_a, 1, KEYS[:3])
    found = leader_b.lookup(1, KEYS[:4])
    assert found.ready == 3
    for slot, key in zip(found.slots, KEYS, strict=False):
        assert worker_b.read(slot) == block_bytes(key, 0, 4096)
    leader_a.close()
    worker_a.close()
    manager.until(lambda: manager.server.engine_count == 1)
    assert leader_b.lookup(2, KEYS[:3]).ready == 3


def test_the_user_at_the_other_end_is_asked_of_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    session = Session(ours, 1)
    assert session.peer_uid() == os.getuid()
    session.close()
    theirs.close()


def test_another_user_is_refused(manager: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "peer_uid", lambda self: os.getuid() + 1)
    client = manager.client()
    assert f"user {os.getuid() + 1} cannot be served" in refusal(client)


def test_sessions_are_bounded(manager: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SESSIONS_MAX > 100
    monkeypatch.setattr("kvbm.manager.door.SESSIONS_MAX", 2)
    first, second = manager.leader("a"), manager.leader("b")
    assert "accepted are 2" in refusal(manager.client())
    first.close()
    manager.step()
    manager.leader("c")
    assert second.take() == []


# ---- the manager itself


def test_counts_and_reset(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:3])
    leader.lookup(2, KEYS[:1])
    admin = manager.client()
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    manager.tick()
    counts = {
        state: manager.metrics.value("kvbm_pool_blocks", tier="host", state=state)
        for state in ("free", "filling", "resident")
    }
    assert counts == {"free": 13, "filling": 0, "resident": 3}
    assert manager.metrics.value("kvbm_leased_blocks", tier="host") == 1
    admin.send(StatusQuery())
    status = admin.expect(Status)
    assert status.epoch == manager.server.epoch
    (space,) = status.spaces
    assert (space["namespace"], space["queued"], space["fault"]) == (NAMESPACE.short, 0, "")
    assert space["tiers"] == {
        "host": {"blocks": 16, "free": 13, "filling": 0, "resident": 3, "leased": 1}
    }  # fmt: skip
    admin.send(Reset())
    assert admin.expect(ResetReply) == ResetReply(dropped=2, in_use=1)
    assert leader.lookup(3, KEYS[:3]).ready == 1


def test_a_reset_leaves_what_another_engine_uses(manager: ManagerBench) -> None:
    """The engine that resets has other keys from then on; the other goes on hitting."""
    leader, worker = manager.engine()
    other, other_worker = manager.engine("other")
    store(leader, worker, 1, KEYS[:3])
    leader.send(Reset())
    assert leader.expect(ResetReply) == ResetReply(dropped=0, in_use=0)
    assert other.lookup(1, KEYS[:3]).ready == 3
    for client in (other, other_worker):
        client.close()
    manager.until(lambda: manager.server.engine_count == 1)
    leader.send(Reset())
    assert leader.expect(ResetReply).dropped == 3


def test_a_reset_gives_back_stores_under_way(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    slots = leader.reserve(1, KEYS[:2])
    for slot, key in zip(slots, KEYS, strict=False):
        worker.write(slot, key)
    leader.send(Reset())
    assert leader.expect(ResetReply) == ResetReply(dropped=0, in_use=2)
    leader.send(Commit(store=1))
    assert leader.lookup(2, KEYS[:2]).slots == ()
    assert leader.reserve(3, KEYS[:1])[0] != HELD


def test_closing_ends_every_session(make_manager: MakeBench) -> None:
    manager = make_manager()
    leader, worker = manager.engine()
    manager.open = False
    manager.server.close(keep=True)
    for client in (leader, worker):
        client._receive()
        assert client.gone


def test_a_refusal_that_came_before_the_hello_is_still_heard(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "peer_uid", lambda self: os.getuid() + 1)
    channel = Channel.connect(manager.path)
    manager.step()
    with pytest.raises(ManagerRefused, match="cannot be served"):
        channel.introduce(manager.worker_hello("b"), 5.0)
    channel.close()
