"""Peers that lie, hang, die or are not who they should be: each costs its hits, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.clock import ManualClock
from kvbm.manager.lending import LendOptions
from kvbm.tiers.peers.wire import WIRE_VERSION, Held, Refusal, Welcome, framed
from kvbm.tiers.remote.contract import NOWHERE
from rigs.lying_peer import BROKEN, LyingPeer, block, head, honest, silent
from rigs.manager_probe import wait_for
from rigs.peers import (
    FLEET,
    LAYOUT,
    OTHER_NAMESPACE,
    LendingNode,
    Loads,
    content,
    keys_of,
    knows,
    open_tier,
    wait_until,
)

KEYS = keys_of(8)
OTHER = keys_of(8, seed=3)
CHILD = Path(__file__).with_name("peer_child.py")


def trouble(tier) -> str:
    (peer,) = tier.describe()["peers"]
    return peer["trouble"]


def has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1 << 20)
    except ConnectionError:
        return True


def cannot_send(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except OSError:
        return True
    return False


def lies(peer: LyingPeer, connection: socket.socket, ask) -> None:
    connection.sendall(block(ask, 0, flip=True))


def another_block(peer: LyingPeer, connection: socket.socket, ask) -> None:
    connection.sendall(block(ask, 0, shown=OTHER[0]))


def broken(peer: LyingPeer, connection: socket.socket, ask) -> None:
    connection.sendall(block(ask, 0, verdict=BROKEN))


@pytest.mark.parametrize(("answer", "corrupt"), [(lies, True), (another_block, True), (broken, False)])
def test_wrong_bytes_are_a_miss(answer: Callable[..., None], corrupt: bool) -> None:
    liar = LyingPeer(KEYS, answer)
    tier = open_tier([liar.peer])
    try:
        wait_until(lambda: knows(tier, KEYS))
        completion, _ = Loads(tier).load(KEYS[:1])
        assert completion.outcome is Outcome.MISS
        assert completion.corrupt is corrupt
        assert tier.places(KEYS[:1]) == [NOWHERE], "it is not asked for again"
        assert knows(tier, KEYS[1:])
    finally:
        tier.close()
        liar.close()


def test_a_peer_that_keeps_lying_is_left_alone() -> None:
    liar = LyingPeer(KEYS, lies)
    tier = open_tier([liar.peer])
    try:
        wait_until(lambda: knows(tier, KEYS))
        loads = Loads(tier)
        for key in KEYS[:3]:
            assert loads.load([key])[0].corrupt
        wait_until(lambda: "wrong bytes" in trouble(tier))
        assert not any(tier.held_elsewhere(KEYS))
    finally:
        tier.close()
        liar.close()


WRONG_FRAMES = {
    "another size": lambda ask: framed(head(ask, 0, size=LAYOUT.block_bytes + 4096)),
    "an index beyond the ask": lambda ask: framed(head(ask, 7)),
    "an ask that was not made": lambda ask: framed(head(ask, 0, ask=ask.number + 1)),
    "a block twice": lambda ask: block(ask, 0) * 2,
    "no message": lambda ask: (9).to_bytes(4, "little") + b"\xc1" * 9,
    "a frame over the bound": lambda ask: (1 << 30).to_bytes(4, "little"),
    "prints that are cut off": lambda ask: framed(Held(came=b"12345")),
    "a second welcome": lambda ask: framed(Welcome(version=WIRE_VERSION, fleet=FLEET, node="liar")),
}


@pytest.mark.parametrize("wrong", WRONG_FRAMES)
def test_nonsense_ends_the_connection_and_touches_no_target(wrong: str) -> None:
    liar = LyingPeer(KEYS, lambda peer, connection, ask: connection.sendall(WRONG_FRAMES[wrong](ask)))
    tier = open_tier([liar.peer])
    try:
        wait_until(lambda: knows(tier, KEYS))
        completion, targets = Loads(tier).load(KEYS[:2])
        assert completion.outcome is Outcome.RETRY or wrong == "a block twice"
        assert completion.blocks[1].outcome is Outcome.RETRY
        assert targets.block(1) == [b"\xa5" * LAYOUT.slot_bytes] * 2
        assert "peer" in completion.error
        wait_until(lambda: trouble(tier))
        assert not any(tier.held_elsewhere(KEYS[2:])) or liar.connections > 1
    finally:
        tier.close()
        liar.close()


def test_a_silent_peer_costs_a_load_its_deadline_and_others_nothing() -> None:
    clock = ManualClock(100.0)
    hung, good = LyingPeer(KEYS, silent), LyingPeer(OTHER, honest)
    tier = open_tier([hung.peer, good.peer], clock=clock)
    try:
        wait_until(lambda: knows(tier, [*KEYS, *OTHER]))
        loads = Loads(tier)
        job, _ = loads.begin(KEYS[:2])
        wait_until(lambda: hung.asks)
        other, _ = loads.load(OTHER[:2])
        assert other.outcome is Outcome.HIT
        assert job not in loads.ended
        clock.advance(1.99)
        tier.tick()
        assert loads.load(OTHER[2:4])[0].outcome is Outcome.HIT
        assert job not in loads.ended, "before its deadline"
        clock.advance(0.02)
        tier.tick()
        completion = loads.wait(job)
        assert completion.outcome is Outcome.RETRY and "longer than 2 s" in completion.error
        assert not completion.still_in_use
        assert not any(tier.held_elsewhere(KEYS)), "nobody asks it again"
        assert knows(tier, OTHER)
    finally:
        tier.close()
        hung.close()
        good.close()


def test_nothing_touches_the_targets_after_the_completion() -> None:
    clock = ManualClock(100.0)
    sent: list[socket.socket] = []

    def half(peer: LyingPeer, connection: socket.socket, ask) -> None:
        whole = block(ask, 0)
        connection.sendall(whole[: len(whole) // 2])
        sent.append(connection)
        rest.append(whole[len(whole) // 2 :])

    rest: list[bytes] = []
    slow = LyingPeer(KEYS, half)
    tier = open_tier([slow.peer], clock=clock)
    try:
        wait_until(lambda: knows(tier, KEYS))
        loads = Loads(tier)
        job, targets = loads.begin(KEYS[:1])
        wait_until(lambda: any(view[0] != 0xA5 for view in targets.blocks[0]))
        clock.advance(2.5)
        tier.tick()
        assert loads.wait(job).outcome is Outcome.RETRY
        for view in targets.blocks[0]:
            view[:] = b"\x17" * len(view)
        wait_until(lambda: cannot_send(sent[0], rest[0]))
        assert targets.block(0) == [b"\x17" * LAYOUT.slot_bytes] * 2
    finally:
        tier.close()
        slow.close()


def test_it_comes_back_by_itself_and_waits_longer_each_time() -> None:
    clock = ManualClock(100.0)
    hung = LyingPeer(KEYS, silent)
    tier = open_tier([hung.peer], clock=clock)
    loads = Loads(tier)
    try:
        waits = [0.25, 0.5, 1.0]  # half of 0.5, 1, 2: the test's random number is 0
        for count, wait_s in enumerate(waits, 1):
            wait_until(lambda: knows(tier, KEYS))
            assert hung.connections == count
            job, _ = loads.begin(KEYS[:1])
            wait_until(lambda: len(hung.asks) == count)  # noqa: B023
            clock.advance(2.1)
            tier.tick()
            assert loads.wait(job).outcome is Outcome.RETRY
            wait_until(lambda: trouble(tier))
            clock.advance(wait_s - 0.01)
            tier.tick()
            assert tier.places(KEYS)[0] == NOWHERE and hung.connections == count
            clock.advance(0.02)
            tier.tick()
        hung.answer = honest
        wait_until(lambda: knows(tier, KEYS))
        assert loads.load(KEYS[:1])[0].outcome is Outcome.HIT
    finally:
        tier.close()
        hung.close()


@pytest.mark.parametrize(
    ("welcome", "named"),
    [
        (framed(Welcome(version=WIRE_VERSION + 1, fleet=FLEET, node="liar")), f"version {WIRE_VERSION + 1}"),
        (framed(Welcome(version=WIRE_VERSION, fleet="other", node="liar")), "fleet 'other'"),
        (framed(Refusal(line="no room\nhere")), "no room here"),
        (framed(Held()), "before Welcome"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame"),
    ],
)
def test_who_is_not_of_us_is_named_and_not_asked(welcome: bytes, named: str) -> None:
    liar = LyingPeer(KEYS, honest, welcome)
    tier = open_tier([liar.peer])
    try:
        wait_until(lambda: named in trouble(tier))
        assert not any(tier.held_elsewhere(KEYS))
    finally:
        tier.close()
        liar.close()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fleet": "other"}, "fleet 'test-fleet', not of 'other'"),
        ({"namespace": OTHER_NAMESPACE}, f"namespace {OTHER_NAMESPACE.short} is not served here"),
        ({"layout": type(LAYOUT)(block_tokens=4, shard_bytes=4096)}, "parts of 8192 bytes here"),
    ],
)
def test_a_lender_refuses_by_name(changed: dict, named: str) -> None:
    lender = LendingNode()
    lender.store(KEYS)
    tier = open_tier([lender.peer], **changed)
    try:
        wait_until(lambda: named in trouble(tier), f"{named} in {trouble(tier)}")
        assert lender.lending.reader_count == 0
    finally:
        tier.close()
        lender.close()


def test_a_node_does_not_read_from_itself() -> None:
    lender = LendingNode(node="same")
    lender.store(KEYS)
    tier = open_tier([lender.peer._replace(node="")], node="same")
    try:
        wait_until(lambda: "this node itself" in trouble(tier))
        assert not any(tier.held_elsewhere(KEYS))
    finally:
        tier.close()
        lender.close()


def test_a_slow_reader_keeps_no_lease_beyond_its_deadline() -> None:
    """It takes no bytes: the lease ends by the loop's clock, and the connection too."""
    clock = ManualClock(100.0)
    large = type(LAYOUT)(block_tokens=4, shard_bytes=8 << 20)
    lender = LendingNode(layout=large, slots=8, clock=clock)
    try:
        lender.store(KEYS[:2])
        with socket.create_connection(("127.0.0.1", lender.server.port)) as reader:
            from kvbm.tiers.peers.wire import Ask, Greeting

            greeting = Greeting(
                version=WIRE_VERSION,
                fleet=FLEET,
                node="slow",
                fingerprint=lender.namespace.fingerprint,
                slot_bytes=large.slot_bytes,
                shard_count=1,
                known_max=100,
            )
            reader.sendall(framed(greeting))
            wait_until(lambda: lender.lending.reader_count == 1)
            wait_until(lambda: reader.recv(1))  # it was welcomed
            reader.sendall(framed(Ask(number=1, keys=b"".join(KEYS[:2]))))
            wait_until(lambda: lender.leased() == 2)
            clock.advance(LendOptions().lease_s + 0.1)
            wait_until(lambda: lender.leased() == 0)
            # Its thread sees its own deadline as soon as the socket moves.
            reader.settimeout(10.0)
            wait_until(lambda: has_ended(reader))
            wait_until(lambda: lender.lending.reader_count == 0)
    finally:
        lender.close()


