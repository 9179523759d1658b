"""Whatever a user mistypes, in every command and every option: one line, exit status 2, and nothing half-done.

The commands and their options are taken from the command line itself, so that a new one is tried too.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvbm.cli import main as entry
from rigs.admin import Node
from rigs.manager import KEYS

BAD = "/dev/null/nothing"
"""No number, no size, no name of a policy, no file that can be read or made."""
BAD_SOCKET = "/" + "x" * 200

TRACE, PROMPT = "trace.jsonl", "prompt.json"
WORDS = {
    "manager": ("--socket", "m.sock", "--disk", "1GB", "--disk-dir", "disk"),
    "reset": ("--tier", "G2"),
    "pin": ("--prompt-file", PROMPT),
    "prefetch": ("--prompt-file", PROMPT),
    "unpin": ("--all",),
    "top": ("--once",),
    "record": ("out.jsonl", "--seconds", "0.1"),
    "simulate": (TRACE, "--host", "100%", "--disk", "100%", "--times", "--bytes-per-token", "1KiB"),
    "plan": (TRACE, "--target-ttft", "9s@p90", "--bytes-per-token", "1KiB"),
    "scale": (TRACE,),
    "config check": ("kvbm.toml",),
    "disk ls": (".",),
    "disk verify": (".",),
    "disk clear": (".",),
    "remote show": ("file:///nowhere",),
    "remote collect": ("--dry-run",),
    "remote clear": ("--all",),
}
"""What each command needs beside the option that is tried."""
WITH = {
    ("manager", "--runtime-dir"): (),
    ("unpin", "--prompt-file"): (),
    ("why", "--model"): ("--prompt-file", PROMPT),
    ("why", "--namespace"): ("--prompt-file", PROMPT),
}
"""Options that are tried with other words than those."""
ANY_TEXT = {
    ("manager", "--remote-key-file"),
    ("manager", "--remote-key-command"),
    ("manager", "--fleet-certs"),
    ("simulate", "--model"),
    ("plan", "--model"),
}
"""Options that take any text, or are not read without another one."""
SAID = {
    "--config": "settings file",
    "--runtime-dir": "DYN_KVBM_RUNTIME_DIR",
    "--metrics-host": "DYN_KVBM_METRICS_HOST",
    "--disk-dir": "DYN_KVBM_DISK_CACHE_DIR",
    "--disk-admission": "DYN_KVBM_DISK_ADMISSION",
    "--remote-admission": "DYN_KVBM_REMOTE_ADMISSION",
    "--eviction": "DYN_KVBM_EVICTION",
}
"""The lines call these by other names: the same setting may come from elsewhere."""
TYPERS = {"--install-completion", "--show-completion"}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and sub-command that can be run, by its words."""
    for name in entry.COMMANDS:
        top = typer.main.get_command(importlib.import_module(f"kvbm.cli.{name}").app)
        below = getattr(top, "commands", None)
        yield from (
            ((f"{name} {part}", command) for part, command in below.items()) if below else ((name, top),)
        )


EVERY = dict(commands())
OPTIONS = [
    (name, option.opts[-1])
    for name, command in EVERY.items()
    for option in command.params
    if option.param_type_name == "option" and not getattr(option, "is_flag", False)
]
FLAGS = [
    (name, flag)
    for name, command in EVERY.items()
    for option in command.params
    if getattr(option, "is_flag", False) and not TYPERS & set(option.opts)
    for flag in (*option.opts, *option.secondary_opts)
]
REQUIRED = [
    (name, option.opts[-1]) for name, command in EVERY.items() for option in command.params if option.required
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A manager that holds blocks: a command that would take the bad value would have something to do."""
    made = Node(tmp_path_factory.mktemp("node"))
    try:
        made.engine(made.manage()).store(KEYS[:2])
        yield made
    finally:
        made.close()


@pytest.fixture
def place(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that are right."""
    monkeypatch.chdir(tmp_path)
    # A manager's log would stay with this process, and go to a stream that pytest has closed by then.
    monkeypatch.setattr("kvbm.cli.manager.configure", lambda level: None)
    for name in set(os.environ) - set(node.environment):
        monkeypatch.delenv(name)
    for name, value in node.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / PROMPT).write_text(json.dumps(list(range(20))))
    (tmp_path / "kvbm.toml").write_text('host_bytes = "1GB"\n')
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} for at in (0, 9)]
    (tmp_path / TRACE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def refused(place: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that must refuse its words."""
    before = {path: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(SystemExit) as ended:
        entry.main(words)
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, ""), (words, err)
    assert err.startswith("kvbm: ") and err.count("\n") == 1 and err.endswith("\n"), err
    # A lock's file stays: whoever opens it next must find the same one.
    after = {path: path.read_bytes() for path in place.iterdir() if path.suffix != ".lock"}
    assert after == before, "nothing half-done"
    return err


def bad_value(option: str) -> str:
    return BAD_SOCKET if option in ("--manager", "--socket") else BAD


@pytest.mark.parametrize(("name", "option"), [each for each in OPTIONS if each not in ANY_TEXT])
def test_a_bad_value_of_any_option(
    place: Path, capfd: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    words = WITH.get((name, option), WORDS.get(name, ()))
    said = refused(place, capfd, *name.split(), *words, f"{option}={bad_value(option)}")
    assert option in said or SAID.get(option, option) in said, said


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_switch_takes_no_value(
    place: Path, capfd: pytest.CaptureFixture[str], name: str, flag: str
) -> None:
    assert flag in refused(place, capfd, *name.split(), *WORDS.get(name, ()), f"{flag}=3")


@pytest.mark.parametrize(("name", "missing"), REQUIRED)
def test_what_is_required_is_asked_for(
    place: Path, capfd: pytest.CaptureFixture[str], name: str, missing: str
) -> None:
    said = refused(place, capfd, *name.split())
    assert ("Missing" in said and "--" in missing) or "Missing argument" in said, said
    assert missing in said or not missing.startswith("-"), said


@pytest.mark.parametrize("name", EVERY)
def test_an_unknown_option(place: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    assert "--nonsense" in refused(place, capfd, *name.split(), *WORDS.get(name, ()), "--nonsense")
    assert "--nonsense" in refused(place, capfd, *name.split(), *WORDS.get(name, ()), "--nonsense=3")


@pytest.mark.parametrize("name", EVERY)
def test_a_word_too_many_or_one_that_is_no_file(
    place: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    needed = ("reset", "unpin", "pin", "prefetch", "top", "remote clear")
    words = [word for word in WORDS.get(name, ()) if name in needed]
    words += [*WORDS["plan"][1:]] if name == "plan" else []
    assert "nothing" in refused(place, capfd, *name.split(), *words, BAD)


@pytest.mark.parametrize("words", [("nonsense",), ("--nonsense",), ("--version=3",)])
def test_an_unknown_command(place: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert words[0].partition("=")[0] in refused(place, capfd, *words)


@pytest.mark.parametrize("group", sorted({name.split()[0] for name in EVERY if " " in name}))
def test_an_unknown_part_of_a_command(place: Path, capfd: pytest.CaptureFixture[str], group: str) -> None:
    assert "'nonsense'" in refused(place, capfd, group, "nonsense")


def test_nothing_of_the_command_line_is_left_out() -> None:
    assert {name.split()[0] for name in EVERY} == set(entry.COMMANDS)
    assert set(WORDS) <= set(EVERY)
    assert set(WITH) | ANY_TEXT <= set(OPTIONS)
