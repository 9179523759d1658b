"""Sizes to blocks, default sizes, and the notices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.settings import (
    Settings,
    available_memory_bytes,
    container_free_bytes,
    container_limit_bytes,
    disk_slots,
    host_slots,
    load_settings,
    manager_notices,
    request_notices,
    shared_manager_notices,
    shared_request_notices,
    size_notices,
    staging_slots,
)
from kvbm.settings.advice import DISK_STORES_MAX, default_host_bytes, notices
from kvbm.tiers.disk.tier import PENDING_LIMIT


def test_blocks_as_the_original_counts_them():
    settings = load_settings({"DYN_KVBM_CPU_CACHE_GB": "0.001"}).settings
    assert host_slots(settings, 65_536) == 15


@given(st.integers(1, 2**50), st.integers(1, 2**34))
def test_blocks_never_exceed_the_size(size_bytes, block_bytes):
    settings = Settings(host_bytes=size_bytes, disk_bytes=size_bytes)
    if size_bytes < block_bytes:
        for slots in (host_slots, disk_slots):
            with pytest.raises(SettingsError, match="room for one block"):
                slots(settings, block_bytes)
        return
    for slots in (host_slots, disk_slots):
        assert 0 <= size_bytes - slots(settings, block_bytes) * block_bytes < block_bytes


def test_a_count_wins_over_a_size():
    settings = Settings(host_bytes=10, host_blocks=7, disk_bytes=10, disk_blocks=9)
    assert host_slots(settings, 4096) == 7
    assert disk_slots(settings, 4096) == 9


def test_a_tier_that_is_off_has_no_blocks():
    assert host_slots(Settings(), 4096) == disk_slots(Settings(), 4096) == 0


def test_too_small_a_tier_names_its_variable():
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_DISK_CACHE_GB='100 bytes' .* 4096 bytes$"):
        disk_slots(Settings(disk_bytes=100), 4096)


def test_staging_only_for_disk_without_host():
    assert staging_slots(Settings(disk_bytes=10**9), 1_000_000) == 512
    assert staging_slots(Settings(disk_blocks=10), 1_000_000) == 512
    assert staging_slots(Settings(disk_bytes=10**9, host_bytes=1), 1_000_000) == 0
    assert staging_slots(Settings(host_bytes=1), 1_000_000) == 0
    assert staging_slots(Settings(), 1_000_000) == 0
    with pytest.raises(SettingsError, match="DYN_KVBM_DISK_STAGING_GB"):
        staging_slots(Settings(disk_bytes=10**12), 10**9)


def test_a_block_of_no_bytes_is_a_programmers_error():
    with pytest.raises(AssertionError):
        host_slots(Settings(host_bytes=10), 0)


def test_default_host_tier():
    assert default_host_bytes(None) == 4_000_000_000
    assert default_host_bytes(10**12) == 4_000_000_000
    assert default_host_bytes(10**9) == 250_000_000


def advised(**settings):
    return notices(Settings(**settings), {})


def said(environment):
    """The notices about the settings of an environment, without those that a tier's size alone draws."""
    return [line for line in load_settings(environment).notices if "no effect" in line or "counts" in line]


def test_notices():
    assert advised(host_bytes=1) == []
    assert advised(host_bytes=1, metrics=True) == []
    (line,) = advised(host_bytes=4 * 10**9, disk_bytes=10**9)
    assert line.startswith("the disk tier (1 GB) is smaller than the host tier (4 GB)")
    assert advised(host_bytes=10**9, disk_bytes=10**9) == []
    assert "staging area of 512 MB" in advised(disk_bytes=10**9)[0]
    (unread,) = advised(disk_bytes=10**9, disk_admission="ghost")[1:]
    assert unread.split()[0] == "DYN_KVBM_DISK_ADMISSION"
    assert len(advised(disk_bytes=10**9, disk_admission="all")) == 1


def test_what_is_set_of_a_disk_tier_that_is_not_there_is_named_in_one_line():
    host = {"DYN_KVBM_CPU_CACHE_GB": "4"}
    disk = {
        "DYN_KVBM_DISK_CACHE_DIR": "/mnt/nvme",
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "false",
        "DYN_KVBM_DISK_WRITE_BUDGET_GB": "0",
        "DYN_KVBM_DISK_UNOWNED_GB": "0",
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": "32",
    }
    assert said({**host, **disk}) == [
        (
            "no effect without a disk tier (DYN_KVBM_DISK_CACHE_GB): DYN_KVBM_DISK_CACHE_DIR, "
            "DYN_KVBM_DISK_UNOWNED_GB, DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER, "
            "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE"
        )
    ]
    for size in ("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS"):
        with_disk = {**host, **disk, size: "8"}
        del with_disk["DYN_KVBM_MAX_TRANSFER_BATCH_SIZE"]
        assert said(with_disk) == []
    assert said(host) == []


