"""Blocks that a mover brings. Movers die, hang and bring wrong bytes: it costs the transport, or a hit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.clock import ManualClock
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.tier import PeerTier
from rigs.manager_probe import wait_for
from rigs.movers import PATIENT_S, ModelNetwork, model_mover, moves, needs_nixl, nixl_mover
from rigs.moving_pair import KEYS, Pair, right
from rigs.peers import (
    LAYOUT,
    LendingNode,
    Loads,
    content,
    keys_of,
    knows,
    open_tier,
    wait_until,
)

UNTOUCHED = [b"\xa5" * LAYOUT.slot_bytes] * 2
CHILD = Path(__file__).with_name("peer_child.py")


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
