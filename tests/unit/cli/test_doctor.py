"""`kvbm doctor`: what each check finds, what it says to do, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbm
from kvbm.cli import doctor_machine as machine
from kvbm.cli import doctor_managers as managers
from kvbm.cli.doctor import line_of
from kvbm.cli.doctor_check import advice
from kvbm.manager.table_sizes import history_tables, space_tables
from kvbm.present.numbers import format_bytes
from kvbm.settings import SCHEMA, Settings
from kvbm.testing.stored_runs import LAYOUT as TIER_LAYOUT
from kvbm.testing.stored_runs import NAMESPACE, make_key, store
from kvbm.tiers.disk.tier import open_disk_tier
from rigs.manager import LAYOUT, ManagerBench

MB = 1_000_000
OURS = ("DYN_", "_KVBM", "XDG_")
SOURCES = str(Path(kvbm.__file__).parents[1])
Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """`kvbm doctor` as a user calls it, in a directory of its own, with these variables."""

    def call(*words: str, **environ: str) -> tuple[int, str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        result = subprocess.run(
            [sys.executable, "-m", "kvbm.cli.main", "doctor", *words],
            env={**kept, "PYTHONPATH": SOURCES, "DYN_KVBM_RUNTIME_DIR": str(tmp_path / "run"), **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return result.returncode, result.stdout, result.stderr

    return call


def by_name(text: str) -> dict[str, dict[str, Any]]:
    """The checks of a JSON document; of several with one name, the last."""
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_with_nothing_configured_all_is_well(doctor: Doctor) -> None:
    code, out, err = doctor()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(re.match(r"(ok    |ADVICE|FAULT )  [\w/ -]+: \S", line) for line in lines[:-1]), out
    assert not any(line.startswith("FAULT") for line in lines)
    assert "nothing is set" not in lines[0]  # the fixture names a runtime directory
    assert "none runs" in out
    assert "advice: settings" in lines[-1]


def test_everything_is_tried_and_nothing_is_left_behind(doctor: Doctor, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "kvbm.toml").write_text(f'disk_dir = "{disk}"\ndisk_bytes = "64MB"\nhost_bytes = "32MB"\n')
    code, out, err = doctor("--json", "--block", "256kB")
    assert (code, err) == (0, "")
    assert json.loads(out)["faults"] == 0
    checks = by_name(out)
    assert {
        "settings", "host memory", "device cache", "page locks", "disk directory", "disk space", "O_DIRECT",
        "disk admission", "host round trip", "disk round trip", "metrics port", "vLLM", "libraries", "managers",
    } <= checks.keys()  # fmt: skip
    assert checks["settings"]["found"].startswith("3 from the file ")
    for name in ("host round trip", "disk round trip"):
        assert checks[name]["state"] == "ok"
        assert checks[name]["measured"]["block_bytes"] == 258_048  # whole pages
        assert 0 < checks[name]["measured"]["read_seconds"] < 20
    assert checks["disk space"]["measured"]["wanted_bytes"] == 64 * MB
    assert os.listdir(disk) == []


def test_caches_of_engines_are_left_alone(doctor: Doctor, tmp_path: Path) -> None:
    """A tier that is opened removes directories without an owner, where it needs the room: this one must not."""
    left = open_disk_tier(tmp_path, TIER_LAYOUT, NAMESPACE, capacity_blocks=4)
    store(left, TIER_LAYOUT, make_key(0), 0)
    left.close(keep=True)
    before = sorted(tmp_path.rglob("*"))
    code, _, _ = doctor(
        "--block", "64kB",
        DYN_KVBM_DISK_CACHE_DIR=str(tmp_path), DYN_KVBM_DISK_CACHE_GB="0.01", DYN_KVBM_DISK_UNOWNED_GB="0",
    )  # fmt: skip
    assert code == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_faults_end_with_one_and_say_what_to_do(doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, out, _ = doctor(
        DYN_KVBM_CPU_CACHE_GB="900000",
        DYN_KVBM_DISK_CACHE_GB="1",
        DYN_KVBM_DISK_CACHE_DIR=str(file / "below"),
        DYN_KVBM_MANAGER=str(tmp_path / "none.sock"),
    )
    assert code == 1
    faults = [line for line in out.splitlines() if line.startswith("FAULT")]
    assert len(faults) == 3
    assert all(" -> " in line for line in faults)
    assert "DYN_KVBM_CPU_CACHE_GB" in faults[0]
    assert "DYN_KVBM_DISK_CACHE_DIR" in faults[1]
    assert f"kvbm manager --socket {tmp_path / 'none.sock'}" in faults[2]
    assert out.splitlines()[-1].startswith("3 faults: mend host memory, disk directory, manager ")


@pytest.mark.parametrize(
    ("words", "environ", "names"),
    [
        ((), {"DYN_KVBM_METRICS": "maybe"}, "DYN_KVBM_METRICS='maybe'"),
        (("--block", "0"), {}, "--block='0'"),
        (("--block", "2TB"), {}, "--block='2TB'"),
        (("--device-cache", "big"), {}, "--device-cache='big'"),
        (("--config", "none.toml"), {}, "settings file='none.toml'"),
        (("--extra-config", "{"), {}, "--extra-config='{'"),
    ],
)
def test_bad_input_is_one_line(
    doctor: Doctor, words: tuple[str, ...], environ: dict[str, str], names: str
) -> None:
    code, out, err = doctor(*words, **environ)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kvbm: {names} cannot be used")


def test_a_line_says_what_was_checked_what_was_found_and_what_to_do() -> None:
    assert line_of(advice("disk", "it is slow", "buy another")) == "ADVICE  disk: it is slow -> buy another"


# ---- managers


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ManagerBench]:
    bench = ManagerBench(tmp_path, disk_dir=str(tmp_path / "disk"), disk_blocks=8)
    bench.engine()
    yield bench
    bench.close()


def look(bench: ManagerBench) -> managers.Managers:
    """The checks, while the bench's own thread serves."""
    results: list[managers.Managers] = []
    settings = Settings(runtime_dir=str(Path(bench.path).parent))
    thread = threading.Thread(target=lambda: results.append(managers.check_managers(settings)))
    thread.start()
    bench.until(lambda: not thread.is_alive(), "the manager was not looked at")
    return results[0]


