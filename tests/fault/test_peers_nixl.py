"""Blocks that a mover brings. Movers die, hang and bring wrong bytes: it costs the transport, or a hit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.clock import ManualClock
from kvbm.tiers.contract import Completion
from kvbm.tiers.peers import landings, offer_pause
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.tier import PeerTier
from rigs.manager_probe import wait_for
from rigs.movers import PATIENT_S, ModelNetwork, model_mover, moves, needs_nixl, nixl_mover
from rigs.peers import (
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

    def __init__(self, make: Callable[[], Mover], **options: object) -> None:
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


def right(
    completion: Completion, targets: Targets, must_hit: bool = False, keys: Sequence[BlockKey] = KEYS
) -> None:
    """Whatever is a hit has the right bytes."""
    for index, end in enumerate(completion.blocks):
        assert end.outcome is Outcome.HIT or not must_hit, end
        if end.outcome is Outcome.HIT:
            assert targets.block(index) == content(keys[index])


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


def test_an_offer_that_is_not_used_is_withdrawn_and_another_one_made_later(
    network: ModelNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lender does not say that it has given up; its blocks come over the connection."""
    monkeypatch.setattr(offer_pause, "FIRST_S", 6.0)
    clock = ManualClock(100.0)
    pair = Pair(lambda: model_mover(network), clock=clock)
    try:
        reading = network.agents[-1]
        network.refuse = True
        for _ in range(landings.UNUSED_MAX // len(KEYS)):
            pair.all_hits()
        assert not reading.closed, "it may be a lender's mover that starts"
        clock.advance(landings.UNUSED_S)
        pair.all_hits()
        wait_until(lambda: reading.closed, "the reader's memory is let go")
        network.refuse = False
        pair.tier.tick()
        pair.all_hits()
        assert pair.moved == 0 and pair.peer()["transport"] == "tcp"
        clock.advance(6.0)
        pair.connected()
        pair.all_hits()
        assert pair.moved == len(KEYS) and pair.lender.server.counts["readers"] == 1
    finally:
        pair.close()


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


@needs_nixl
def test_a_lender_is_killed_in_mid_read(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_mover_ends_with_its_manager(tmp_path: Path, stopped: bool) -> None:
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
        if stopped:  # as if in a call that does not return
            os.kill(pid, signal.SIGSTOP)
        manager.kill()
    try:
        wait_until(lambda: not is_there(pid), "the mover has ended")
    finally:
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)


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
    right(*model.loads.load(KEYS[1:5]), must_hit=True, keys=KEYS[1:5])
    assert model.peer()["corrupt"] == 1, "the mover is not trusted any more on this connection"
    assert model.peer()["transport"] == "tcp"


def test_wrong_bytes_of_a_whole_ask_do_not_end_the_link(
    network: ModelNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were asked for before the first wrong one are lost; the others come, over TCP, on later connections
    too, until a pause is over; the next one is longer."""
    monkeypatch.setattr(offer_pause, "FIRST_S", 6.0)  # no connection is over by that
    clock = ManualClock(100.0)
    pair = Pair(lambda: model_mover(network), clock=clock)
    others = [keys_of(16, seed) for seed in range(3, 6)]
    lend = pair.lender
    try:
        for keys in others:
            lend.store(keys)
        wait_until(lambda: all(knows(pair.tier, keys) for keys in others))
        network.spoil = True
        completion, _ = pair.loads.load(KEYS)
        assert [end.corrupt for end in completion.blocks] == [True] * 16
        right(*pair.loads.load(others[0]), must_hit=True, keys=others[0])
        assert lend.server.counts["readers"] == 1, "the same connection"
        assert pair.moved == 16

        def loaded_over_tcp_alone(keys: Sequence[BlockKey]) -> None:
            pair.tier.tick()
            moved = pair.moved
            right(*pair.loads.load(keys), must_hit=True, keys=keys)
            assert pair.moved == moved

        (connection,) = lend.server._connections
        connection.stop()

        def on_another_connection() -> bool:
            if pair.peer()["trouble"]:
                clock.advance(0.05)  # it waits before it connects again
            return lend.server.counts["readers"] == 2 and knows(pair.tier, others[1])

        wait_until(on_another_connection)
        loaded_over_tcp_alone(others[1])
        clock.advance(6.0)
        pair.connected()
        completion, _ = pair.loads.load(others[2])
        assert [end.corrupt for end in completion.blocks] == [True] * 16
        clock.advance(11.0)
        loaded_over_tcp_alone(others[1])
    finally:
        pair.close()


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
