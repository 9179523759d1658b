"""Blocks that a mover brings. Movers die, hang and bring wrong bytes: it costs the transport, or a hit."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.clock import ManualClock
from kvbm.hashing import split_keys
from kvbm.tiers.contract import Completion
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.tier import PeerTier
from kvbm.tiers.peers.wire import (
    NO_PLACE,
    WIRE_VERSION,
    Ask,
    Greeting,
    Offer,
    Welcome,
    framed,
    joined_places,
)
from rigs.lying_peer import LyingPeer, block, head
from rigs.manager_probe import wait_for
from rigs.movers import PATIENT_S, ModelNetwork, model_mover, moves, needs_nixl, nixl_mover
from rigs.peers import (
    FLEET,
    LAYOUT,
    LendingNode,
    Loads,
    Targets,
    content,
    keys_of,
    knows,
    open_tier,
    wait_until,
)

KEYS = keys_of(16)
UNTOUCHED = [b"\xa5" * LAYOUT.slot_bytes] * 2
CHILD = Path(__file__).with_name("peer_child.py")


class Pair:
    """A lender and a reader, each with a mover; the lender holds KEYS."""

    def __init__(self, make: Callable[[], Mover], **options: float) -> None:
        self.lends, self.reads = make(), make()
        self.lender = LendingNode(mover=self.lends)
        self.slots = self.lender.store(KEYS)
        self.tier = open_tier([self.lender.peer], mover=self.reads, **{"deadline_s": 60.0, **options})
        self.loads = Loads(self.tier)
        wait_until(lambda: knows(self.tier, KEYS))
        self.connected()

    def connected(self) -> None:
        wait_until(lambda: moves(self.lender, self.tier), "the lender knows the reader's memory")

    @property
    def moved(self) -> int:
        return self.lender.server.counts["moved"]

    def peer(self) -> dict[str, object]:
        (peer,) = self.tier.describe()["peers"]  # type: ignore[misc]
        return peer  # type: ignore[no-any-return]

    def all_hits(self) -> None:
        right(*self.loads.load(KEYS), must_hit=True)

    def close(self) -> None:
        self.tier.close()
        self.lender.close()
        self.lends.close()
        self.reads.close()


def right(completion: Completion, targets: Targets, must_hit: bool = False) -> None:
    """Whatever is a hit has the right bytes."""
    for index, end in enumerate(completion.blocks):
        assert end.outcome is Outcome.HIT or not must_hit, end
        if end.outcome is Outcome.HIT:
            assert targets.block(index) == content(KEYS[index])


@pytest.fixture
def network() -> ModelNetwork:
    return ModelNetwork()


@pytest.fixture
def model(network: ModelNetwork) -> Iterator[Pair]:
    pair = Pair(lambda: model_mover(network))
    yield pair
    pair.close()


@pytest.fixture(params=["model", pytest.param("nixl", marks=needs_nixl)])
def both(request: pytest.FixtureRequest, network: ModelNetwork) -> Iterator[Pair]:
    pair = Pair(lambda: model_mover(network) if request.param == "model" else nixl_mover())
    yield pair
    pair.close()


def test_a_load_comes_by_the_movers_and_says_so(both: Pair) -> None:
    both.all_hits()
    assert both.moved == len(KEYS)
    assert (both.peer()["transport"], both.peer()["moved"]) == ("nixl", len(KEYS))
    described = both.tier.describe()
    assert described["links"] == {"nixl": 1}
    assert described["notes"] == ("reads from 1 of 1 nodes by NIXL",)


# ---- movers that die


@pytest.mark.parametrize("which", ["lends", "reads"])
def test_a_mover_is_killed_in_mid_read(both: Pair, which: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is under way is a hit all the same, over the connection; with the next mover blocks go by NIXL again."""
    caplog.set_level(logging.WARNING, "kvbm.tiers")
    mover: Mover = getattr(both, which)
    starts = mover.starts
    begun = [both.loads.begin(KEYS) for _ in range(8)]
    both.loads.wait_any()
    assert mover.child is not None
    mover.child.kill()
    for job, targets in begun:
        right(both.loads.wait(job), targets, must_hit=True)
    both.all_hits()
    assert both.peer()["corrupt"] == 0
    wait_until(lambda: mover.running and mover.starts == starts + 1, "another mover")
    lines = [record.message for record in caplog.records if "they travel over TCP" in record.message]
    assert len(lines) == 1 and "its process ended" in lines[0]
    both.connected()
    moved = both.moved

    def by_the_mover_again() -> bool:
        both.tier.tick()
        both.all_hits()
        return both.moved > moved

    wait_until(by_the_mover_again)


