"""What a manager makes of its settings when an engine comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbm.manager.assembly import STAGING_BLOCKS_MIN
from kvbm.protocol import Commit
from kvbm.testing.fake_tier import FakeTier
from kvbm.tiers.disk_directory import claim_directory
from kvbm.tiers.disk_syscalls import Syscalls
from unit.manager_bench import KEYS, LAYOUT, NAMESPACE, OTHER, ManagerBench, refusal, store

MakeBench = Callable[..., ManagerBench]
SMALLEST = STAGING_BLOCKS_MIN * LAYOUT.block_bytes
EPHEMERAL = msgspec.structs.replace(OTHER, ephemeral=True)


# ---- staging


def test_staging_is_as_large_as_it_is_set_whatever_a_request_may_need(
    make_manager: MakeBench, below: FakeTier
) -> None:
    manager = make_manager(host_blocks=None, disk_blocks=40, staging_bytes=SMALLEST + 4095)
    leader, worker = manager.engine(request_blocks=1000)
    assert worker.welcome.slot_count == STAGING_BLOCKS_MIN
    for start in (0, 4, 8):
        parent = KEYS[start - 1] if start else b""
        slots = leader.reserve(start, KEYS[start : start + 4], parent)
        assert min(slots) >= 0
        leader.send(Commit(store=start))
        below.release()
        manager.step()
    found = leader.lookup(99, KEYS[:12])
    assert len(found.slots) == STAGING_BLOCKS_MIN, "the run ends where the room does"
    below.release()
    manager.step()
    (lease,) = manager.space().leases
    assert lease.ready == STAGING_BLOCKS_MIN


def test_staging_that_is_too_small_is_refused(make_manager: MakeBench, below: FakeTier) -> None:
    for namespaces, size in ((1, SMALLEST - 1), (2, 2 * SMALLEST - 1)):
        manager = make_manager(namespaces, host_blocks=None, disk_blocks=40, staging_bytes=size)
        client = manager.client()
        client.send(manager.worker_hello())
        reason = refusal(client)
        assert f"DYN_KVBM_DISK_STAGING_GB='{size / 1e9:g}'" in reason
        assert f"at least {namespaces * SMALLEST / 1e9:.9f} GB" in reason


# ---- memory


def test_a_host_tier_beyond_the_containers_limit_is_refused(
    make_manager: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.manager.assembly.container_limit_bytes", lambda: 16 * 4096 - 1)
    manager = make_manager(host_blocks=16)
    client = manager.client()
    client.send(manager.worker_hello())
    reason = refusal(client)
    assert "this container may use" in reason
    assert reason.startswith("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=")


def test_what_all_namespaces_may_take_together_counts(
    make_manager: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone would fit; the last to come would end them all."""
    monkeypatch.setattr("kvbm.manager.assembly.container_limit_bytes", lambda: 16 * 4096 - 1)
    client = make_manager(4, host_blocks=16).client()
    client.send(client.bench.worker_hello())
    assert "this container may use" in refusal(client)


# ---- namespaces that nobody can name again


def test_an_ephemeral_namespace_leaves_nothing_on_disk(make_manager: MakeBench, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    manager = make_manager(2, disk_blocks=32, disk_dir=str(disk), disk_offload_filter=False)
    for name, namespace in (("lasting", NAMESPACE), ("passing", EPHEMERAL)):
        leader, worker = manager.engine(name, namespace=namespace)
        store(leader, worker, 1, KEYS[:2])
    assert len(os.listdir(disk)) == 2
    manager.open = False
    manager.server.close(keep=True)
    assert [NAMESPACE.short in name for name in os.listdir(disk)] == [True]


def test_what_an_ephemeral_namespace_left_behind_in_a_crash_is_removed(
    make_manager: MakeBench, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    settings = {"disk_blocks": 4, "disk_dir": str(disk)}
    make_manager(**settings).worker(namespace=EPHEMERAL)
    (owned,) = disk.iterdir()
    crashed = claim_directory(disk, EPHEMERAL, Syscalls())
    (crashed.path / "meta.json").write_bytes((owned / "meta.json").read_bytes())
    crashed.release(remove=False)
    make_manager(**settings).worker(namespace=NAMESPACE)
    assert not crashed.path.exists()
    assert owned.exists(), "its owner lives"


def test_an_ephemeral_namespace_gives_its_place_back_with_its_last_engine(
    make_manager: MakeBench, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    manager = make_manager(1, disk_blocks=32, disk_dir=str(disk), disk_offload_filter=False)
    first = manager.engine("first", namespace=EPHEMERAL)
    second = manager.engine("second", namespace=EPHEMERAL)
    store(*first, 1, KEYS[:2])
    client = manager.client()
    client.send(manager.worker_hello("third"))
    assert "cannot be served" in refusal(client)
    for session in first:
        session.channel.close()
    manager.step()
    assert len(second[0].lookup(1, KEYS[:2]).slots) == 2, "the other engine keeps it"
    for session in second:
        session.channel.close()
    manager.step()
    assert (list(manager.server.spaces), list(disk.iterdir())) == ([], [])
    store(*manager.engine("third"), 1, KEYS[:2])
    assert manager.space().host.counts().resident == 2


def test_a_namespace_that_lasts_keeps_its_place(make_manager: MakeBench) -> None:
    manager = make_manager(1)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    for session in (leader, worker):
        session.channel.close()
    manager.step()
    assert manager.space().host.counts().resident == 2
