"""A disk whose operations hang: what a space and a manager do meanwhile."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvbm.block import SlotIndex, Tier
from kvbm.manager import assembly
from kvbm.manager.disk_health import SLOW_LOGGED_EACH_S, SLOW_S
from kvbm.manager.disk_openings import OPEN_S_MAX
from kvbm.manager.probes import LOOK_S, Probes
from kvbm.protocol import Ready, Status, StatusQuery, Welcome
from kvbm.tiers.disk.tier import open_disk_tier
from rigs import managers_thread
from rigs.gated_syscalls import GatedSyscalls
from rigs.manager import (
    DEADLINE_S,
    LAYOUT,
    NAMESPACE,
    ManagerBench,
    connect_operator,
    refusal,
    store,
    worker_hello,
)
from rigs.manager import KEYS as MANAGER_KEYS
from rigs.manager import OTHER as OTHER_NAMESPACE
from rigs.space import KEYS, ME, OTHER, Bench

MakeBench = Callable[..., ManagerBench]


def test_a_slow_disk_is_not_offered_and_host_hits_go_on(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:3])
    bench.store(OTHER[:2])
    bench.finish_all()
    bench.tier.busy_s = SLOW_S
    assert bench.space.lookup(ME, 1, KEYS[:3], 0) is None
    lease = bench.space.lookup(ME, 2, OTHER[:2], 0)
    assert lease is not None
    assert lease.ready == 2
    assert bench.space.tiers() == {"host": 8}
    bench.tier.busy_s = 0.0
    assert bench.space.tiers() == {"host": 8, "disk": 16}
    again = bench.space.lookup(ME, 3, KEYS[:3], 0)
    assert again is not None
    bench.finish_all()
    assert again.ready == 3


def test_nothing_is_written_to_a_slow_disk(bench: Bench) -> None:
    bench.tier.throttled = True
    bench.store(KEYS[:2])
    bench.tier.throttled, bench.tier.busy_s = False, SLOW_S
    bench.store(OTHER[:2])
    bench.space.pump()
    assert (bench.tier.pending_count, bench.space.disk.queued_count if bench.space.disk else 0) == (0, 2)
    assert bench.metrics.value("kvbm_skipped_offloads_total", reason="tier_off") == 2
    bench.tier.busy_s = 0.0
    bench.finish_all()
    assert {entry.key for entry in bench.medium.entries.values()} == set(KEYS[:2]), (
        "what was queued is written"
    )


def test_leases_do_not_wait_for_a_slow_disk_and_its_reads_are_used_when_they_end(
    make: Callable[..., Bench],
) -> None:
    bench = make(pending_limit=2)
    bench.only_on_disk(KEYS[:4])
    lease = bench.space.lookup(ME, 1, KEYS[:4], 0)
    assert lease is not None
    assert (lease.ready, lease.final, bench.tier.pending_count) == (0, False, 2)
    bench.tier.busy_s = SLOW_S
    bench.space.pump()
    assert (lease.ready, lease.final, bench.tier.pending_count) == (0, True, 2)
    assert bench.progress[-1] == (1, 0, True)
    assert bench.space.host_pool.counts().filling == 2, "the medium may still write there"
    bench.tier.busy_s = 0.0
    bench.finish_all()
    assert [bench.space.host_pool.find(key) is not None for key in KEYS[:4]] == [True, True, False, False]
    assert bench.space.host_pool.counts().leased == 0
    bench.space.check()


def test_a_slow_disk_is_logged_once_a_minute_with_its_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        bench.tier.busy_s = SLOW_S + 0.05
        bench.space.pump()
        bench.clock.advance(1.0)
        bench.space.pump()
        bench.tier.busy_s = 0.0
        bench.space.pump()
    slow = "disk tier is slow: an operation that has not ended has taken 0.8 s"
    assert [record.getMessage() for record in caplog.records] == [
        f"{slow}: its blocks are not offered until then, and none are written",
        "disk tier works again: it was slow for 1.8 s",
    ]
    bench.clock.advance(SLOW_LOGGED_EACH_S)
    bench.tier.busy_s = SLOW_S
    bench.space.pump()
    assert len(caplog.records) == 3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedSyscalls]:
    """The kernel of the disks of managers."""
    kernel = GatedSyscalls()
    opened = partial(assembly.open_disk_tier, syscalls=kernel)
    monkeypatch.setattr(assembly, "open_disk_tier", opened)
    yield kernel
    kernel.open_gate()


def test_a_filesystem_that_freezes_does_not_silence_the_manager(
    make_manager: MakeBench, kernel: GatedSyscalls, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Journal writes hang: they are due as the disk evicts. Host hits go on, and it is said that the disk is slow."""
    disk = tmp_path_factory.mktemp("disk")
    bench = make_manager(host_blocks=16, disk_blocks=4, disk_dir=str(disk), disk_admission="all")
    probes = Probes(bench.settings, bench.clock)
    leader, worker = bench.engine()
    side = bench.space().disk
    assert side is not None
    store(leader, worker, 1, MANAGER_KEYS[:4])
    bench.until(lambda: side.pool.counts().resident == 4)
    kernel.shut("pwritev", "journal")
    others = MANAGER_KEYS[100:104]
    store(leader, worker, 2, others)
    kernel.wait_entered()
    bench.tick(1.0)
    leader.take()
    assert leader.lookup(1, others).sources == bytes((Tier.HOST,)) * 4
    bench.clock.advance(LOOK_S)
    probes.turn_ended(bench.server.spaces)
    status, text = probes.ready()
    assert (status, "disk tier is slow" in text) == (503, True)
    admin = connect_operator(bench)
    admin.send(StatusQuery())
    assert "disk tier is slow" in str(admin.expect(Status).spaces[0]["fault"])
    kernel.open_gate()
    bench.until(lambda: not side.trouble)
    bench.clock.advance(LOOK_S)
    probes.turn_ended(bench.server.spaces)
    assert probes.ready().status == 200


