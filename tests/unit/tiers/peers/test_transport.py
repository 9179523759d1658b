"""Which transport a setting and a machine make."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvbm.tiers.nixl import package
from kvbm.tiers.peers import mover
from kvbm.tiers.peers.transport import Transport, open_mover

MADE = object()


@pytest.mark.parametrize(
    ("transport", "certified", "installed", "devices", "made"),
    [
        ("auto", False, True, ["mlx5_0"], True),
        ("auto", False, True, [], False),
        ("auto", False, False, ["mlx5_0"], False),
        ("auto", True, True, ["mlx5_0"], False),
        ("tcp", False, True, ["mlx5_0"], False),
        ("nixl", False, True, [], True),
        ("nixl", True, True, [], True),
        ("nixl", False, False, ["mlx5_0"], False),
    ],
)
def test_who_gets_a_mover(
    transport: Transport,
    certified: bool,
    installed: bool,
    devices: list[str],
    made: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    opened = open_mover(
        transport,
        certified,
        "DYN_KVBM_FLEET_TRANSPORT",
        lambda: installed,
        lambda: devices,
        lambda: MADE,  # type: ignore[arg-type, return-value]
    )
    assert opened is (MADE if made else None)
    lines = [record.message for record in caplog.records]
    if transport == "nixl" and not made:
        assert len(lines) == 1 and "DYN_KVBM_FLEET_TRANSPORT=nixl: NIXL is not installed" in lines[0]
        assert "pip install" in lines[0]
    else:
        assert not lines


def test_whether_nixl_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "PACKAGES", ("no_such_package", "json"))
    assert package.is_installed()
    monkeypatch.setattr(package, "PACKAGES", ("no_such_package",))
    assert not package.is_installed()


def test_rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mover, "_RDMA_DEVICES", str(tmp_path / "none"))
    assert mover.rdma_devices() == []
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(mover, "_RDMA_DEVICES", str(tmp_path))
    assert mover.rdma_devices() == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("devices", "said", "expected"), [([], None, None), (["m"], None, "^tcp"), (["m"], "rc", "rc")]
)
def test_where_there_is_rdma_nobody_reaches_the_mover_over_tcp(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], said: str | None, expected: str | None
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(mover, "rdma_devices", lambda: devices)
    monkeypatch.setattr(mover, "process_environment", lambda: {"UCX_TLS": said} if said else {})
    monkeypatch.setattr(mover.subprocess, "Popen", lambda words, env, **_: started.append(env))
    ours, theirs = mover.socket.socketpair()
    with ours, theirs:
        mover.start_process(theirs)
    assert started[0].get("UCX_TLS") == expected
