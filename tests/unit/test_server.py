"""The server over real Unix sockets: who gets in, whose slots are whose, and what a bad client can do (nothing)."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.block import BlockState
from kvbm.channel import Channel
from kvbm.errors import ManagerRefused
from kvbm.hashing import join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager import session as session_module
from kvbm.manager.server import SESSIONS_MAX
from kvbm.manager.session import Session
from kvbm.manager.space import LEASE_S, RESERVATION_S
from kvbm.protocol import (
    HELD,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    REFUSED,
    Commit,
    Fence,
    FenceDone,
    Hello,
    Lookup,
    LookupReply,
    Progress,
    Ready,
    Refused,
    Release,
    Reserve,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    Watch,
    Welcome,
    encode,
)
from kvbm.testing.fake_tier import FakeMedium, FakeTier
from kvbm.testing.oracle import block_bytes
from unit.manager_bench import KEYS, LAYOUT, NAMESPACE, OTHER, Client, ManagerBench, store

MakeBench = Callable[..., ManagerBench]


@pytest.fixture
def media() -> Iterator[list[FakeMedium]]:
    """Closed after the managers that use them."""
    media: list[FakeMedium] = []
    yield media
    for medium in media:
        medium.close()


@pytest.fixture
def make(tmp_path: Path, media: list[FakeMedium]) -> Iterator[MakeBench]:
    benches: list[ManagerBench] = []

    def build(namespaces: int = 1, **options: Any) -> ManagerBench:
        directory = tmp_path / str(len(benches))
        directory.mkdir()
        benches.append(ManagerBench(directory, namespaces, **options))
        return benches[-1]

    yield build
    for bench in benches:
        bench.check()
        bench.close()


@pytest.fixture
def bench(make: MakeBench, caplog: pytest.LogCaptureFixture) -> Iterator[ManagerBench]:
    """A manager that must not meet a defect of its own: what it swallows, it logs as an error."""
    yield make()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def fake_disk(media: list[FakeMedium], monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    """What the manager opens when it opens a disk tier."""
    media.append(FakeMedium(LAYOUT, 32))
    tier = FakeTier(media[0])
    monkeypatch.setattr("kvbm.manager.assembly.open_disk_tier", lambda *args, **options: tier)
    return tier


def refusal(client: Client) -> str:
    reason = client.expect(Refused).reason
    assert "\n" not in reason
    client.expect_end()
    return reason


# ---- who gets in


def test_an_engine_is_ready_when_all_its_ranks_are_there(bench: ManagerBench) -> None:
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = bench.leader("e")
    assert leader.take() == []
    first = bench.worker("e", rank=1, rank_count=2, shard=1, layout=layout)
    assert not leader.expect(Ready).ready
    second = bench.worker("e", rank=0, rank_count=2, shard=0, layout=layout)
    ready = leader.expect(Ready)
    assert ready.ready
    assert ready.fingerprint == NAMESPACE.fingerprint
    assert ready.block_bytes == layout.block_bytes
    assert ready.epoch == first.welcome.epoch == second.welcome.epoch == bench.server.epoch
    assert ready.tiers == {"host": 16}
    assert (first.welcome.slot_count, first.welcome.slot_bytes) == (16, 4096)
    assert os.fstat(first.channel.fds[0]).st_ino != os.fstat(second.channel.fds[0]).st_ino
    assert os.fstat(first.channel.fds[1]).st_ino == os.fstat(second.channel.fds[1]).st_ino


def test_the_leader_may_come_last(bench: ManagerBench) -> None:
    bench.worker("e")
    leader = bench.leader("e")
    assert leader.expect(Ready).ready


def test_another_version_is_refused_with_both_named(bench: ManagerBench) -> None:
    client = bench.client()
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
        (
            {"role": "worker", "namespace": NAMESPACE, "layout": LAYOUT, "request_blocks": 17},
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=16",
        ),
    ],
)
def test_a_hello_that_cannot_be_used_is_refused(bench: ManagerBench, hello: dict[str, Any], word: str) -> None:
    client = bench.client()
    client.send(Hello(version=PROTOCOL_VERSION, engine="e", **hello))
    assert word in refusal(client)
    assert bench.server.engine_count == 0


@pytest.mark.parametrize("field", ["block_tokens", "shard_bytes", "shard_count"])
@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_a_layout_of_nothing_is_refused(bench: ManagerBench, field: str, value: int) -> None:
    hello = msgspec.to_builtins(bench.worker_hello())
    hello["layout"][field] = value
    body = msgspec.msgpack.encode(hello)
    client = bench.client()
    client.channel._outgoing += len(body).to_bytes(4, "little") + body
    client.channel._flush()
    assert field in refusal(client)


def test_a_foreign_namespace_is_refused_with_both_named_and_the_remedy(bench: ManagerBench) -> None:
    bench.engine("a")
    client = bench.client()
    client.send(bench.worker_hello("b", namespace=OTHER))
    reason = refusal(client)
    for part in (NAMESPACE.short, OTHER.short, "weights is", "'aa'", "'bb'", "--namespaces 2", "another manager"):
        assert part in reason


def test_the_same_namespace_with_another_layout_is_refused(bench: ManagerBench) -> None:
    bench.engine("a")
    client = bench.client()
    client.send(bench.worker_hello("b", layout=BlockLayout(block_tokens=4, shard_bytes=8192)))
    assert "layout" in refusal(client)


def test_ranks_of_one_engine_must_agree(make: MakeBench) -> None:
    bench = make(namespaces=2)
    bench.worker("e", rank=0, rank_count=2)
    for hello, word in (
        ({"rank": 0, "rank_count": 2}, "attached already"),
        ({"rank": 1, "rank_count": 3}, "says 3 ranks, its peers 2"),
        ({"rank": 1, "rank_count": 2, "namespace": OTHER}, "weights is"),
    ):
        client = bench.client()
        client.send(bench.worker_hello("e", **hello))
        assert word in refusal(client)
    assert len(list(bench.server.spaces)) == 1, "a refused rank leaves no namespace behind"


def test_a_second_leader_is_refused(bench: ManagerBench) -> None:
    for with_worker in (False, True):
        name = f"e{with_worker}"
        if with_worker:
            bench.worker(name)
        bench.leader(name)
        client = bench.client()
        client.send(Hello(version=PROTOCOL_VERSION, role="leader", engine=name))
        assert "has a leader already" in refusal(client)


def test_two_namespaces_are_kept_apart(make: MakeBench) -> None:
    bench = make(namespaces=2)
    leader_a, worker_a = bench.engine("a")
    leader_b, worker_b = bench.engine("b", namespace=OTHER)
    assert worker_a.welcome.slot_count == worker_b.welcome.slot_count == 8, "each has its share"
    # Even with equal keys (which the fingerprint rules out) nothing would meet.
    slots = store(leader_a, worker_a, 1, KEYS[:2])
    assert leader_b.lookup(2, KEYS[:2]).slots == ()
    slots_b = leader_b.reserve(3, KEYS[:2])
    for slot, key in zip(slots_b, KEYS, strict=False):
        worker_b.write(slot, key, nonce=9)
    for slot, key in zip(slots, KEYS, strict=False):
        assert worker_a.read(slot) == block_bytes(key, 0, 4096)
    third = bench.client()
    third.send(bench.worker_hello("c", namespace=Namespace(model="third", fields=())))
    assert "--namespaces 3" in refusal(third)


def test_two_engines_of_one_namespace_share(bench: ManagerBench) -> None:
    leader_a, worker_a = bench.engine("a")
    leader_b, worker_b = bench.engine("b")
    store(leader_a, worker_a, 1, KEYS[:3])
    found = leader_b.lookup(1, KEYS[:4])
    assert found.ready == 3
    for slot, key in zip(found.slots, KEYS, strict=False):
        assert worker_b.read(slot) == block_bytes(key, 0, 4096)
    leader_a.close()
    worker_a.close()
    bench.until(lambda: bench.server.engine_count == 1)
    assert leader_b.lookup(2, KEYS[:3]).ready == 3


def test_the_user_at_the_other_end_is_asked_of_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    session = Session(ours, 1)
    assert session.peer_uid() == os.getuid()
    session.close()
    theirs.close()


def test_another_user_is_refused(bench: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "peer_uid", lambda self: os.getuid() + 1)
    client = bench.client()
    assert f"user {os.getuid() + 1} cannot be served" in refusal(client)


def test_sessions_are_bounded(bench: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SESSIONS_MAX > 100
    monkeypatch.setattr("kvbm.manager.server.SESSIONS_MAX", 2)
    first, second = bench.leader("a"), bench.leader("b")
    assert "accepted are 2" in refusal(bench.client())
    first.close()
    bench.step()
    bench.leader("c")
    assert second.take() == []


# ---- nonsense


def raw(bench: ManagerBench, data: bytes) -> Client:
    client = bench.client()
    client.channel._outgoing += data
    client.channel._flush()
    bench.step()
    return client


DEEP = (
    b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("status?")
    + msgspec.msgpack.encode("x") + b"\x91" * 100_000 + b"\x01"
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (struct.pack("<I", MESSAGE_BYTES_MAX + 1), f"accepted {MESSAGE_BYTES_MAX}"),
        (struct.pack("<I", 0), "malformed"),
        (struct.pack("<I", 3) + b"abc", "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the accepted"),
        (encode(StatusQuery()), "StatusQuery before Hello"),
        (encode(Lookup(lookup=1, keys=b"")), "Lookup before Hello"),
        (struct.pack("<I", len(DEEP)) + DEEP, "malformed"),
    ],
)
def test_nonsense_ends_its_session_alone(bench: ManagerBench, data: bytes, word: str) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:1])
    assert word in refusal(raw(bench, data))
    assert leader.lookup(2, KEYS[:1]).ready == 1
    assert worker.take() == []


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (Lookup(lookup=1, keys=b"x" * 33), "33 bytes"),
        (Reserve(store=1, parent=b"x", keys=b""), "1 bytes"),
        (Lookup(lookup=1, keys=join_keys(KEYS[:2]), skip=3), "skip=3"),
        (Lookup(lookup=1, keys=join_keys(KEYS[:2]), skip=-1), "skip=-1"),
        (Hello(version=PROTOCOL_VERSION, role="leader"), "second Hello"),
    ],
)
def test_a_message_that_cannot_be_served_ends_its_session(
    bench: ManagerBench, message: Any, word: str
) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 7, KEYS[:1])
    assert leader.lookup(9, KEYS[:1]).ready == 1
    leader.send(message)
    assert word in refusal(leader)
    assert bench.space().host.counts().leased == 0


def test_numbers_that_mean_nothing_do_nothing(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    for message in (
        Release(lookup=99, first=-5, loaded=2**60, failed=0, seconds=1e300),
        Commit(store=99, failed=(5, -3, 2**60), seconds=-1.0),
        Release(lookup=99, loaded=-1, failed=-1),
        FenceDone(fence=12345),
        Watch(lookup=4),
    ):
        leader.send(message)
        worker.send(message)
    assert leader.take() == [Progress(lookup=4, ready=0, final=True)]
    assert worker.take() == [Progress(lookup=4, ready=0, final=True)]
    found = leader.lookup(2, KEYS[:2])
    leader.send(Release(lookup=2, first=2**62, loaded=2**62, failed=0, seconds=float("nan")))
    assert found.ready == 2
    assert bench.space().host.counts().leased == 0


def test_a_worker_or_an_admin_is_no_leader(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    admin = bench.client()
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin", engine="e"))
    admin.expect(Welcome)
    for client in (worker, admin):
        assert client.lookup(1, KEYS[:2]).slots == ()
        assert client.reserve(1, KEYS[2:3]) == (REFUSED,)
        client.send(Commit(store=1))
        client.send(Release(lookup=1))
    assert bench.space().host.counts().filling == bench.space().host.counts().leased == 0


def test_a_leader_without_its_workers_is_told_nothing_is_there(bench: ManagerBench) -> None:
    leader = bench.leader()
    assert leader.lookup(1, KEYS[:2]).slots == ()
    assert leader.reserve(1, KEYS[:2]) == (REFUSED, REFUSED)


def test_one_recv_may_hold_many_messages_and_half_of_one(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:1])
    frames = b"".join(encode(Lookup(lookup=i, keys=join_keys(KEYS[:1]))) for i in (2, 3, 4))
    for cut in (1, 3, 5, len(frames) - 1):
        leader.channel._outgoing += frames[:cut]
        leader.channel._flush()
        bench.step()
        leader.channel._outgoing += frames[cut:]
        leader.channel._flush()
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
    st.builds(Watch, lookup=st.integers(-3, 3)),
    st.builds(FenceDone, fence=st.integers(-1, 5)),
    st.builds(Reset, tier=st.sampled_from(["", "host", "moon"])),
    st.builds(StatusQuery),
    st.builds(Hello, version=st.sampled_from([PROTOCOL_VERSION, 0]),
              role=st.sampled_from(["leader", "worker", "admin", ""]), engine=st.sampled_from(["good", "bad", ""]),
              rank=st.integers(-1, 2), rank_count=st.integers(-1, 3), shard=st.integers(-1, 2),
              request_blocks=st.integers(-5, 40), namespace=st.sampled_from([None, NAMESPACE, OTHER]),
              layout=st.sampled_from([None, LAYOUT])),
)  # fmt: skip


def _flip(frame: bytes, position: int, value: int) -> bytes:
    position %= len(frame)
    return frame[:position] + bytes([value]) + frame[position + 1 :]


FRAMES = st.one_of(
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda body: struct.pack("<I", len(body)) + body),
    PLAUSIBLE.flatmap(
        lambda m: st.builds(_flip, st.just(_encode(m)), st.integers(0, 300), st.integers(0, 255))
    ),
    PLAUSIBLE.map(lambda m: _encode(m)),
)  # fmt: skip


def _encode(message: Any) -> bytes:
    """Also what is out of the range of msgpack's integers."""
    clipped = {
        name: max(-(2**63), min(2**64 - 1, value)) if isinstance(value, int) else value
        for name, value in msgspec.structs.asdict(message).items()
    }
    return encode(type(message)(**clipped))


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.sampled_from(["", "leader", "worker", "admin"]), frames=st.lists(FRAMES, max_size=6))
def test_no_bytes_disturb_another_session(
    make: MakeBench, caplog: pytest.LogCaptureFixture, first: str, frames: list[bytes]
) -> None:
    caplog.clear()
    bench = make(namespaces=2)
    leader, worker = bench.engine("good")
    store(leader, worker, 1, KEYS[:2])
    found = leader.lookup(2, KEYS[:2])
    stranger = bench.client()
    if first:
        hello = bench.worker_hello("bad") if first == "worker" else Hello(
            version=PROTOCOL_VERSION, role=first, engine="bad"
        )  # fmt: skip
        stranger.send(hello)
    for frame in frames:
        stranger.channel._outgoing += frame
    try:
        stranger.channel._flush()
    except Exception:
        assert stranger.gone or frames
    bench.step(6)
    bench.check()
    assert worker.take() == []
    assert leader.lookup(3, KEYS[:2]).slots == found.slots
    assert [worker.read(slot) for slot in found.slots] == [block_bytes(key, 0, 4096) for key in KEYS[:2]]
    stranger.close()
    bench.step(6)
    assert bench.space().host.counts().filling == 0
    assert bench.server.engine_count == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    bench.close()