@pytest.mark.parametrize("since_turn_s", [0.0, 0.2, 0.3, 0.49])
def test_an_idle_manager_says_within_a_second_that_its_disk_hangs(
    make_manager: MakeBench,
    kernel: GatedSyscalls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    since_turn_s: float,
) -> None:
    """The loop only waits, and the clock moves as it does. A call begins so long after it last looked."""
    bench = make_manager(host_blocks=16, disk_blocks=4, disk_dir=str(tmp_path / "disk"))
    probes, genuine = Probes(bench.settings, bench.clock), selectors.DefaultSelector.select

    def wait(selector: selectors.DefaultSelector, timeout: float) -> object:
        found = genuine(selector, 0)
        bench.clock.advance(0.0 if found else timeout)
        return found

    bench.engine()
    bench.tick()
    probes.turn_ended(bench.server.spaces)
    monkeypatch.setattr(selectors.DefaultSelector, "select", wait)
    side = bench.space().disk
    assert side is not None
    bench.clock.advance(since_turn_s)
    kernel.shut("pwritev", "journal")
    side.medium.forget(SlotIndex(0))
    kernel.wait_entered()
    begun_s = bench.clock()
    while "disk tier is slow" not in probes.ready().text or "disk tier is slow" not in caplog.text:
        with managers_thread.turn():
            bench.server.step()
        probes.turn_ended(bench.server.spaces)
        assert bench.clock() - begun_s < 1.0, "it has not been said"
    assert bench.space().tiers() == {"host": 16}