def test_a_slot_that_changed_hands_while_it_was_sent_is_no_hit() -> None:
    lender = LendingNode()
    (slot,) = lender.store(KEYS[:1])
    tier = open_tier([lender.peer])
    try:
        wait_until(lambda: knows(tier, KEYS[:1]))
        posted = lender.lending._accounts
        (account,) = posted.values()
        post = account.reader.post

        def spoiled(message) -> None:
            lender.arena.invalidate(slot)  # after the lease was given out, before a byte was sent
            post(message)

        account.reader.post = spoiled  # type: ignore[method-assign]
        completion, _ = Loads(tier).load(KEYS[:1])
        assert completion.outcome is Outcome.MISS and not completion.corrupt
        assert lender.server.counts["broken"] == 1
    finally:
        tier.close()
        lender.close()


def test_a_lender_killed_in_mid_read(tmp_path: Path) -> None:
    """Real processes: the lender dies by SIGKILL while it sends; later another one comes at the same address."""
    child, port = start_child(tmp_path)
    tier = open_tier([peer_at(port)], layout=BIG)
    loads = Loads(tier, BIG)
    try:
        wait_until(lambda: knows(tier, KEYS), "the child's blocks")
        begun = [loads.begin(KEYS) for _ in range(8)]
        loads.wait_any()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        for job, targets in begun:
            completion = loads.wait(job)
            for index, end in enumerate(completion.blocks):
                assert end.outcome is not Outcome.MISS
                if end.outcome is Outcome.HIT:
                    assert targets.block(index) == content(KEYS[index], BIG)
        wait_until(lambda: not any(tier.held_elsewhere(KEYS)))
        child, _ = start_child(tmp_path, port)
        wait_until(lambda: knows(tier, KEYS), "it comes back by itself")
        assert loads.load(KEYS)[0].outcome is Outcome.HIT
    finally:
        tier.close()
        child.kill()
        child.wait()


BIG = type(LAYOUT)(block_tokens=4, shard_bytes=4 << 20)


def peer_at(port: int):
    from kvbm.fleet.directory import Peer

    return Peer(f"127.0.0.1:{port}")


def start_child(tmp_path: Path, port: int = 0, prefix: tuple[str, ...] = (), host: str = "127.0.0.1"):
    told = tmp_path / f"port-{port}-{len(list(tmp_path.iterdir()))}"
    words = [*prefix, sys.executable, str(CHILD), host, str(port), str(told)]
    child = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    wait_for(lambda: told.exists() and told.read_text().strip(), 30.0, lambda: "the child does not start")
    return child, int(told.read_text())