def test_a_worker_that_dies_before_it_is_welcomed_costs_nothing(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    for _ in range(3):
        raw_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw_socket.connect(bench.path)
        bench.step()
        raw_socket.sendall(encode(bench.worker_hello("short-lived")))
        raw_socket.close()
        bench.step()
    assert bench.server.engine_count == 1
    store(leader, worker, 1, KEYS[:1])
    assert leader.lookup(2, KEYS[:1]).ready == 1


def test_a_client_that_reads_nothing_is_dropped_and_the_rest_served(
    bench: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "OUTGOING_BYTES_MAX", 1 << 20)
    leader, worker = bench.engine("good")
    store(leader, worker, 1, KEYS[:4])
    slow, _ = bench.engine("slow")
    question = encode(Lookup(lookup=1, keys=join_keys(KEYS[:4] * 250)))
    number, server_sessions = 0, bench.server._sessions
    before = len(server_sessions)
    while len(server_sessions) == before:
        number += 1
        assert number < 2000, "its buffer grows without a bound"
        slow.channel._outgoing += encode(Reserve(store=number, parent=b"", keys=join_keys(KEYS[:4] * 250)))
        slow.channel._flush()
        bench.step(1)
    assert len(question) > 30_000
    assert leader.lookup(9, KEYS[:4]).ready == 4
    assert bench.space().host.counts().leased == 4


# ---- leases, reservations and who dies


def test_a_killed_leader_gives_back_its_leases_at_once(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:3])
    leader.lookup(2, KEYS[:3])
    assert bench.space().host.counts().leased == 3
    leader.close()
    bench.until(lambda: bench.space().host.counts().leased == 0)
    again = bench.leader()
    assert again.expect(Ready).ready
    assert again.lookup(1, KEYS[:3]).ready == 3, "the cache stays"


