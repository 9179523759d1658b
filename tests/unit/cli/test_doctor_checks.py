"""The checks of `kvbm doctor` that look at the machine and at the disk, one by one."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli import doctor
from kvbm.cli import doctor_disk as storage
from kvbm.cli import doctor_machine as machine
from kvbm.cli.doctor import line_of
from kvbm.cli.doctor_check import Check
from kvbm.cli.doctor_round_trip import check_round_trip
from kvbm.settings import LoadedSettings, Settings
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

MB = 1_000_000


# ---- the machine


def test_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(host_bytes: int, available_bytes: int | None = 10**15, limit: int | None = None) -> Check:
        monkeypatch.setattr(machine, "container_limit_bytes", lambda: limit)
        return machine.check_memory(Settings(host_bytes=host_bytes), 4096, available_bytes)

    assert check(MB).state == "ok"
    assert check(2 * MB, available_bytes=MB).state == "advice"
    assert check(95 * MB, limit=100 * MB).state == "advice"
    assert check(89 * MB, limit=100 * MB).state == "ok"
    assert "container's" not in check(10**17).remedy
    for found in (check(101 * MB, limit=100 * MB), check(10**17), check(4095)):
        assert found.state == "fault"
        assert "DYN_KVBM_CPU_CACHE_GB" in found.remedy
    staging = machine.check_memory(Settings(disk_bytes=10**9), 4096, None)
    assert staging.measured["wanted_bytes"] == Settings().staging_bytes
    assert machine.wanted_host_bytes(Settings(host_blocks=3), 4096) == 3 * 4096


def test_what_a_container_uses_already_is_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(host_bytes=30 * MB, runtime_dir=str(tmp_path / "run"))
    loaded = LoadedSettings(settings=settings, origins={}, warnings=[], notices=[])
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 50 * MB)
    for left, free in ((20 * MB, 20 * MB), (None, 50 * MB)):
        monkeypatch.setattr(doctor, "container_free_bytes", lambda left=left: left)
        checks = doctor.examine(loaded, 4096, 0)
        memory = next(check for check in checks if check.name == "host memory")
        assert memory.measured["available_bytes"] == free
        assert memory.state == ("advice" if free < 30 * MB else "ok")


def test_device_cache() -> None:
    settings = Settings(host_bytes=10 * MB)
    assert machine.check_device(settings, 4096, 11 * MB, 0).state == "advice"
    assert "--device-cache" not in machine.check_device(settings, 4096, 11 * MB, 0).remedy
    assert machine.check_device(settings, 4096, 10 * MB, 50 * MB).state == "ok"
    assert "--device-cache" in machine.check_device(settings, 4096, 0, 50 * MB).remedy
    for settled in (
        machine.check_device(settings, 4096, 0, 0),
        machine.check_device(Settings(), 4096, MB, 0),
    ):
        assert settled.state == "ok"


def test_the_memory_of_all_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_bytes() == 0
    tool = tmp_path / "nvidia-smi"
    for script, size in (
        ("echo 81559; echo 81559", 2 * 81559 << 20),
        ("echo '[N/A]'", 0),
        ("echo 7; exit 9", 0),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert machine.gpu_bytes() == size


def test_page_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 6.8.0-45-generic\n")

    def check(on_gpus: int = 1, limit: int | None = None) -> Check:
        monkeypatch.setattr(machine, "container_limit_bytes", lambda: limit)
        return machine.check_page_locks(Settings(host_bytes=10 * MB), 4096, on_gpus, version)

    assert (check().state, "nothing but memory" in check().found) == ("ok", True)
    contained = check(limit=20 * MB)
    assert (contained.state, contained.measured) == ("ok", {"limit_bytes": 20 * MB})
    assert "10 MB of host memory" in contained.found
    version.write_text("Linux version 5.15.167.4-microsoft-standard-WSL2\n")
    assert (check().state, "WSL2" in check().found) == ("advice", True)
    assert check(on_gpus=0).state == "ok"
    version.unlink()
    assert check().state == "ok"


def test_the_port_of_the_metrics() -> None:
    assert "off" in machine.check_port(Settings(), False).found
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(metrics=True, metrics_host="127.0.0.1", metrics_port=port)
        beside = machine.check_port(settings, managers_run=False)
        assert (beside.state, "DYN_KVBM_METRICS_PORT" in beside.remedy) == ("advice", True)
        everywhere = Settings(metrics=True, metrics_host="0.0.0.0", metrics_port=port)
        ours = machine.check_port(everywhere, managers_run=True)
        assert ours.state == "ok"
        assert f"curl http://127.0.0.1:{port}/metrics " in ours.found, "an address to connect to"
    assert machine.check_port(settings, managers_run=False).state == "ok"
    elsewhere = Settings(metrics=True, metrics_host="192.0.2.1", metrics_port=port)
    assert machine.check_port(elsewhere, managers_run=False).state == "fault"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("", "ok"),
        ("0.27.1", "fault"),
        ("0.28.0", "ok"),
        ("0.32.0+cpu", "ok"),
        ("0.33.1", "advice"),
        ("1.0", "advice"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: version if name == "vllm" else "1.2")
    vllm, libraries = machine.check_versions()
    assert (vllm.state, libraries.state) == (state, "ok")
    assert "0.28 to 0.32" in vllm.found + vllm.remedy


def test_a_library_that_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LIBRARIES", ("numpy", "no_such_library"))
    *_, libraries = machine.check_versions()
    assert (libraries.state, libraries.remedy) == ("fault", "pip install no_such_library")


# ---- the disk


def test_a_disk_without_room(tmp_path: Path) -> None:
    checks = {
        c.name: c for c in storage.check_disk(Settings(disk_bytes=10**17, disk_dir=str(tmp_path)), 4096)
    }
    assert checks["disk space"].state == "fault"
    assert "DYN_KVBM_DISK_CACHE_GB" in checks["disk space"].remedy
    counted = Settings(disk_blocks=10**13, disk_dir=str(tmp_path))
    space = {c.name: c for c in storage.check_disk(counted, 4096)}["disk space"]
    assert "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS" in space.remedy


def test_the_kind_of_filesystem(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"overlay / overlay rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\nx {tmp_path}x ext4 rw 0 0\n")
    assert storage.filesystem_kind(tmp_path / "below", mounts) == "tmpfs"
    assert storage.filesystem_kind(Path("/elsewhere"), mounts) == "overlay"
    assert storage.filesystem_kind(tmp_path, tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("kind", "state"), [("tmpfs", "advice"), ("overlay", "advice"), ("nfs4", "advice"), ("xfs", "ok")]
)
def test_a_filesystem_that_is_no_local_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, state: str
) -> None:
    monkeypatch.setattr(storage, "filesystem_kind", lambda path: kind)
    settings = Settings(disk_bytes=MB, disk_dir=str(tmp_path / "new"))
    checks = {c.name: c for c in storage.check_disk(settings, 4096)}
    assert (checks["disk directory"].state, "will be made" in checks["disk directory"].found) == (state, True)
    assert ("DYN_KVBM_DISK_CACHE_DIR" in checks["disk directory"].remedy) == (state == "advice")


def test_direct_transfers_that_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def check(**settings: Any) -> Check:
        found = storage.check_disk(Settings(disk_bytes=MB, disk_dir=str(tmp_path), **settings), 4096)
        return {c.name: c for c in found}["O_DIRECT"]

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    assert check(disk_o_direct=False).state == "advice"
    monkeypatch.setattr(storage.os, "preadv", refuse)
    assert (check().state, "EINVAL" in check().found) == ("advice", True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("host", "disk", "admission", "says"),
    [
        (10, 10, None, "adds little"),
        (10, 79, None, ""),
        (10, 80, None, "ghost"),
        (10, 80, "ghost", ""),
        (10, 5, "all", ""),
        (20, 10, None, "DYN_KVBM_DISK_ADMISSION=all"),
        (None, 80, None, ""),
    ],
)
def test_a_filter_that_does_not_go_with_the_size(
    tmp_path: Path, host: int | None, disk: int, admission: str | None, says: str
) -> None:
    in_bytes = {"host_bytes": host and host * 4096, "disk_bytes": disk * 4096}
    in_blocks = {"host_blocks": host, "disk_blocks": disk}
    # A disk tier that is smaller in bytes has a line of its own among the notices.
    for sizes in (in_bytes, in_blocks) if disk >= (host or 0) else (in_blocks,):
        settings = Settings(disk_admission=admission, disk_dir=str(tmp_path), **sizes)
        (found,) = [c for c in storage.check_disk(settings, 4096) if c.name == "disk admission"]
        assert found.state == ("advice" if says else "ok")
        assert says in line_of(found)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (FaultRule(operation="preadv", file="slab", fault=Fault.FLIP), "changed"),
        (FaultRule(operation="pwritev", file="slab", fault=Fault.EIO), "Input/output error"),
        (FaultRule(operation="pwritev", file="slab", fault=Fault.LOST), "changed"),
    ],
)
def test_a_disk_that_loses_or_changes_bytes(tmp_path: Path, rule: FaultRule, says: str) -> None:
    host, disk = check_round_trip(Settings(), 65536, tmp_path, FaultySyscalls(1, rule))
    assert (host.state, disk.state) == ("ok", "fault")
    assert says in disk.found
    assert str(tmp_path) in disk.found + disk.remedy or "disk" in disk.remedy
    assert os.listdir(tmp_path) == []