def test_staging_beside_a_host_tier():
    tiers = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_DISK_CACHE_GB": "8"}
    (line,) = said({**tiers, "DYN_KVBM_DISK_STAGING_GB": "1"})
    assert line == "no effect where there is a host tier: DYN_KVBM_DISK_STAGING_GB"
    assert said({"DYN_KVBM_DISK_CACHE_GB": "8", "DYN_KVBM_DISK_STAGING_GB": "1"}) == []


@pytest.mark.parametrize(
    ("batches", "size", "end"),
    [
        ("8", "6", " 48 blocks on their way to disk at one time"),
        ("8", "7", ", of which the disk tier takes 48"),
    ],
)
def test_of_concurrent_batches_only_the_product_counts(batches, size, end):
    tiers = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_DISK_CACHE_GB": "8"}
    assert said(tiers) == [], "the default is nobody's choice"
    asked = {"DYN_KVBM_MAX_CONCURRENT_TRANSFERS": batches, "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": size}
    (line,) = said({**tiers, **asked})
    assert line.startswith(f"DYN_KVBM_MAX_CONCURRENT_TRANSFERS={batches} times ")
    assert "only their product counts" in line
    assert line.endswith(end)


def test_the_disk_tier_takes_as_many_stores_as_is_said():
    assert DISK_STORES_MAX == PENDING_LIMIT - PENDING_LIMIT // 4


def test_an_address_of_metrics_that_are_off():
    host = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_METRICS_PORT": "7000"}
    assert said(host) == ["no effect without DYN_KVBM_METRICS: DYN_KVBM_METRICS_PORT"]
    assert said({**host, "DYN_KVBM_METRICS": "true"}) == []