def test_a_killed_leaders_slots_wait_for_its_workers(bench: ManagerBench) -> None:
    """A late writer can write as long as it has not answered: nobody else may have the slot until then."""
    leader, worker = bench.engine()
    slots = leader.reserve(1, KEYS[:2])
    leader.close()
    fence = worker.expect(Fence)
    assert fence.stores == (1,)
    assert bench.space().host.counts().filling == 2
    again = bench.leader()
    again.expect(Ready)
    others = KEYS[100:120]
    answer = again.reserve(1, others)
    taken = [slot for slot in answer if slot >= 0]
    assert len(taken) == 14
    assert not set(taken) & set(slots)
    for key, slot in zip(others, taken, strict=False):
        worker.write(slot, key)
    for slot in slots:
        worker.write(slot, KEYS[500])  # late, and into what is still its own
    again.send(Commit(store=1))
    again.send(Commit(store=1, failed=()))
    assert again.lookup(2, KEYS[:2]).slots == (), "what was condemned is never found"
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 0
    assert bench.space().host.counts().free == 2
    for key, slot in zip(others, taken, strict=False):
        assert worker.read(slot) == block_bytes(key, 0, 4096)


def test_of_two_workers_both_must_answer_or_go(bench: ManagerBench) -> None:
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = bench.leader()
    workers = [bench.worker(rank=i, rank_count=2, shard=i, layout=layout) for i in range(2)]
    assert [m.ready for m in leader.take() if isinstance(m, Ready)][-1]
    slots = leader.reserve(1, KEYS[:2])
    leader.close()
    fences = [worker.expect(Fence) for worker in workers]
    workers[0].send(FenceDone(fence=fences[0].fence))
    workers[0].send(FenceDone(fence=fences[0].fence))
    assert all(bench.space().host.state_of(slot) is BlockState.FILLING for slot in slots)
    workers[1].close()
    bench.until(lambda: bench.space().host.counts().filling == 0)


