"""Which manager a command asks, as an operator runs it: the only one, one of several, one with a socket elsewhere."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.cli import main as entry
from rigs.admin import Node
from rigs.manager import KEYS, NAMESPACE

PROMPT = ("--prompt-file", "prompt.json")
COMMANDS = [
    ("inspect", "blocks"),
    ("inspect", "leases"),
    ("inspect", "namespaces"),
    ("inspect", "queues"),
    ("inspect", "events"),
    ("reset", "--tier", "G2"),
    ("top", "--once"),
    ("why",),
    ("why", *PROMPT),
    ("pin", *PROMPT),
    ("prefetch", *PROMPT),
    ("unpin", "--all"),
    ("unpin", *PROMPT),
    ("record", "trace.jsonl", "--requests", "1", "--seconds", "0.1"),
]
"""Every command that asks one manager, with words that it takes."""
OTHERS = {
    "manager": "is one",
    "config": "asks no manager",
    "doctor": "looks at all of them",
    "status": "shows all of them",
    "demo": "starts its own",
    "disk": "reads files",
    "remote": "asks the store",
    "bench": "asks no manager",
    "simulate": "asks no manager",
    "plan": "asks no manager",
    "scale": "asks no manager",
    "web": "chooses one at its start, see test_web",
}


@pytest.fixture
def node(make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.json").write_text(json.dumps(list(range(20))))
    return make_node(events_endpoint="tcp://127.0.0.1:0")


def test_no_command_is_passed_over() -> None:
    asked = {words[0] for words in COMMANDS}
    assert asked | set(OTHERS) == set(entry.COMMANDS)
    assert not asked & set(OTHERS)


def test_dead_sockets_and_records_hide_no_living_manager(node: Node, tmp_path: Path) -> None:
    """More of them than are listed, and by name they come first."""
    path = node.manage("zz.sock")
    for number in range(70):
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dead.bind(str(node.runtime_dir / f"a{number:04}.sock"))
        dead.close()
        (node.runtime_dir / f"{number:016x}.at").write_bytes(b"/nowhere/%d.sock" % number)
    (manager,) = node.json("status")["managers"]
    assert manager["socket"] == path
    assert node.json("reset", "--tier", "G2")["manager"] == path


@pytest.mark.slow
def test_with_several_managers_each_command_lists_them_and_says_how_to_choose(
    node: Node, tmp_path: Path
) -> None:
    paths = [node.manage("a.sock"), node.manage("manager.sock")]
    node.engine(paths[0], "engine-7").store(KEYS[:2])
    expected = (
        f"kvbm: 2 managers run, choose one with --manager SOCKET: {paths[0]} (model {NAMESPACE.model}, "
        f"engines engine-7); {paths[1]} (no engine has connected yet)"
    )
    for words in COMMANDS:
        assert node.refused(*words) == expected, words
    assert not (tmp_path / "trace.jsonl").exists(), "nothing half-done"
    for words in COMMANDS:
        code, _, err = node.kvbm(*words, "--manager", paths[0])
        assert code in (0, 1), (words, err)


def test_a_socket_of_any_name_in_the_runtime_directory_is_found(node: Node) -> None:
    path = node.manage("mymanager")
    (manager,) = node.json("status")["managers"]
    assert manager["socket"] == path


def test_a_manager_whose_socket_is_elsewhere_is_found_until_its_end(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = node.manage(str(elsewhere / "x.sock"))
    (record,) = node.runtime_dir.glob("*.at")
    assert record.stat().st_mode & 0o777 == 0o600
    node.engine(path).store(KEYS[:2])
    (manager,) = node.json("status")["managers"]
    assert manager["socket"] == path
    assert node.json("reset", "--tier", "G2")["manager"] == path
    assert f"manager {path}" in node.kvbm("doctor")[1]
    node.managers[0].terminate()
    node.managers[0].wait()
    assert not record.exists()
    assert "no manager runs" in node.refused("why")


def test_a_record_that_a_killed_manager_left_is_ignored_and_swept(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    node.manage(str(elsewhere / "dead.sock"))
    (record,) = node.runtime_dir.glob("*.at")
    node.managers[0].kill()
    node.managers[0].wait()
    assert "no manager runs" in node.refused("why")
    path = node.manage(str(elsewhere / "alive.sock"))
    assert not record.exists()
    assert node.json("reset", "--tier", "all")["manager"] == path


@pytest.mark.slow
def test_a_record_that_others_could_have_written_is_not_believed(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = node.manage(str(elsewhere / "x.sock"))
    (record,) = node.runtime_dir.glob("*.at")
    record.chmod(0o666)
    assert "no manager runs" in node.refused("why")
    record.unlink()
    (tmp_path / "record").write_bytes(os.fsencode(path))
    (tmp_path / "record").chmod(0o600)
    record.symlink_to(tmp_path / "record")
    assert "no manager runs" in node.refused("why")
    record.unlink()
    for content in (b"relative.sock", b"/" + b"x" * 200, b"/a\0b", b""):
        record.write_bytes(content)
        record.chmod(0o600)
        assert "no manager runs" in node.refused("why")


def test_a_manager_without_a_place_for_its_record_serves(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    node.runtime_dir.mkdir()
    node.runtime_dir.chmod(0o777)
    path = node.manage(str(elsewhere / "x.sock"))
    assert "DYN_KVBM_RUNTIME_DIR" in node.refused("why")
    assert node.kvbm("why", "--manager", path)[0] == 0
