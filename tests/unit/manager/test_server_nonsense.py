"""A bad client can do nothing to the server and to others."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.framing import encode
from kvbm.hashing import join_keys
from kvbm.protocol import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    REFUSED,
    Commit,
    FenceDone,
    Finished,
    Follow,
    Hello,
    Lookup,
    LookupReply,
    Progress,
    Release,
    Reserve,
    Reset,
    Watch,
    Welcome,
)
from kvbm.testing.oracle import block_bytes
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER, Client, ManagerBench, refusal, store
from rigs.property_tests import scale_examples

MakeBench = Callable[..., ManagerBench]


# ---- nonsense


def raw(manager: ManagerBench, data: bytes) -> Client:
    client = manager.client()
    client.channel.send_frame(data)
    manager.step()
    return client


DEEP = (
    b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("follow")
    + msgspec.msgpack.encode("x") + b"\x91" * 100_000 + b"\x01"
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (struct.pack("<I", MESSAGE_BYTES_MAX + 1), f"accepted {MESSAGE_BYTES_MAX}"),
        (struct.pack("<I", 0), "malformed"),
        (struct.pack("<I", 3) + b"abc", "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the accepted"),
        (encode(Follow()), "Follow before Hello"),
        (encode(Lookup(lookup=1, keys=b"")), "Lookup before Hello"),
        (struct.pack("<I", len(DEEP)) + DEEP, "malformed"),
    ],
)
def test_nonsense_ends_its_session_alone(manager: ManagerBench, data: bytes, word: str) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:1])
    assert word in refusal(raw(manager, data))
    assert leader.lookup(2, KEYS[:1]).ready == 1
    assert worker.take() == []


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (Lookup(lookup=1, keys=b"x" * 33), "33 bytes"),
        (Reserve(store=1, parent=b"x", keys=b""), "1 bytes"),
        (Reserve(store=1, parent=b"", keys=join_keys(KEYS[:2]), hashes=b"x" * 33), "hashes of 33 bytes"),
        (Reserve(store=1, parent=b"", keys=join_keys(KEYS[:2]), hashes=b"x" * 32), "none, or 64"),
        (Reserve(store=1, parent=b"", keys=join_keys(KEYS[:2]), hashes=b"x" * 96), "hashes of 96 bytes"),
        (Reserve(store=1, parent=b"", keys=join_keys(KEYS[:1]), group=-1), "group=-1"),
        (Reserve(store=1, parent=b"", keys=join_keys(KEYS[:1]), group=65536), "0 to 65535"),
        (Lookup(lookup=1, keys=join_keys(KEYS[:2]), skip=3), "skip=3"),
        (Lookup(lookup=1, keys=join_keys(KEYS[:2]), skip=-1), "skip=-1"),
        (Hello(version=PROTOCOL_VERSION, role="leader"), "second Hello"),
    ],
)
def test_a_message_that_cannot_be_served_ends_its_session(
    manager: ManagerBench, message: Any, word: str
) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 7, KEYS[:1])
    assert leader.lookup(9, KEYS[:1]).ready == 1
    leader.send(message)
    assert word in refusal(leader)
    assert manager.space().host_pool.counts().leased == 0


def test_numbers_that_mean_nothing_do_nothing(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    for message in (
        Release(lookup=99, first=-5, loaded=2**60, failed=0, seconds=1e300),
        Commit(store=99, failed=(5, -3, 2**60), seconds=-1.0),
        Release(lookup=99, loaded=-1, failed=-1),
        FenceDone(fence=12345),
        Finished(key=KEYS[5], output_tokens=2**62),
        Finished(key=KEYS[0], output_tokens=-(2**62)),
        Finished(key=KEYS[0] * 3),
        Finished(key=b""),
        Watch(lookup=4),
    ):
        leader.send(message)
        worker.send(message)
    assert leader.take() == [Progress(lookup=4, ready=0, final=True)]
    assert worker.take() == [Progress(lookup=4, ready=0, final=True)]
    found = leader.lookup(2, KEYS[:2])
    leader.send(Release(lookup=2, first=2**62, loaded=2**62, failed=0, seconds=float("nan")))
    assert found.ready == 2
    assert manager.space().host_pool.counts().leased == 0


def test_a_worker_or_an_admin_is_no_leader(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    admin = manager.client()
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin", engine="e"))
    admin.expect(Welcome)
    for client in (worker, admin):
        assert client.lookup(1, KEYS[:2]).slots == ()
        assert client.reserve(1, KEYS[2:3]) == (REFUSED,)
        client.send(Commit(store=1))
        client.send(Release(lookup=1))
    assert manager.space().host_pool.counts().filling == manager.space().host_pool.counts().leased == 0


def test_a_leader_without_its_workers_is_told_nothing_is_there(manager: ManagerBench) -> None:
    leader = manager.leader()
    assert leader.lookup(1, KEYS[:2]).slots == ()
    assert leader.reserve(1, KEYS[:2]) == (REFUSED, REFUSED)


def test_one_recv_may_hold_many_messages_and_half_of_one(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:1])
    frames = b"".join(encode(Lookup(lookup=i, keys=join_keys(KEYS[:1]))) for i in (2, 3, 4))
    for cut in (1, 3, 5, len(frames) - 1):
        leader.channel.send_frame(frames[:cut])
        manager.step()
        leader.channel.send_frame(frames[cut:])
        for number in (2, 3, 4):
            assert leader.expect(LookupReply).lookup == number
            leader.send(Release(lookup=number))


PLAUSIBLE = st.one_of(
    st.builds(Lookup, lookup=st.integers(-3, 3), keys=st.sampled_from([b"", KEYS[0], KEYS[1] * 2]),
              skip=st.integers(-1, 3)),
    st.builds(Reserve, store=st.integers(-3, 3), parent=st.sampled_from([b"", KEYS[0]]),
              keys=st.sampled_from([b"", join_keys(KEYS[:3]), KEYS[0] * 3])),
    st.builds(Commit, store=st.integers(-3, 3), failed=st.lists(st.integers(-9, 9), max_size=3).map(tuple),
              seconds=st.floats()),
    st.builds(Release, lookup=st.integers(-3, 3), first=st.integers(), loaded=st.integers(),
              failed=st.integers(), seconds=st.floats()),
    st.builds(Finished, key=st.sampled_from([b"", KEYS[0], KEYS[1] * 2]), output_tokens=st.integers()),
    st.builds(Watch, lookup=st.integers(-3, 3)),
    st.builds(FenceDone, fence=st.integers(-1, 5)),
    st.builds(Follow),
    st.builds(Reset, tier=st.sampled_from(["", "host", "moon"])),
    st.builds(Hello, version=st.sampled_from([PROTOCOL_VERSION, 0]),
              role=st.sampled_from(["leader", "worker", "admin", ""]), engine=st.sampled_from(["good", "bad", ""]),
              rank=st.integers(-1, 2), rank_count=st.integers(-1, 3), shard=st.integers(-1, 2),
              request_blocks=st.integers(-5, 40), namespace=st.sampled_from([None, NAMESPACE, OTHER]),
              layout=st.sampled_from([None, LAYOUT])),
)  # fmt: skip


def _flip(frame: bytes, position: int, value: int) -> bytes:
    position %= len(frame)
    return frame[:position] + bytes([value]) + frame[position + 1 :]


def _encode(message: Any) -> bytes:
    """Also what is out of the range of msgpack's integers."""
    clipped = {
        name: max(-(2**63), min(2**64 - 1, value)) if isinstance(value, int) else value
        for name, value in msgspec.structs.asdict(message).items()
    }
    return encode(type(message)(**clipped))