@needs_nixl
@pytest.mark.parametrize("which", ["lends", "reads"])
def test_a_mover_that_hangs_costs_its_time_and_no_hit(which: str) -> None:
    """It is stopped, not killed: the lender waits for a while, and sends the bytes itself."""
    pair = Pair(lambda: nixl_mover(write_limit_s=0.5))
    mover: Mover = getattr(pair, which)
    pid: int = mover.child.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    try:
        pair.all_hits()
        assert pair.peer()["corrupt"] == 0
        pair.all_hits()
        assert pair.peer()["transport"] == "tcp"
    finally:
        os.kill(pid, signal.SIGCONT)
        pair.close()


def test_a_mover_that_does_not_end_a_write(model: Pair, network: ModelNetwork) -> None:
    model.lends.write_limit_s = 0.2
    network.hang = True
    model.all_hits()
    assert model.moved == 0 and model.peer()["transport"] == "tcp"
    network.hang = False
    model.all_hits()
    assert model.moved == 0, "this offer is spent"


def test_a_mover_that_writes_nothing(model: Pair, network: ModelNetwork) -> None:
    network.refuse = True
    model.all_hits()
    assert network.writes > 0 and model.moved == 0


def test_too_many_writes_that_do_not_end_end_the_mover(network: ModelNetwork) -> None:
    network.hang = True
    lends, reads = model_mover(network, 0.05), model_mover(network)
    lender = LendingNode(mover=lends)
    lender.store(KEYS)
    tiers: list[PeerTier] = []
    try:

        def another_start() -> bool:
            tier = open_tier([lender.peer], mover=reads, node=f"reader-{len(tiers)}", deadline_s=60.0)
            tiers.append(tier)
            wait_until(lambda: knows(tier, KEYS))
            loads = Loads(tier)
            wait_until(lambda: moves(lender, tier) or lends.starts > 1)
            right(*loads.load(KEYS), must_hit=True)
            tier.close()
            return lends.starts > 1

        wait_until(another_start, "the mover ends and another one starts")
    finally:
        for tier in tiers:
            tier.close()
        lender.close()
        lends.close()
        reads.close()