def test_a_fence_answered_by_somebody_else_does_not_count(bench: ManagerBench) -> None:
    leader, worker = bench.engine("a")
    other_leader, other_worker = bench.engine("b")
    leader.reserve(1, KEYS[:2])
    leader.close()
    fence = worker.expect(Fence)
    for stranger in (other_leader, other_worker):
        stranger.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 2
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 0


def test_a_worker_that_comes_back_is_fenced_too(bench: ManagerBench) -> None:
    """It lost its session and lives: a store of before may still be in its queue."""
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = bench.leader()
    steady = bench.worker(rank=0, rank_count=2, shard=0, layout=layout)
    flaky = bench.worker(rank=1, rank_count=2, shard=1, layout=layout)
    leader.take()
    slots = leader.reserve(1, KEYS[:2])
    flaky.close()
    bench.step()
    leader.close()
    first = steady.expect(Fence)
    flaky = bench.worker(rank=1, rank_count=2, shard=1, layout=layout)
    again = flaky.expect(Fence)
    assert again.stores == first.stores == (1,)
    steady.send(FenceDone(fence=first.fence))
    assert all(bench.space().host.state_of(slot) is BlockState.FILLING for slot in slots)
    flaky.send(FenceDone(fence=again.fence))
    assert bench.space().host.counts().filling == 0