def test_the_deadline_of_reads_is_a_stores_and_a_fleets():
    host = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_REMOTE_DEADLINE_MS": "500"}
    without = "no effect without a store (DYN_KVBM_REMOTE) or a fleet (DYN_KVBM_FLEET)"
    assert said(host) == [f"{without}: DYN_KVBM_REMOTE_DEADLINE_MS"]
    assert said({**host, "DYN_KVBM_FLEET": "f", "DYN_KVBM_FLEET_PEERS": "h:1"}) == []
    store = {"DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "b"}
    for there in ({"DYN_KVBM_REMOTE": "file:///s"}, store):
        assert said({**host, **there}) == []


def test_a_host_tier_below_the_devices():
    assert size_notices(100, 100) == size_notices(0, 100) == []
    assert size_notices(99, 100)[0].startswith("the host tier holds 99 blocks, fewer than the device's 100")


def test_a_host_tier_below_one_request_names_the_size_that_holds_it():
    """Qwen3-0.6B: 114,688 bytes a token, blocks of 16."""
    block_bytes = 16 * 114_688
    four = Settings(host_bytes=4 * 10**9)
    slots = host_slots(four, block_bytes)
    (line,) = request_notices(four, slots, block_bytes, 16, 2560, 1)
    assert line == (
        "DYN_KVBM_CPU_CACHE_GB=4 gives 2179 blocks and one request may need 2560 (max_model_len, up to 40960 tokens): "
        "no more than 2179 of its blocks are kept or loaded at a time; DYN_KVBM_CPU_CACHE_GB=4.698 would hold it"
    )
    assert request_notices(four, 2560, block_bytes, 16, 2560, 1) == []
    (line,) = request_notices(Settings(host_blocks=1000), 500, block_bytes, 16, 2560, 2)
    assert line.startswith("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=1000 gives 500 blocks and ")
    assert line.endswith("; DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=5120 (9.396 GB) would hold it")
    (line,) = request_notices(Settings(disk_bytes=10**12), 279, block_bytes, 16, 2560, 1)
    assert line.startswith("DYN_KVBM_DISK_STAGING_GB=0.512 gives 279 blocks and ")
    assert ": no more than 279 of its blocks are loaded at a time; " in line, "disk keeps more"
    both = Settings(host_bytes=4 * 10**9, disk_bytes=10**12)
    (line,) = request_notices(both, slots, block_bytes, 16, 2560, 1)
    assert ": no more than 2179 of its blocks are loaded at a time; " in line
    (line,) = shared_request_notices(279, block_bytes, 16, 2560)
    assert ": no more than 279 of its blocks are loaded at a time; " in line, "it may have a disk"
    assert line.startswith("the manager's host tier gives 279 blocks and one request may need 2560 ")
    assert line.endswith("; 4.698 GB for this model would hold it")
    (line,) = shared_request_notices(279, block_bytes, 0, 2560)
    assert ": one that needs more than 279 is not loaded at all; " in line, (
        "of several groups a part is of no use"
    )
    for slots in (0, 2560):
        assert shared_request_notices(slots, block_bytes, 16, 2560) == []


@given(st.integers(1, 2**30), st.integers(2, 4000), st.integers(1, 64))
def test_the_size_that_is_named_holds_the_request(block_bytes, request_blocks, namespaces):
    (line,) = request_notices(Settings(host_bytes=1), 1, block_bytes, 16, request_blocks, namespaces)
    named = line.partition("; ")[2].removesuffix(" would hold it").partition("=")[2]
    settings = load_settings({"DYN_KVBM_CPU_CACHE_GB": named}).settings
    assert host_slots(settings, block_bytes) // namespaces >= request_blocks


def test_available_memory(tmp_path):
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    assert available_memory_bytes(meminfo, limit) is None
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:     50 kB\n")
    assert available_memory_bytes(meminfo, limit) == 51_200
    limit.write_text("max\n")
    assert available_memory_bytes(meminfo, limit) == 51_200
    limit.write_text("1000\n")
    assert available_memory_bytes(meminfo, limit) == 1000
    meminfo.write_text("MemAvailable: many\n")
    assert available_memory_bytes(meminfo, limit) == 1000


def test_what_is_a_shared_managers_affair_is_named_in_one_line() -> None:
    environment = {"DYN_KVBM_MANAGER": "/run/m.sock", "DYN_KVBM_ONBOARD": "always", "DYN_LOG": "debug"}
    asked = {
        "DYN_KVBM_DISK_CACHE_GB": "8",
        "DYN_KVBM_EVICTION": "gittins",
        "DYN_KVBM_METRICS": "true",
        "DYN_KVBM_CPU_CACHE_GB": "0",
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "false",
    }
    beside = load_settings({**environment, **asked})
    assert shared_manager_notices(beside.settings, beside.origins) == [
        (
            "no effect in an engine of the manager at /run/m.sock, which has its own: "
            "DYN_KVBM_DISK_CACHE_GB, DYN_KVBM_EVICTION, DYN_KVBM_METRICS"
        )
    ]
    for loaded in (load_settings(environment), load_settings(asked)):
        assert shared_manager_notices(loaded.settings, loaded.origins) == []
    waits = load_settings({**environment, "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": "5"})
    (line,) = shared_manager_notices(waits.settings, waits.origins)
    assert line.endswith("does not wait for: DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS")


def test_what_is_each_engines_affair_is_named_in_one_line() -> None:
    asked = load_settings(
        {
            "DYN_KVBM_ONBOARD_MODE": "layerwise",
            "DYN_KVBM_KV_LAYOUT": "block",
            "DYN_MEMORY_DISABLE_NUMA": "true",
            "DYN_KVBM_EVICTION": "lru",
            "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "true",
        }
    )
    assert manager_notices(asked.settings, asked.origins) == [
        "no effect in a manager, as engines read it: DYN_KVBM_ONBOARD_MODE, DYN_KVBM_KV_LAYOUT, DYN_MEMORY_DISABLE_NUMA"
    ]
    plain = load_settings({"DYN_KVBM_CPU_CACHE_GB": "4"})
    assert manager_notices(plain.settings, plain.origins) == []


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "9000"}, 9000),
        ("0::/\n", {"memory.max": "max"}, None),
        (
            "0::/a.slice/b.service\n",
            {"a.slice/memory.max": "700", "a.slice/b.service/memory.max": "800"},
            700,
        ),
        (
            "0::/a.slice/b.service\n",
            {"a.slice/memory.max": "max", "a.slice/b.service/memory.max": "800"},
            800,
        ),
        ("9:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "500"}, 500),
        ("9:cpu:/x\n", {"memory/x/memory.limit_in_bytes": "500"}, None),
        ("9:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        (None, {"memory.max": "600"}, 600),
        ("nonsense\n", {}, None),
    ],
)
def test_the_limit_of_a_container_or_a_service(tmp_path, groups, files, limit):
    root, ours = tmp_path / "cgroup", tmp_path / "ours"
    if groups is not None:
        ours.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert container_limit_bytes(root=root, ours=ours) == limit


def test_what_a_container_may_still_take(tmp_path):
    root, ours = tmp_path / "cgroup", tmp_path / "ours"
    inner = root / "pod" / "engine"
    inner.mkdir(parents=True)
    ours.write_text("0::/pod/engine\n")
    assert container_free_bytes(root, ours) is None
    (inner / "memory.max").write_text("1000\n")
    (inner / "memory.current").write_text("700\n")
    assert container_free_bytes(root, ours) == 300
    (inner / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    assert container_free_bytes(root, ours) == 450
    (root / "pod" / "memory.max").write_text("2000\n")
    (root / "pod" / "memory.current").write_text("1900\n")
    assert container_free_bytes(root, ours) == 100
    (root / "pod" / "memory.current").write_text("2100\n")
    assert container_free_bytes(root, ours) == 0


def test_what_a_container_may_still_take_in_the_older_control_groups(tmp_path):
    root, ours = tmp_path / "cgroup", tmp_path / "ours"
    (root / "memory" / "box").mkdir(parents=True)
    ours.write_text("9:memory:/box\n")
    (root / "memory" / "box" / "memory.limit_in_bytes").write_text("1000\n")
    (root / "memory" / "box" / "memory.usage_in_bytes").write_text("900\n")
    (root / "memory" / "box" / "memory.stat").write_text("total_inactive_file 20\n")
    assert container_free_bytes(root, ours) == 120
