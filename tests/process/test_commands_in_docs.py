"""The command lines of the documents: every one is parsed, and those that need no more than a manager are run."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from kvbm.cli.main import COMMANDS
from kvbm.cli.prompts import candidates
from rigs.admin import Node
from rigs.checkout import ROOT
from rigs.manager_probe import free_port

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PARSED_ONLY = {
    "manager": "it stays in the foreground (tests/process/test_manager.py runs it, test_fleet_commands.py a fleet)",
    "web": "it stays in the foreground (tests/process/test_web.py runs it)",
    "top": "it takes a terminal (its tests run it in one), unless --once is given",
    "simulate": "the traces are downloaded, and take minutes (tests/unit/cli/test_simulate.py runs it)",
    "plan": "its trace and model are the reader's own",
    "scale": "the traces are downloaded, and take hours",
    "record": "it records for an hour (tests/unit/cli/test_record.py runs it)",
    "bench": "it measures this machine for many minutes",
    "demo": "it starts engines",
}
"""Commands whose lines are not run, and why."""
TOKENS = list(range(20))
UNKNOWN_REQUEST = "no request of this id is there: status 2, in one line"


def code_lines() -> list[str]:
    """The lines of blocks of code; one that ends in a backslash goes on."""
    blocks = (
        block
        for page in PAGES
        for block in re.findall(
            r"^ *```[^\n]*\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
    )
    return [line for block in blocks for line in re.sub(r" *\\\n\s*", " ", block).splitlines()]


def command_lines() -> list[str]:
    """The calls of `kvbm` in blocks of code."""
    found: dict[str, None] = {}
    for line in code_lines():
        if match := re.match(r"\s*(?:\$ )?(?:[A-Z]\w*=\S+ )*(kvbm [a-z].*)", line):
            found[match[1]] = None
    return list(found)


LINES = command_lines()


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    # Placeholders for what is the reader's own.
    return [{"DIR": ".", "FILE": "kvbm.toml"}.get(word, word) for word in words[1:]]


def parsed(words: list[str]) -> Any:
    """The command that these words call, with all of them taken as it takes them. Raises the parser's error."""
    command: Any = typer.main.get_command(importlib.import_module(f"kvbm.cli.{words[0]}").app)
    rest = words[1:]
    if getattr(command, "commands", None):
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context("kvbm", rest):
        return command


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_taken_by_the_command_line(line: str) -> None:
    parsed(words_of(line))


def test_a_line_that_is_wrong_is_noticed() -> None:
    for line in ("kvbm reset", "kvbm reset --tier G2 --nonsense", "kvbm config check"):
        with pytest.raises(Exception, match=r"[Mm]issing|No such option") as caught:
            parsed(words_of(line))
        assert hasattr(caught.value, "format_message"), "the parser's own error"


def test_no_call_is_passed_over() -> None:
    """Neither in a pipe, nor behind another program's name or variables."""
    commands = "|".join(COMMANDS)
    calls = [line for line in code_lines() if re.search(rf"(?:^|[\s(;&|])kvbm (?:{commands})\b", line)]
    printed = [line for line in calls if not any(known in line for known in LINES)]
    # What a program prints may name a command between backticks, and is no call.
    assert [line for line in printed if not re.search(rf"`kvbm (?:{commands})\b", line)] == []


def test_lines_were_found() -> None:
    called = {words_of(line)[0] for line in LINES}
    assert {"manager", "status", "inspect", "reset", "pin", "unpin", "prefetch", "why", "doctor"} <= called
    assert set(PARSED_ONLY) - called <= {"bench", "demo"}


RUN = [line for line in LINES if words_of(line)[0] not in PARSED_ONLY or "--once" in line]


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN)
def test_what_needs_only_a_manager_is_run(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    (tmp_path / "kvbm.toml").write_text('host_bytes = "1GB"\n')
    (tmp_path / "shared").mkdir()
    node = make_node(
        **({"remote": f"file://{tmp_path / 'shared'}"} if line.startswith("kvbm remote") else {})
    )
    announces = ("--events", f"tcp://127.0.0.1:{free_port()}") if "inspect events" in line else ()
    engine = node.engine(node.manage("manager.sock", *announces))
    (space,) = node.json("inspect", "namespaces")["namespaces"]
    engine.store(next(candidates(SimpleNamespace(**space), TOKENS, "prompt")))  # type: ignore[arg-type]
    code, out, err = node.kvbm(*words_of(line))
    if re.match(r"kvbm why [a-z]", line):
        assert (code, "the id of one of the last" in err) == (2, True), UNKNOWN_REQUEST
    else:
        # 1 is an answer of these: there is no pin, no such session, and a check may fail on this machine.
        accepted = (0, 1) if words_of(line)[0] in ("doctor", "unpin") or "--session" in line else (0,)
        assert code in accepted, (out, err)
        assert out.strip() or "no such session is known" in err, err