def test_a_slot_that_was_given_back_has_another_generation(bench: ManagerBench) -> None:
    """So a worker with a store plan from before notices, whatever fences it missed."""
    leader, worker = bench.engine()
    leader.send(Reserve(store=1, parent=b"", keys=KEYS[0]))
    (reply,) = leader.take()
    slot, generation = reply.slots[0], reply.generations[0]  # type: ignore[union-attr]
    assert bench.space().arena.generation(slot) == generation
    leader.send(Commit(store=1, failed=(0,)))
    assert bench.space().arena.generation(slot) > generation
    assert worker.take() == []


def test_reservations_past_their_deadline_are_fenced(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    slots = leader.reserve(1, KEYS[:2])
    bench.tick(RESERVATION_S + 1.0)
    fence = worker.expect(Fence)
    leader.send(Commit(store=1))
    assert leader.lookup(2, KEYS[:2]).slots == ()
    bench.tick(RESERVATION_S + 1.0)
    assert worker.take() == [], "fenced once"
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 0
    assert set(leader.reserve(2, KEYS[:2])) == set(slots)


def test_leases_past_their_deadline_end(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    bench.tick(LEASE_S + 1.0)
    assert bench.space().host.counts().leased == 0
    assert bench.metrics.value("kvbm_leases_expired_total") == 1


def test_a_killed_worker_makes_its_engine_unready_until_it_is_back(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    worker.close()
    assert not leader.expect(Ready).ready
    assert leader.lookup(2, KEYS[:2]).slots == ()
    assert leader.reserve(3, KEYS[2:3]) == (REFUSED,)
    bench.worker()
    assert leader.expect(Ready).ready
    assert leader.lookup(4, KEYS[:2]).ready == 2


def test_a_leader_that_is_replaced_in_the_same_turn_leaves_nothing(bench: ManagerBench) -> None:
    """The old one's end and the new one's hello arrive together."""
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.reserve(3, KEYS[2:4])
    new = bench.client()
    leader.channel.close()
    new.channel.send(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
    bench.step()
    new.take()
    fence = worker.expect(Fence)
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().leased == 0
    assert bench.space().host.counts().filling == 0


def test_an_engine_that_is_gone_leaves_nothing_but_its_blocks(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.reserve(3, KEYS[2:4])
    worker.close()
    leader.close()
    bench.until(lambda: bench.server.engine_count == 0)
    counts = bench.space().host.counts()
    assert (counts.leased, counts.filling, counts.resident) == (0, 0, 2)
    assert len(bench.server._membership.fences) == 0
    bench.tick()
    assert bench.metrics.value("kvbm_engines") == 0


# ---- blocks that come up


def onboarding(make: MakeBench, fake_disk: FakeTier, blocks: int) -> tuple[ManagerBench, Client, Client]:
    """An engine whose blocks are on disk only."""
    bench = make(disk_blocks=32, disk_offload_filter=False)
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:blocks])
    bench.until(lambda: fake_disk.release() + len(fake_disk.medium.entries) == blocks)
    bench.step()
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == blocks
    return bench, leader, worker


def test_progress_goes_to_the_leader_and_to_who_watches(make: MakeBench, fake_disk: FakeTier) -> None:
    bench, leader, worker = onboarding(make, fake_disk, 3)
    found = leader.lookup(2, KEYS[:3])
    assert (len(found.slots), found.ready) == (3, 0)
    worker.send(Watch(lookup=2))
    assert worker.expect(Progress) == Progress(lookup=2, ready=0, final=False)
    fake_disk.release(2)
    bench.step()
    expected = [Progress(lookup=2, ready=1, final=False), Progress(lookup=2, ready=2, final=False)]
    assert worker.take() == expected
    assert leader.take() == expected
    fake_disk.release()
    bench.step()
    last = Progress(lookup=2, ready=3, final=True)
    assert (worker.take(), leader.take()) == ([last], [last])
    assert [worker.read(slot) for slot in found.slots] == [block_bytes(key, 0, 4096) for key in KEYS[:3]]
    worker.send(Watch(lookup=2))
    assert worker.take() == [last], "who watches too late hears how it ended"


def test_who_watches_a_lease_of_a_dead_leader_hears_the_end(make: MakeBench, fake_disk: FakeTier) -> None:
    bench, leader, worker = onboarding(make, fake_disk, 2)
    leader.lookup(2, KEYS[:2])
    worker.send(Watch(lookup=2))
    worker.take()
    leader.close()
    bench.until(lambda: bench.server._membership.of(bench.server._sessions[_number(bench)]) is not None)
    assert worker.take() == [Progress(lookup=2, ready=0, final=True)]
    fake_disk.release()
    bench.step()
    assert bench.space().host.counts().filling == 0


def _number(bench: ManagerBench) -> int:
    return next(iter(bench.server._sessions))


def test_a_broken_tier_ends_the_run_and_says_so_in_the_status(make: MakeBench, fake_disk: FakeTier) -> None:
    bench, leader, worker = onboarding(make, fake_disk, 2)
    leader.lookup(2, KEYS[:2])
    fake_disk.break_down("disk tier is off: it burns")
    bench.step()
    assert leader.take() == [Progress(lookup=2, ready=0, final=True)]
    leader.send(StatusQuery())
    (space,) = leader.expect(Status).spaces
    assert space["fault"] == "disk tier is off: it burns"
    bench.tick()
    assert bench.metrics.value("kvbm_tier_up", tier="disk") == 0
    assert worker.take() == []


# ---- the manager itself


def test_status_and_reset(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:3])
    leader.lookup(2, KEYS[:1])
    admin = bench.client()
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    admin.send(StatusQuery())
    status = admin.expect(Status)
    assert status.epoch == bench.server.epoch
    (space,) = status.spaces
    assert space["namespace"] == NAMESPACE.short
    assert space["tiers"] == {
        "host": {"blocks": 16, "free": 13, "filling": 0, "resident": 3, "leased": 1}
    }  # fmt: skip
    admin.send(Reset())
    assert admin.expect(ResetReply) == ResetReply(dropped=2, in_use=1)
    assert leader.lookup(3, KEYS[:3]).ready == 1


def test_a_reset_gives_back_stores_under_way(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    slots = leader.reserve(1, KEYS[:2])
    for slot, key in zip(slots, KEYS, strict=False):
        worker.write(slot, key)
    leader.send(Reset())
    assert leader.expect(ResetReply) == ResetReply(dropped=0, in_use=2)
    leader.send(Commit(store=1))
    assert leader.lookup(2, KEYS[:2]).slots == ()
    assert leader.reserve(3, KEYS[:1])[0] != HELD


def test_closing_ends_every_session(make: MakeBench) -> None:
    bench = make()
    leader, worker = bench.engine()
    bench.open = False
    bench.server.close(keep=True)
    for client in (leader, worker):
        client._receive()
        assert client.gone


def test_a_refusal_that_came_before_the_hello_is_still_heard(
    bench: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "peer_uid", lambda self: os.getuid() + 1)
    channel = Channel.connect(bench.path)
    bench.step()
    with pytest.raises(ManagerRefused, match="cannot be served"):
        channel.introduce(bench.worker_hello("b"), 5.0)
    channel.close()
