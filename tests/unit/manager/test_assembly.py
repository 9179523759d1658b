"""The tiers that a manager makes of its settings when an engine comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbm.errors import SettingsError
from kvbm.layout import BlockLayout
from kvbm.manager.assembly import STAGING_BLOCKS_MIN
from kvbm.policy.admission.filter import AdmitAll
from kvbm.policy.admission.ghost import GhostAdmission
from kvbm.policy.admission.write_budget import WriteBudget
from kvbm.protocol import Commit, Ready
from kvbm.tiers.disk.directory import claim_directory
from kvbm.tiers.disk.directory_meta import read_meta
from kvbm.tiers.disk.syscalls import Syscalls
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER, ManagerBench, refusal, store

MakeBench = Callable[..., ManagerBench]
SIZE = LAYOUT.block_bytes
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


# ---- a host tier below one request


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "one request may need" in r.getMessage()]


def test_a_host_tier_below_one_request_warns_once_and_serves(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(2, host_blocks=16)
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    for rank in (0, 1):
        manager.worker("e", rank=rank, rank_count=2, shard=rank, layout=layout, request_blocks=9)
    leader = manager.leader("e")
    (line,) = warnings_in(caplog)
    assert "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=16 gives 8 blocks and one request may need 9 " in line
    assert "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=18 " in line
    assert leader.expect(Ready).tiers == {"host": 8}
    slots = leader.reserve(1, KEYS[:9])
    assert [slot >= 0 for slot in slots] == [True] * 8 + [False]
    leader.send(Commit(store=1))
    assert leader.lookup(2, KEYS[:9]).ready == 8
    manager.worker("smaller", rank_count=2, layout=layout, request_blocks=9)
    assert len(warnings_in(caplog)) == 1
    manager.worker("larger", rank_count=2, layout=layout, request_blocks=10)
    assert len(warnings_in(caplog)) == 2


def test_a_host_tier_that_holds_the_largest_request_draws_no_warning(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    make_manager(host_blocks=16).engine(request_blocks=16)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("disk_blocks", "lines"), [(127, 0), (128, 1)])
def test_a_filter_that_leaves_a_large_disk_empty_is_told_at_the_start(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture, tmp_path: Path, disk_blocks: int, lines: int
) -> None:
    manager = make_manager(host_blocks=16, disk_blocks=disk_blocks, disk_dir=str(tmp_path / "disk"))
    manager.engine()
    manager.engine("another")
    said = [r.getMessage() for r in caplog.records if "with the policy `filter`" in r.getMessage()]
    assert len(said) == lines
    assert all("DYN_KVBM_DISK_ADMISSION=all, ghost and filter" in line for line in said)


def test_a_host_tier_of_which_a_namespace_would_get_nothing_is_refused(make_manager: MakeBench) -> None:
    client = make_manager(3, host_blocks=2).client()
    client.send(client.bench.worker_hello())
    reason = refusal(client)
    assert reason.startswith("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=2 cannot be used: at least one block")
    assert reason.endswith("for each of 3 namespaces")


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"disk_blocks": 2}, "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=2 cannot be used: 1 to "),
        (
            {"disk_bytes": 2 * SIZE},
            f"DYN_KVBM_DISK_CACHE_GB='{2 * SIZE / 1e9:g}' cannot be used: at least 0.",
        ),
    ],
)
def test_a_disk_tier_of_which_a_namespace_would_get_nothing_is_refused(
    make_manager: MakeBench, options: dict[str, int], start: str
) -> None:
    client = make_manager(3, **options).client()
    client.send(client.bench.worker_hello())
    reason = refusal(client)
    assert reason.startswith(start)
    assert reason.endswith("for each of 3 namespaces")


def test_a_disk_tier_too_small_for_its_own_journal_is_refused_with_the_size_for_all(
    make_manager: MakeBench, tmp_path: Path
) -> None:
    client = make_manager(2, disk_bytes=3 * SIZE, disk_dir=str(tmp_path / "disk")).client()
    client.send(client.bench.worker_hello())
    reason = refusal(client)
    assert reason.startswith(f"DYN_KVBM_DISK_CACHE_GB='{3 * SIZE / 1e9:g}' cannot be used: at least ")
    assert reason.endswith("GB (one block of this model) for each of 2 namespaces")


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


# ---- what may enter disk


def test_the_admission_policy_and_the_write_budget_are_those_that_are_set(make_manager: MakeBench) -> None:
    manager = make_manager(2, disk_blocks=32, disk_admission="ghost", disk_write_budget_bytes=96 * SIZE)
    manager.engine()
    budget = manager.space().disk.admission
    assert isinstance(budget, WriteBudget)
    assert isinstance(budget.inner, GhostAdmission)
    for key in KEYS[:40]:
        budget.inner.offered(key, 50.0)
    assert len(budget.inner) == 2 * 16, "of the namespace's own share of the slots"
    assert [budget.spend(50.0) for _ in range(3)] == [True, True, False], "a 24th of half the budget"


def test_a_staging_area_lets_everything_enter_but_for_the_budget(make_manager: MakeBench) -> None:
    options = {"host_blocks": None, "disk_blocks": 40, "staging_bytes": SMALLEST, "disk_admission": "ghost"}
    plain, bounded = make_manager(**options), make_manager(**options, disk_write_budget_bytes=2 * SIZE)
    for manager in (plain, bounded):
        manager.engine()
    assert isinstance(plain.space().disk.admission, AdmitAll)
    assert isinstance(bounded.space().disk.admission, WriteBudget)


def test_an_admission_policy_that_nobody_brings_is_refused(make_manager: MakeBench) -> None:
    with pytest.raises(SettingsError, match=r"DYN_KVBM_DISK_ADMISSION='clock' .* filter, all, ghost"):
        make_manager(disk_admission="clock")


def test_a_write_budget_of_less_than_two_blocks_is_refused(make_manager: MakeBench) -> None:
    manager = make_manager(3, disk_blocks=32, disk_write_budget_bytes=6 * SIZE - 1)
    client = manager.client()
    client.send(manager.worker_hello())
    reason = refusal(client)
    assert f"DYN_KVBM_DISK_WRITE_BUDGET={6 * SIZE - 1}" in reason
    assert f"0, or at least {6 * SIZE} bytes: 2 blocks of {SIZE} bytes for each of 3 namespaces" in reason


def test_what_was_written_is_set_against_what_was_hit(make_manager: MakeBench, below: FakeTier) -> None:
    manager = make_manager(disk_blocks=32, disk_offload_filter=False)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:6])
    below.release()
    manager.clock.advance(10.0)
    manager.step()
    name = "kvbm_disk_write_bytes_per_hit_byte"
    assert (name,) not in manager.metrics.snapshot(), "nothing was hit"
    manager.space().clear("host")
    assert len(leader.lookup(2, KEYS[:3]).slots) == 3
    manager.clock.advance(10.0)
    manager.step()
    assert manager.metrics.value(name) == 2.0


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
    meta = read_meta(owned / "meta.json")
    assert meta is not None
    crashed = claim_directory(disk, meta, Syscalls())
    crashed.write_meta(meta)
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
    assert list(manager.server.spaces) == []
    manager.until(lambda: not list(disk.iterdir()), "its files are still there")
    store(*manager.engine("third"), 1, KEYS[:2])
    assert manager.space().host_pool.counts().resident == 2


def test_a_namespace_that_lasts_keeps_its_place(make_manager: MakeBench) -> None:
    manager = make_manager(1)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    for session in (leader, worker):
        session.channel.close()
    manager.step()
    assert manager.space().host_pool.counts().resident == 2