def test_a_lender_is_killed_in_mid_read(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed (pip install --no-deps nixl-cu12)")
    big = type(LAYOUT)(block_tokens=4, shard_bytes=4 << 20)
    keys = keys_of(8)
    told = tmp_path / "port"
    words = [sys.executable, str(CHILD), "127.0.0.1", "0", str(told), "nixl"]
    child = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    reads = nixl_mover()
    try:
        wait_for(told.exists, 60.0, lambda: "the child does not start")
        from kvbm.fleet.directory import Peer

        tier = open_tier(
            [Peer(f"127.0.0.1:{told.read_text()}")], layout=big, mover=reads, deadline_s=PATIENT_S
        )
        loads = Loads(tier, big)
        try:
            wait_until(lambda: knows(tier, keys), "the child's blocks")

            def by_nixl() -> bool:
                tier.tick()
                assert loads.load(keys)[0].outcome is Outcome.HIT
                return tier.describe()["links"] == {"nixl": 1}

            wait_until(by_nixl)
            begun = [loads.begin(keys) for _ in range(8)]
            loads.wait_any()
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            for job, targets in begun:
                completion = loads.wait(job)
                for index, end in enumerate(completion.blocks):
                    assert end.outcome is not Outcome.MISS
                    if end.outcome is Outcome.HIT:
                        assert targets.block(index) == content(keys[index], big)
            wait_until(lambda: not any(tier.held_elsewhere(keys)))
            assert reads.running, "the reader's mover bears it"
        finally:
            tier.close()
    finally:
        child.kill()
        child.wait()
        reads.close()


@needs_nixl
def test_a_mover_ends_with_its_manager(tmp_path: Path) -> None:
    program = (
        "import sys, time; from kvbm.tiers.peers.mover import Mover\n"
        "if __name__ == '__main__':\n"
        "    mover = Mover()\n"
        "    while not mover.running: time.sleep(0.01)\n"
        "    print(mover.child.pid, flush=True); time.sleep(600)\n"
    )
    script = tmp_path / "manager.py"
    script.write_text(program)
    words = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None
        pid = int(manager.stdout.readline())
        assert is_there(pid)
        manager.kill()
    wait_until(lambda: not is_there(pid), "the mover has ended")


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---- bytes and blocks that are not what was asked for


def test_wrong_bytes_in_the_readers_memory_are_a_counted_miss(model: Pair, network: ModelNetwork) -> None:
    network.spoil = True
    completion, _ = model.loads.load(KEYS[:1])
    assert completion.outcome is Outcome.MISS and completion.corrupt
    assert model.peer()["corrupt"] == 1
    assert not knows(model.tier, KEYS[:1]), "it is not asked for again"


@needs_nixl
def test_wrong_bytes_under_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mover is given to write is no more what the checksum was made of."""
    pair = Pair(nixl_mover)
    try:
        from kvbm.manager.peer_moving import Moving

        write = Moving._write

        def spoiled(self: Moving, puts: list) -> None:
            for put in puts:
                self._staging.view(put.place, 8)[:] = b"otherone"  # type: ignore[union-attr]
            write(self, puts)

        monkeypatch.setattr(Moving, "_write", spoiled)
        completion, _ = pair.loads.load(KEYS[:2])
        assert [end.corrupt for end in completion.blocks] == [True, True]
        assert completion.outcome is Outcome.MISS
    finally:
        pair.close()


def test_a_slot_that_changed_hands_is_a_miss(both: Pair) -> None:
    (account,) = both.lender.lending._accounts.values()
    post = account.reader.post

    def spoiled(message) -> None:
        both.lender.arena.invalidate(both.slots[1])  # after the lease was given out
        post(message)

    account.reader.post = spoiled  # type: ignore[method-assign]
    completion, targets = both.loads.load(KEYS[:3])
    assert [end.outcome for end in completion.blocks] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert not completion.corrupt and targets.block(1) == UNTOUCHED
    assert both.lender.server.counts["broken"] == 1


def test_what_the_lender_does_not_hold_is_a_miss(both: Pair) -> None:
    missing = keys_of(1, seed=7)
    completion, _ = both.loads.load([KEYS[0], *missing, KEYS[2]])
    assert [end.outcome for end in completion.blocks] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert both.moved == 2


# ---- time


def test_nothing_touches_the_targets_after_a_deadline(network: ModelNetwork) -> None:
    """The mover still writes into the memory that was offered; no thread of the reader looks at it any more."""
    clock = ManualClock(100.0)
    lends, reads = model_mover(network), model_mover(network)
    lender = LendingNode(mover=lends)
    lender.store(KEYS)
    tier = open_tier([lender.peer], mover=reads, clock=clock, deadline_s=2.0)
    loads = Loads(tier)
    try:
        wait_until(lambda: knows(tier, KEYS))
        wait_until(lambda: moves(lender, tier))
        network.hang = True
        job, targets = loads.begin(KEYS[:2])
        wait_until(lambda: network.writes)
        clock.advance(2.1)
        tier.tick()
        completion = loads.wait(job)
        assert completion.outcome is Outcome.RETRY and "longer than 2 s" in completion.error
        network.hang = False
        wait_until(lambda: lender.lending.reader_count == 0 and lender.leased() == 0)
        assert targets.block(0) == targets.block(1) == UNTOUCHED
    finally:
        tier.close()
        lender.close()
        lends.close()
        reads.close()


# ---- ends that differ


@pytest.mark.parametrize("has", ["lender", "reader"])
def test_one_end_without_a_mover(network: ModelNetwork, has: str) -> None:
    mover = model_mover(network)
    lender = LendingNode(mover=mover if has == "lender" else None)
    lender.store(KEYS)
    tier = open_tier([lender.peer], mover=mover if has == "reader" else None)
    try:
        wait_until(lambda: knows(tier, KEYS))
        tier.tick()
        right(*Loads(tier).load(KEYS), must_hit=True)
        assert tier.describe()["links"] == {"tcp": 1}
        assert network.writes == 0
    finally:
        tier.close()
        lender.close()
        mover.close()


def test_blocks_without_a_place_come_over_the_connection(network: ModelNetwork) -> None:
    lends, reads = model_mover(network), model_mover(network)
    lender = LendingNode(mover=lends)
    lender.store(KEYS)
    five = 5 * LAYOUT.block_bytes
    tier = open_tier([lender.peer], mover=reads, deadline_s=60.0, staging_bytes=five)
    loads = Loads(tier)
    try:
        wait_until(lambda: knows(tier, KEYS))
        wait_until(lambda: moves(lender, tier))
        begun = [loads.begin(KEYS) for _ in range(6)]
        for job, targets in begun:
            right(loads.wait(job), targets, must_hit=True)
        assert lender.server.counts["moved"] == 6 * 5
        assert lender.server.counts["blocks"] == 6 * len(KEYS)
    finally:
        tier.close()
        lender.close()
        lends.close()
        reads.close()


def test_a_machine_without_a_network_reads_over_tcp(network: ModelNetwork) -> None:
    network.broken = True
    mover = model_mover(network)
    lender = LendingNode(mover=mover)
    lender.store(KEYS)
    tier = open_tier([lender.peer], mover=mover)
    try:
        wait_until(lambda: knows(tier, KEYS))
        right(*Loads(tier).load(KEYS), must_hit=True)
        assert tier.describe()["notes"] == ("reads over TCP: NIXL: no network here",)
    finally:
        tier.close()
        lender.close()
        mover.close()


# ---- ends that lie


def moving_welcome() -> bytes:
    return framed(Welcome(version=WIRE_VERSION, fleet=FLEET, node="liar", moves=True))


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda ask: framed(head(ask, 0, moved=True)), "no place named for it"),
        (lambda ask: framed(head(ask, 0, moved=True, size=1 << 40)), "was moved"),
    ],
)
def test_a_lender_that_moved_what_it_could_not(answer: Callable[[Ask], bytes], named: str) -> None:
    """The reader has no mover: it offered nothing."""
    liar = LyingPeer(KEYS, lambda peer, connection, ask: connection.sendall(answer(ask)), moving_welcome())
    tier = open_tier([liar.peer])
    try:
        wait_until(lambda: knows(tier, KEYS))
        completion, targets = Loads(tier).load(KEYS[:1])
        assert completion.outcome is Outcome.RETRY and named in completion.error
        assert targets.block(0) == UNTOUCHED
    finally:
        tier.close()
        liar.close()


def test_a_lender_that_says_moved_and_moves_nothing(network: ModelNetwork) -> None:
    """It knows the right checksum; the bytes never came."""

    def claims(peer: LyingPeer, connection: socket.socket, ask: Ask) -> None:
        if not ask.places:
            connection.sendall(b"".join(block(ask, i) for i in range(len(split_keys(ask.keys)))))
            return
        whole = block(ask, 0)
        connection.sendall(framed(head(ask, 0, moved=True)) + whole[-17:])

    liar = LyingPeer(KEYS, claims, moving_welcome())
    mover = model_mover(network)
    tier = open_tier([liar.peer], mover=mover, deadline_s=60.0)
    loads = Loads(tier)
    try:
        wait_until(lambda: knows(tier, KEYS))
        tier.tick()
        wait_until(lambda: liar.offers)
        completion, _ = loads.load(KEYS[:1])
        assert liar.asks[-1].places, "it named a place"
        assert completion.outcome is Outcome.MISS and completion.corrupt
    finally:
        tier.close()
        liar.close()
        mover.close()


def offer(**changed: object) -> Offer:
    return Offer(
        **{  # type: ignore[arg-type]
            "number": 1,
            "metadata": b'["nobody", [0, 1]]',
            "address": 0,
            "place_bytes": LAYOUT.block_bytes,
            "places": 4,
            **changed,
        }
    )


def ask(places: bytes) -> Ask:
    return Ask(number=1, keys=b"".join(KEYS[:2]), offer=1, places=places)


@pytest.mark.parametrize(
    ("has_mover", "says", "named"),
    [
        (False, [offer()], "there is no mover here"),
        (True, [offer(), ask(joined_places((0, 4)))], "place 4 of 4"),
        (True, [offer(), ask(joined_places((0,)))], "4 bytes of places for 2 keys"),
    ],
)
def test_a_reader_that_offers_nonsense_is_sent_away(
    network: ModelNetwork, has_mover: bool, says: list, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvbm.manager")
    mover = model_mover(network) if has_mover else None
    lender = LendingNode(mover=mover)
    lender.store(KEYS)
    try:
        with greeted(lender) as reader:
            for message in says:
                reader.sendall(framed(message))
            wait_until(lambda: any(named in record.message for record in caplog.records), named)
        assert network.writes == 0
    finally:
        lender.close()
        if mover is not None:
            mover.close()


@pytest.mark.parametrize(
    "useless",
    [
        offer(place_bytes=LAYOUT.block_bytes - 1),
        offer(metadata=b"no metadata"),
        offer(number=2),
    ],
    ids=["places too small", "metadata of nobody", "another offer than is asked for"],
)
def test_an_offer_of_no_use_leaves_blocks_to_the_connection(network: ModelNetwork, useless: Offer) -> None:
    mover = model_mover(network)
    lender = LendingNode(mover=mover)
    lender.store(KEYS)
    try:
        with greeted(lender) as reader:
            reader.sendall(framed(useless) + framed(ask(joined_places((0, NO_PLACE)))))
            wait_until(lambda: lender.server.counts["blocks"] == 2)
            assert lender.server.counts["moved"] == network.writes == 0
    finally:
        lender.close()
        mover.close()


def greeted(lender: LendingNode) -> socket.socket:
    reader = socket.create_connection(("127.0.0.1", lender.server.port))
    greeting = Greeting(
        version=WIRE_VERSION,
        fleet=FLEET,
        node="odd",
        fingerprint=lender.namespace.fingerprint,
        slot_bytes=LAYOUT.slot_bytes,
        shard_count=LAYOUT.shard_count,
        known_max=100,
    )
    reader.sendall(framed(greeting))
    wait_until(lambda: lender.lending.reader_count == 1)
    wait_until(lambda: lender.server.counts["readers"] == 1)
    return reader
