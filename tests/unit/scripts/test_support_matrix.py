"""The script that writes the support matrix says what the tests ran on, and which releases are tested."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import kvbm
from kvbm.vllm_integration.versions import SUPPORTED
from rigs.checkout import ROOT

SCRIPTS = ROOT / "scripts"
CONNECTOR = Path(kvbm.__file__).parent / "vllm_integration" / "connector" / "dynamo_connector.py"

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="a source distribution has no scripts")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("support_matrix")


def test_amx_that_is_hidden_from_the_tests_is_none(script: ModuleType) -> None:
    with_amx = "flags : fpu amx_bf16 amx_tile amx_int8"
    assert script.has_amx(with_amx, {})
    assert not script.has_amx(with_amx, {"KVBM_TESTS_AMX": "no"})
    assert not script.has_amx("flags : fpu avx512f", {})


def test_what_is_said_to_be_supported_is_what_is_tested(script: ModuleType) -> None:
    oldest, newest = (release.rpartition(".")[0] for release in (script.RELEASES[0], script.RELEASES[-1]))
    assert SUPPORTED.startswith(f"{oldest} to {newest}, ")
    assert f"({SUPPORTED})" in CONNECTOR.read_text(encoding="utf-8").partition("\n")[0]
