"""The doctor's block to a device and back. Here the device is the CPU: its copier has the same contract."""

from __future__ import annotations

import sys

import pytest

from kvbm.cli.doctor_device import check_device_round_trip

GPU_BYTES = 80 << 30


def test_without_a_gpu_nothing_is_tried() -> None:
    check = check_device_round_trip(4096, 0)
    assert (check.state, check.found) == ("ok", "no GPU here: nothing to try")


def test_a_gpu_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "kvbm.transfer.round_trip", raising=False)
    check = check_device_round_trip(4096, GPU_BYTES)
    assert check.state == "advice"
    assert "torch is not installed" in check.found


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = check_device_round_trip(4096, GPU_BYTES)
    assert check.state == "fault"
    assert "cannot use it" in check.found


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: torch.zeros(0).device)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("block_bytes", [1, 4096, 100_000])
def test_a_block_there_and_back(block_bytes: int) -> None:
    check = check_device_round_trip(block_bytes, GPU_BYTES)
    assert check.state == "ok", check
    assert check.measured["block_bytes"] == -(-block_bytes // 4096) * 4096
    assert "every byte as it was" in check.found


@pytest.mark.usefixtures("on_the_cpu")
def test_a_copy_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm.transfer import CpuCopier

    monkeypatch.setattr(CpuCopier, "load", lambda copier, pairs, after: None)
    check = check_device_round_trip(4096, GPU_BYTES)
    assert (check.state, check.found) == ("fault", "4096 bytes came back changed")


@pytest.mark.usefixtures("on_the_cpu")
def test_a_device_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm.transfer import CpuCopier

    def fail(copier: CpuCopier, pairs: list[tuple[int, int]], after: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal\nmemory access")

    monkeypatch.setattr(CpuCopier, "store", fail)
    check = check_device_round_trip(4096, GPU_BYTES)
    assert (check.state, check.found) == ("fault", "CUDA error: an illegal memory access")
