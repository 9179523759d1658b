"""`kvbm manager`: flags become settings, errors come before anything is started."""

from __future__ import annotations

import logging
import os
import sys
import types

import pytest

from kvbm.cli import main as entry
from kvbm.errors import SettingsError
from kvbm.settings import SCHEMA, Kind, Settings


class Started:
    """Stands in for the manager's process module and notes what it was asked for."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.socket_path = ""
        self.namespaces = 0
        self.lock_path = ""
        self.lock_fd = -1
        self.fault: Exception | None = None

    def take_lock(self, socket_path: str) -> int:
        self.lock_path = socket_path
        self.lock_fd = os.open(os.devnull, os.O_RDONLY)
        return self.lock_fd

    def serve(self, settings, socket_path, namespaces, private, on_listening) -> None:
        assert not private
        self.settings, self.socket_path, self.namespaces = settings, socket_path, namespaces
        if self.fault is not None:
            raise self.fault
        on_listening()


@pytest.fixture
def started(monkeypatch):
    for name in ("DYN_LOG", "DYN_KVBM_CONFIG", *(setting.variable for setting in SCHEMA)):
        monkeypatch.delenv(name, raising=False)
    started = Started()
    module = types.ModuleType("kvbm.manager.process")
    module.take_lock, module.serve = started.take_lock, started.serve
    monkeypatch.setitem(sys.modules, "kvbm.manager.process", module)
    monkeypatch.setattr("kvbm.cli.manager.configure", lambda level: None)
    monkeypatch.setattr("kvbm.manager.settings_check.settings_faults", lambda settings: [])
    return started


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        entry.main(["manager", *words])
    return int(caught.value.code or 0)


# One value for each kind of flag, away from every default.
VALUES = {
    Kind.SIZE: ("3GB", 3_000_000_000),
    Kind.COUNT: ("17", 17),
    Kind.SECONDS: ("7", 7),
    Kind.STORE: ("file:///mnt/kv", "file:///mnt/kv"),
    Kind.PART: ("0.25", 0.25),
    Kind.PORT: ("7001", 7001),
    Kind.PATH: ("/tmp/elsewhere", "/tmp/elsewhere"),
    Kind.SOCKET: ("/tmp/x/m.sock", "/tmp/x/m.sock"),
    Kind.TEXT: ("0.0.0.0", "0.0.0.0"),
    Kind.USERS: ("1000,2000", (1000, 2000)),
    Kind.ENDPOINT: ("tcp://*:5557", "tcp://*:5557"),
    Kind.LISTEN: ("6881", "127.0.0.1:6881"),
    Kind.SECRET: ("keys --of us", "keys --of us"),
    Kind.NAME: ("node-7", "node-7"),
    Kind.ADDRESS: ("10.0.0.7:7400", "10.0.0.7:7400"),
    Kind.ADDRESSES: ("10.0.0.7:7400,h:1", "10.0.0.7:7400,h:1"),
    Kind.URLS: ("http://e:2379", "http://e:2379"),
}
FLAGGED = [setting for setting in SCHEMA if setting.flag]


@pytest.mark.parametrize("setting", FLAGGED, ids=lambda setting: setting.flag)
def test_every_flag_of_the_schema_exists_and_sets_its_field(started, setting):
    if setting.kind is Kind.SWITCH:
        bare = setting.flag.removeprefix("--")
        for words, value in ((f"--{bare}", True), (f"--no-{bare}", False)):
            assert call(words) == 0
            assert getattr(started.settings, setting.field) is value
        return
    text, value = VALUES[setting.kind] if not setting.choices else (setting.choices[-1], setting.choices[-1])
    assert call(setting.flag, text) == 0
    assert getattr(started.settings, setting.field) == value


def test_it_prints_what_engines_must_set(started, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DYN_KVBM_RUNTIME_DIR", str(tmp_path))
    assert call("--host-memory", "4GB", "--namespaces", "3") == 0
    expected = f"{tmp_path}/manager.sock"
    assert capsys.readouterr().out == f"engines use this manager with: DYN_KVBM_MANAGER={expected}\n"
    assert started.socket_path == started.lock_path == expected
    assert started.namespaces == 3


def test_what_is_an_engines_affair_is_named(started, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("kvbm"), "propagate", True)
    monkeypatch.setenv("DYN_KVBM_CUDA_COPY", "rows")
    assert call("--host-memory", "4GB") == 0
    lines = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert lines == ["no effect in a manager, as engines read it: DYN_KVBM_CUDA_COPY"]


def test_what_has_no_effect_is_a_warning(started, monkeypatch, caplog):
    """Else nobody reads it under DYN_LOG=warn."""
    monkeypatch.setattr(logging.getLogger("kvbm"), "propagate", True)
    assert call("--host-memory", "4GB", "--disk-unowned", "0") == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["no effect without a disk tier (DYN_KVBM_DISK_CACHE_GB): DYN_KVBM_DISK_UNOWNED_GB"]


def test_the_socket_can_be_chosen_and_becomes_absolute(started, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call("--socket", "m.sock") == 0
    assert started.socket_path == f"{tmp_path}/m.sock"
    monkeypatch.setenv("DYN_KVBM_MANAGER", "/tmp/x/other.sock")
    assert call() == 0
    assert started.socket_path == "/tmp/x/other.sock"


def test_naming_the_metrics_address_turns_metrics_on(started):
    assert call() == 0
    assert not started.settings.metrics
    assert call("--metrics-port", "7001") == 0
    assert started.settings.metrics
    assert call("--metrics-port", "7001", "--no-metrics") == 0
    assert not started.settings.metrics


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--host-memory", "4G"), "kvbm: --host-memory='4G' cannot be used"),
        (("--host-memory", "0"), "kvbm: --host-memory=0 cannot be used"),
        (("--metrics-port", "70000"), "kvbm: --metrics-port='70000' cannot be used: a port from 1 to 65535"),
        (("--socket", "/" + "x" * 120), "kvbm: --socket="),
        (("--config", "/none.toml"), "kvbm: settings file='/none.toml' cannot be used"),
    ],
)
def test_a_bad_flag_is_one_line_and_starts_nothing(started, capsys, words, says):
    assert call(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(says)
    assert started.settings is None
    assert started.lock_path == ""


def test_a_manager_that_cannot_start_says_so_and_frees_its_lock(started, capsys):
    started.fault = SettingsError(
        "DYN_KVBM_METRICS_PORT", 6880, "choose a free port; 127.0.0.1:6880 is in use"
    )
    assert call() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("choose a free port; 127.0.0.1:6880 is in use\n")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(started.lock_fd)


def test_too_many_namespaces_is_a_usage_error(started, capsys):
    assert call("--namespaces", "0") == 2
    assert "namespaces" in capsys.readouterr().err
    assert started.settings is None