def test_a_manager_that_answers(bench: ManagerBench) -> None:
    (found, memory), answering, block_bytes = look(bench)
    assert (found.state, answering, block_bytes) == ("ok", 1, LAYOUT.block_bytes)
    assert bench.path in found.name
    assert "unit/model: host 0 of 16 blocks" in found.found
    assert f"({format_bytes(16 * LAYOUT.block_bytes)})" in found.found
    most = sum(each.most * each.entry_bytes for each in space_tables(bench.space()))
    most += sum(each.most * each.entry_bytes for each in history_tables(bench.server._history))
    assert (memory.state, memory.measured["tables_bytes_max"]) == ("ok", most)
    assert f"of at most {format_bytes(most)} beside the tiers: " in memory.found


def test_a_disk_tier_that_is_off_is_a_fault(bench: ManagerBench) -> None:
    shutil.rmtree(bench.settings.disk_dir)
    Path(bench.settings.disk_dir).touch()  # so that it cannot come back
    bench.until(
        lambda: (bench.tick(), "cannot be used" in bench.space().disk.fault)[1],
        "the tier was not opened again in vain",
    )
    found, answering, _ = look(bench)
    assert ([check.state for check in found], answering) == (["ok", "ok", "fault"], 1)
    assert found[2].found == bench.space().disk.fault
    assert found[2].remedy


def test_a_manager_from_which_nothing_was_ever_read(bench: ManagerBench) -> None:
    bench.metrics.add("kvbm_transfer_bytes_total", 1.2e12, source="device", target="host")
    bench.metrics.add("kvbm_queried_blocks_total", 8000)
    bench.tick(7 * 3600.0)
    found, _, _ = look(bench)
    assert [check.state for check in found] == ["ok", "ok", "advice"]
    assert "1.2 TB were stored in 7.0 h and nothing was read" in found[2].found
    bench.metrics.add("kvbm_onboard_blocks_h2d", 1)
    bench.step()
    assert [check.state for check in look(bench)[0]] == ["ok", "ok"]