def test_a_disk_that_is_being_opened_keeps_nobody_else(
    make_manager: MakeBench, kernel: GatedSyscalls, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The second namespace's disk hangs while it is opened. Its engine does without after a while, until it is open."""
    disk = tmp_path_factory.mktemp("disk")
    bench = make_manager(namespaces=2, host_blocks=16, disk_blocks=8, disk_dir=str(disk))
    leader, worker = bench.engine()
    store(leader, worker, 1, MANAGER_KEYS[:4])
    kernel.shut("fallocate")
    late, asking = bench.leader("late"), bench.client()
    asking.send(worker_hello("late", namespace=OTHER_NAMESPACE))
    kernel.wait_entered()
    assert len(leader.lookup(1, MANAGER_KEYS[:4]).slots) == 4
    assert asking.take() == []
    bench.tick(OPEN_S_MAX)
    assert asking.expect(Welcome).tiers == {"host": 8}
    assert [message.tiers for message in late.take() if isinstance(message, Ready)] == [{"host": 8}]
    kernel.open_gate()
    bench.until(lambda: "disk" in bench.space(1).tiers())
    bench.tick()
    assert late.expect(Ready).tiers == {"host": 8, "disk": 4}


def test_a_disk_that_cannot_be_opened_is_said_to_its_engine(make_manager: MakeBench, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    bench = make_manager(disk_blocks=8, disk_dir=str(occupied / "x"))
    client = bench.client()
    client.send(worker_hello())
    assert f"DYN_KVBM_DISK_CACHE_DIR='{occupied}/x' cannot be used" in refusal(client)


def test_a_disk_that_was_opened_for_an_engine_that_has_gone_is_closed_at_the_end(
    make_manager: MakeBench, kernel: GatedSyscalls, tmp_path: Path
) -> None:
    bench = make_manager(disk_blocks=8, disk_dir=str(tmp_path / "disk"))
    kernel.shut("fallocate")
    client = bench.client()
    client.send(worker_hello())
    kernel.wait_entered()
    client.close()
    bench.step()
    kernel.open_gate()
    bench.until(lambda: not bench.server.sessions)
    bench.close()
    tier = open_disk_tier(tmp_path / "disk", LAYOUT, NAMESPACE, capacity_blocks=8)
    assert tier.path is not None
    assert tier.path.name.endswith("-0"), "nobody owns the first one any more"
    tier.close(keep=False)


def test_a_namespace_beyond_those_served_costs_no_other_its_disk(
    make_manager: MakeBench, kernel: GatedSyscalls, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It comes while the only one's disk is being opened again, and is refused before anything is opened for it."""
    disk = {"disk_blocks": 8, "disk_dir": str(tmp_path / "disk"), "disk_admission": "all"}
    before = make_manager(**disk)
    leader, worker = before.engine()
    store(leader, worker, 1, MANAGER_KEYS[:4])
    before.until(lambda: before.space().pools[1].counts().resident == 4)
    before.open = False
    before.server.close(keep=True)
    bench = ManagerBench(tmp_path_factory.mktemp("after"), **disk)
    kernel.shut("fallocate")
    first, second, third = bench.client(), bench.client(), bench.client()
    first.send(worker_hello())
    kernel.wait_entered()
    second.send(worker_hello("other", namespace=OTHER_NAMESPACE))
    assert "accepts 1 namespace(s)" in refusal(second)
    third.send(worker_hello("odd", layout=msgspec.structs.replace(LAYOUT, block_tokens=8)))
    assert "differs from this namespace's" in refusal(third)
    kernel.open_gate()
    first.expect(Welcome)
    assert bench.space().pools[1].counts().resident == 4
    assert len(list((tmp_path / "disk").iterdir())) == 1
    bench.close()


def test_the_end_of_an_ephemeral_namespace_waits_for_no_disk(
    make_manager: MakeBench, kernel: GatedSyscalls, tmp_path: Path
) -> None:
    """Its last engine goes while writes hang: others are answered, and its files go once the writes have ended."""
    disk = tmp_path / "disk"
    bench = make_manager(
        namespaces=2, host_blocks=16, disk_blocks=8, disk_dir=str(disk), disk_admission="all"
    )
    leader, worker = bench.engine()
    store(leader, worker, 1, MANAGER_KEYS[:4])
    passing = msgspec.structs.replace(OTHER_NAMESPACE, ephemeral=True)
    gone, rank = bench.engine("passing", namespace=passing)
    side = bench.space(1).disk
    assert side is not None
    kernel.shut("pwritev", "slab")
    store(gone, rank, 1, MANAGER_KEYS[100:104])
    kernel.wait_entered()
    gone.close()
    rank.close()
    bench.until(lambda: len(list(bench.server.spaces)) == 1)
    assert len(leader.lookup(1, MANAGER_KEYS[:4]).slots) == 4
    assert len(list(disk.iterdir())) == 2
    kernel.open_gate()
    control = side.medium._upkeep._thread._thread  # type: ignore[attr-defined]
    control.join(DEADLINE_S)
    assert len(list(disk.iterdir())) == 1