FRAMES = st.one_of(
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda body: struct.pack("<I", len(body)) + body),
    PLAUSIBLE.flatmap(
        lambda m: st.builds(_flip, st.just(_encode(m)), st.integers(0, 300), st.integers(0, 255))
    ),
    PLAUSIBLE.map(_encode),
)  # fmt: skip


@settings(max_examples=scale_examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.sampled_from(["", "leader", "worker", "admin"]), frames=st.lists(FRAMES, max_size=6))
def test_no_bytes_disturb_another_session(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture, first: str, frames: list[bytes]
) -> None:
    caplog.clear()
    manager = make_manager(namespaces=2)
    leader, worker = manager.engine("good")
    store(leader, worker, 1, KEYS[:2])
    found = leader.lookup(2, KEYS[:2])
    stranger = manager.client()
    if first:
        hello = manager.worker_hello("bad") if first == "worker" else Hello(
            version=PROTOCOL_VERSION, role=first, engine="bad"
        )  # fmt: skip
        stranger.send(hello)
    try:
        stranger.channel.send_frame(b"".join(frames))
    except Exception:
        assert stranger.gone or frames
    manager.step(6)
    manager.check()
    assert worker.take() == []
    assert leader.lookup(3, KEYS[:2]).slots == found.slots
    assert [worker.read(slot) for slot in found.slots] == [block_bytes(key, 0, 4096) for key in KEYS[:2]]
    stranger.close()
    manager.step(6)
    assert manager.space().host_pool.counts().filling == 0
    assert manager.server.engine_count == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    manager.close()


def test_a_worker_that_dies_before_it_is_welcomed_costs_nothing(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    for _ in range(3):
        raw_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw_socket.connect(manager.path)
        manager.step()
        raw_socket.sendall(encode(manager.worker_hello("short-lived")))
        raw_socket.close()
        manager.step()
    assert manager.server.engine_count == 1
    store(leader, worker, 1, KEYS[:1])
    assert leader.lookup(2, KEYS[:1]).ready == 1


def test_a_client_that_reads_nothing_is_dropped_and_the_rest_served(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.framing.OUTGOING_BYTES_MAX", 1 << 20)
    leader, worker = manager.engine("good")
    store(leader, worker, 1, KEYS[:4])
    slow, _ = manager.engine("slow")
    question = encode(Lookup(lookup=1, keys=join_keys(KEYS[:4] * 250)))
    number, server_sessions = 0, manager.server.sessions
    before = len(server_sessions)
    while len(server_sessions) == before:
        number += 1
        assert number < 2000, "its buffer grows without a bound"
        slow.channel.send(Reserve(store=number, parent=b"", keys=join_keys(KEYS[:4] * 250)))
        manager.step(1)
    assert len(question) > 30_000
    assert leader.lookup(9, KEYS[:4]).ready == 4
    assert manager.space().host_pool.counts().leased == 4
