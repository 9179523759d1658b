"""The commands of docs/guides/sglang.md, as they are written: smaller sizes, a small model, and what a CPU needs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigs.checkout import ROOT
from rigs.manager_probe import wait_for
from rigs.sglang.installation import environment, sglang_python
from rigs.sglang.modes import hicache, plain
from rigs.sglang.scenarios import Stage, wait_until_found

GUIDE = (ROOT / "docs/guides/sglang.md").read_text()
BLOCKS = [
    block.replace("\\\n", " ") for block in re.findall(r"^```\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
]
LAUNCHES = [block for block in BLOCKS if re.search(r"--model-path MODEL\s+--enable", block)]
(SHARED,) = (block for block in BLOCKS if "kvbm manager" in block)
STORAGE, LINKER = LAUNCHES
SIZE_GB = "0.5"
ARGUMENTS_OF = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
given, bare = (vars(parser.parse_args(words)) for words in (sys.argv[1:], ["--model-path", "-"]))
print(json.dumps({name: value for name, value in given.items() if value != bare[name]}))
"""


def variables_of(words: list[str], disk: Path) -> dict[str, str]:
    """What a command sets before it, with sizes that are had here."""
    given = dict(word.split("=", 1) for word in words if re.match(r"DYN_KVBM_\w+=", word))
    return {
        name: SIZE_GB if name.endswith("_GB") else str(disk) if value == "DIR" else value
        for name, value in given.items()
    }


def arguments_of(words: list[str], model: Path) -> dict[str, Any]:
    """What SGLang's own parser reads from a command's flags."""
    flags = words[words.index("sglang.launch_server") + 1 :]
    flags = [str(model) if word == "MODEL" else word for word in flags]
    command = [str(sglang_python()), "-c", ARGUMENTS_OF, *flags]
    parsed = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert parsed.returncode == 0, parsed.stderr
    return dict(json.loads(parsed.stdout.splitlines()[-1]))


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variable that `kvbm manager` prints, started as the guide says."""
    line = SHARED.splitlines()[0].partition("#")[0]
    words = ["128MB" if re.fullmatch(r"\d+GB", word) else word for word in shlex.split(line)]
    assert words[:2] == ["kvbm", "manager"]
    words = [str(tmp_path / "disk") if word == "DIR" else word for word in words[1:]]
    said = tmp_path / "said"
    with said.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbm.cli.main", *words],
            stdout=out,
            env=os.environ | {"DYN_KVBM_RUNTIME_DIR": str(tmp_path)},
        )
    try:
        wait_for(lambda: "DYN_KVBM_MANAGER=" in said.read_text(), 20.0, "the manager says nothing")
        yield dict([re.findall(r"(DYN_KVBM_MANAGER)=(\S+)", said.read_text())[0]])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0


@pytest.mark.parametrize("command", [STORAGE, LINKER], ids=["storage", "linker"])
def test_a_launch_of_its_own(stage: Stage, reference: list[list[int]], tmp_path: Path, command: str) -> None:
    words = shlex.split(command)
    hits(stage, reference, words, variables_of(words, tmp_path / "disk"))


def test_a_launch_with_a_shared_manager(
    stage: Stage, reference: list[list[int]], shared: dict[str, str]
) -> None:
    assert list(variables_of(shlex.split(SHARED.splitlines()[1]), Path())) == list(shared)
    hits(stage, reference, shlex.split(STORAGE), shared)


def hits(stage: Stage, reference: list[list[int]], words: list[str], variables: dict[str, str]) -> None:
    """An engine with a command's flags and these variables finds again what it computed."""
    given = arguments_of(words, stage.model)
    cpu = hicache(stage.model) if given.get("enable_hierarchical_cache") else plain(stage.model)
    variables = {"DYN_KVBM_RUNTIME_DIR": str(stage.directory), "DYN_KVBM_ONBOARD": "always"} | variables
    with stage.engine(cpu | given, variables) as engine:
        engine.generate([[1, 2, 3]])
        wait_until_found(engine, reference)
        engine.end()