def test_a_socket_that_nobody_serves_and_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managers, "ANSWER_TIMEOUT_S", 0.05)
    os.chmod(tmp_path, 0o700)
    for name in ("manager.sock", "private-1.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / name))
    hanging = socket.socket(socket.AF_UNIX)
    hanging.bind(str(tmp_path / "private-2.sock"))
    hanging.listen()
    with hanging:
        checks, answering, _ = managers.check_managers(Settings(runtime_dir=str(tmp_path)))
    assert answering == 0
    assert [check.state for check in checks] == ["fault", "advice", "advice"]
    assert "did not answer" in checks[0].found
    assert "`kvbm manager`" in checks[1].remedy
    assert (checks[2].name, checks[2].measured) == (f"sockets in {tmp_path}", {"sockets": 1})
    assert checks[2].found == "1 socket of a manager that was killed: private-1.sock"


def test_many_dead_sockets_are_one_line_and_hide_no_manager(bench: ManagerBench) -> None:
    """The names of the dead come first."""
    directory = Path(bench.path).parent
    for number in range(managers.SOCKETS_MAX + 8):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / f"a{number:02}.sock"))
    found, answering, _ = look(bench)
    assert ([check.state for check in found], answering) == (["ok", "ok", "advice"], 1)
    assert bench.path in found[0].name
    assert found[2].found == "40 sockets of managers that were killed: a00.sock, a01.sock, a02.sock, …"


def test_more_managers_than_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "SOCKETS_MAX", 2)
    monkeypatch.setattr(managers, "ANSWER_TIMEOUT_S", 0.05)
    os.chmod(tmp_path, 0o700)
    with contextlib.ExitStack() as open_sockets:
        for number in range(3):
            hanging = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            hanging.bind(str(tmp_path / f"private-{number}.sock"))
            hanging.listen()
        checks, *_ = managers.check_managers(Settings(runtime_dir=str(tmp_path)))
    assert [check.state for check in checks] == ["advice", "fault", "fault"]
    assert "3 managers" in checks[0].found


def test_a_directory_that_others_can_write_to_is_a_fault(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    checks, *_ = managers.check_managers(Settings(runtime_dir=str(tmp_path)))
    assert [check.state for check in checks] == ["fault"]
    assert "DYN_KVBM_RUNTIME_DIR" in checks[0].found


def test_the_last_words_of_a_manager_that_could_not_start(tmp_path: Path) -> None:
    words = tmp_path / "private-1.sock.error"
    words.write_text("DYN_KVBM_CPU_CACHE_GB='900 GB' cannot be used: this machine has 25 GB\n")
    words.chmod(0o600)
    os.chmod(tmp_path, 0o700)
    (found,), *_ = managers.check_managers(Settings(runtime_dir=str(tmp_path)))
    assert (found.state, found.found) == ("advice", words.read_text().strip())


def test_a_real_manager_is_found_without_an_argument(doctor: Doctor, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environ |= {"DYN_KVBM_RUNTIME_DIR": str(tmp_path / "run"), "DYN_KVBM_CPU_CACHE_GB": "0.01"}
    command = [sys.executable, "-m", "kvbm.cli.main", "manager"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as manager:
        try:
            assert manager.stdout is not None
            assert manager.stdout.readline().startswith("engines use this manager")
            code, out, _ = doctor("--json")
        finally:
            manager.terminate()
    (found,) = [check for check in json.loads(out)["checks"] if check["name"].startswith("manager ")]
    assert (code, found["state"]) == (0, "ok")
    assert str(tmp_path / "run" / "manager.sock") in found["name"]
    assert "no engine has named its blocks yet" in found["found"]
    assert "keeps the settings of its own start" in json.loads(out)["checks"][0]["found"]


def test_every_setting_that_a_check_names_exists() -> None:
    known = {setting.variable for setting in SCHEMA}
    folder = Path(machine.__file__).parent
    named = {name for path in folder.glob("doctor*.py") for name in re.findall(r"DYN_\w+", path.read_text())}
    assert named <= known
