"""What `kvbm config check` passes starts `kvbm manager`, and what it refuses does not: the same line for both."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.cli import main as entry
from kvbm.manager import process
from kvbm.settings import FIELDS, SCHEMA

PEERS = 'fleet = "f"\nfleet_peers = "10.0.0.7:7400"\n'
UNUSABLE = {
    "policy": ('eviction = "best"', "eviction"),
    "admission": ('disk_bytes = "1GB"\nhost_bytes = "1GB"\ndisk_admission = "x"', "disk_admission"),
    "store admission": ('remote = "file:///mnt/kv"\nremote_admission = "x"', "remote_admission"),
    "store": ('remote = "s4://bucket"', "remote"),
    "bucket": ('remote = "s3://Bucket"', "remote"),
    "key file": ('remote = "file:///mnt/kv"\nremote_key_file = "/nowhere"', "remote_key_file"),
    "key command": ('remote = "file:///mnt/kv"\nremote_key_command = "/nowhere"', "remote_key_command"),
    "fleet without peers": ('fleet = "f"', "fleet"),
    "fleet with both": (PEERS + 'fleet_etcd = "http://e:2379"', "fleet"),
    "peer": ('fleet = "f"\nfleet_peers = "999.0.0.1:7400"', "fleet_peers"),
    "peer by name": ('fleet = "f"\nfleet_peers = "-a-:7400"', "fleet_peers"),
    "etcd": ('fleet = "f"\nfleet_etcd = "http://1.2.3:2379"', "fleet_etcd"),
    "fleet certificates": (PEERS + 'fleet_certs = "/nowhere"', "fleet_certs"),
    "fleet address": (PEERS + 'fleet_listen = "192.0.2.1:7400"\nfleet_plain = true', "fleet_listen"),
    "fleet anywhere": (PEERS + 'fleet_listen = "0.0.0.0:7400"', "fleet_listen"),
    "node address": ('node_listen = "192.0.2.1:7"\nfleet_plain = true', "node_listen"),
    "node anywhere": ('node_listen = "0.0.0.0:7401"', "node_listen"),
    "metrics address": ('metrics = true\nmetrics_host = "nowhere at all"', "metrics_host"),
    "metrics elsewhere": ('metrics = true\nmetrics_host = "192.0.2.1"', "metrics_host"),
    "events": ('events_endpoint = "tcp://192.0.2.1:5557"', "events_endpoint"),
    "events file": ('events_endpoint = "ipc://{here}/file"', "events_endpoint"),
    "replay": (
        'events_endpoint = "tcp://127.0.0.1:5557"\nevents_replay_endpoint = "tcp://192.0.2.1:1"',
        "events_replay_endpoint",
    ),
    "page": ('admin_http = "unix:{here}/file"', "admin_http"),
    "token": ('admin_http = "127.0.0.1:6881"\nruntime_dir = "{here}/open"', "admin token"),
    "socket": ('manager = "{here}/file"', "manager"),
    "long path": (f'runtime_dir = "/{"x" * 120}"', "runtime_dir"),
    "socket directory": ('manager = "{here}/writable/m.sock"', "manager"),
    "disk directory": ('disk_bytes = "1GB"\ndisk_dir = "{here}/file/x"', "disk_dir"),
    "disk budget": ('disk_bytes = "1GB"\ndisk_write_budget_bytes = "1KB"', "disk_write_budget_bytes"),
    "host size": ("host_bytes = 100", "host_bytes"),
    "staging size": ('disk_bytes = "1GB"\nstaging_bytes = 100', "staging_bytes"),
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A settings file beside which there is a file, and directories that others write to and read."""
    for setting in SCHEMA:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "writable").mkdir()
    (tmp_path / "writable").chmod(0o777)
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open" / "admin.token").write_text("0123456789abcdef")
    (tmp_path / "open" / "admin.token").chmod(0o644)
    yield tmp_path / "kvbm.toml"
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sockets of managers that were about to serve; none does."""
    sockets: list[str] = []
    monkeypatch.setattr(process, "take_lock", lambda _: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(process, "serve", lambda settings, path, *_, **__: sockets.append(path))
    monkeypatch.setattr("kvbm.cli.manager.configure", lambda level: None)
    return sockets


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        entry.main(words)
    return int(caught.value.code or 0)


@pytest.mark.parametrize(("text", "field"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_no_manager_can_use_is_refused_by_the_check_and_by_the_start(
    file: Path, served: list[str], capsys: pytest.CaptureFixture[str], text: str, field: str
) -> None:
    file.write_text(text.replace("{here}", str(file.parent)))
    assert call("config", "check", str(file)) == 2
    (checked,) = capsys.readouterr().err.splitlines()
    assert checked.startswith(f"kvbm: {field}=" if field not in FIELDS else f"kvbm: {file}: {field}=")
    assert call("manager", "--config", str(file)) == 2
    (refused,) = capsys.readouterr().err.splitlines()
    assert refused.partition("=")[2] == checked.partition("=")[2], "both say the same"
    assert served == []


def test_every_fault_has_a_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('eviction = "best"\nremote = "s4://x"\nfleet = "f"\n')
    assert call("config", "check", str(file), "--json") == 2
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 3


def test_what_the_check_passes_starts(
    file: Path, served: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen(1)
        port = used.getsockname()[1]  # of the manager that runs, and whose settings these are
        file.write_text(
            f'host_bytes = "1GB"\ndisk_bytes = "1GB"\ndisk_dir = "{file.parent}/disk"\neviction = "lru"\n'
            f'metrics = true\nmetrics_host = "127.0.0.1"\nmetrics_port = {port}\n'
            f'events_endpoint = "tcp://127.0.0.1:{port}"\nadmin_http = "unix:{file.parent}/page.sock"\n'
            f'remote = "file://{file.parent}/store"\nnode_listen = "127.0.0.1:{port}"\n'
            f'fleet = "f"\nfleet_peers = "10.0.0.7:7400,node-7.example.org:7400,[fd00::7]:7400"\n'
            f'fleet_listen = "127.0.0.1:{port}"\n'
        )
        assert call("config", "check", str(file)) == 0
        assert capsys.readouterr().out == f"{file} can be used\n"
        assert call("manager", "--config", str(file)) == 0
    assert served == [f"{file.parent}/run/kvbm/manager.sock"]
    assert not (file.parent / "disk").exists() and not (file.parent / "page.sock").exists()


def test_sizes_beyond_this_machine_have_a_note(
    file: Path,
    served: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("kvbm"), "propagate", True)
    file.write_text(f'host_bytes = "1000TB"\ndisk_bytes = "9000TB"\ndisk_dir = "{file.parent}/disk"\n')
    assert call("config", "check", str(file)) == 0
    notes = capsys.readouterr().err
    assert "DYN_KVBM_CPU_CACHE_GB='1000000.00 GB' cannot be used: this" in notes
    assert "DYN_KVBM_DISK_CACHE_GB='9000000.00 GB' cannot be used: the file system of" in notes
    assert call("manager", "--config", str(file)) == 0
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all(f"note: {line}" in notes.splitlines() for line in warned) and len(warned) == 2
