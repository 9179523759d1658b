"""Under a vLLM that is too old: one line with what is supported, and nothing broken for who does not use us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvbm
from kvbm.vllm_integration.versions import OLDEST, SUPPORTED, too_old

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
FACTORY = "distributed/kv_transfer/kv_connector/factory.py"
OLD_BASE = "class KVConnectorBase_V1:\n    def __init__(self, vllm_config, role):\n        pass\n"
REGISTER = "from kvbm.vllm_integration.plugin import register; register(); print('serves')"
USE = "import kvbm.vllm_integration.connector"


def run(directory: Path, version: str, code: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """Run this beside a package that says it is vLLM of that version, and has these modules."""
    for path, text in {"__init__.py": f"__version__ = {version!r}\n", **modules}.items():
        file = directory / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for parent in file.relative_to(directory).parents[:-1]:
            (directory / parent / "__init__.py").touch()
    source = str(Path(kvbm.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{source}"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("version", ["0.20.0", "0.27.1rc1.dev3+gabc"])
def test_an_old_vllm_is_refused_in_one_line(tmp_path: Path, version: str) -> None:
    done = run(tmp_path, version, USE, **{BASE: OLD_BASE})
    assert done.returncode != 0
    assert done.stderr.count("Error") == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line == f"ImportError: vLLM {version} is not supported by this kvbm: {SUPPORTED}"


def test_a_vllm_of_no_version_that_lacks_what_we_need_is_refused_with_that(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the connector imports torch; torch is not installed")
    done = run(tmp_path, "dev", USE, **{BASE: OLD_BASE})
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(
        f"ImportError: vLLM dev is not supported by this kvbm: {SUPPORTED} (cannot import name"
    )
    assert "During handling" not in done.stderr


def test_a_vllm_without_connectors_that_does_not_use_us_serves(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5.0", REGISTER)
    assert (done.returncode, done.stdout) == (0, "serves\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vLLM 0.5.0 is not supported by this kvbm: {SUPPORTED} (No module named")


@pytest.mark.swallows("^ModuleNotFoundError: No module named 'vllm.v1'")
def test_an_old_vllm_that_does_not_use_us_hears_nothing(tmp_path: Path) -> None:
    """It learns the names; a user who then asks for one gets one line."""
    factory = (
        "class KVConnectorFactory:\n"
        "    @classmethod\n"
        "    def register_connector(cls, name, module_path, class_name):\n"
        "        print(name, module_path)\n"
    )
    done = run(tmp_path, "0.20.0", REGISTER, **{FACTORY: factory})
    names = [f"{name} kvbm.vllm_integration.connector\n" for name in ("DynamoConnector", "PdConnector")]
    assert done.stdout == "".join(names) + "serves\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("0.27.9", True),
        ("0.9.2", True),
        ("0.28.0", False),
        ("0.28.0rc1", False),
        ("0.33.0+cpu", False),
        ("1.0.0", False),
        ("dev", False),
        ("0.1.dev1+gabc", False),
        ("0.1.0", True),
        ("", False),
    ],
)
def test_versions(version: str, old: bool) -> None:
    assert too_old(version) is old


def test_the_range_begins_with_the_oldest() -> None:
    assert SUPPORTED.startswith(f"{OLDEST[0]}.{OLDEST[1]} ")
