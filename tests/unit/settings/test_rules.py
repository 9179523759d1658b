"""The rules for the settings as a whole: their readers, and the page of the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest

import kvbm
from kvbm.settings import SCHEMA, Kind, Setting, Settings, variable
from kvbm.settings.ineffective import INEFFECTIVE
from kvbm.settings.reference import page
from kvbm.settings.setting import declared
from rigs.checkout import ROOT

READ_AS = {"object_enabled": "object_on"}
"""Settings that others read through a property of `Settings`."""


@pytest.mark.parametrize("setting", SCHEMA, ids=lambda setting: setting.field)
def test_a_setting_is_read_by_someone_or_says_that_it_has_no_effect(setting):
    root = Path(kvbm.__file__).parent
    readers = [path for path in root.rglob("*.py") if path.parent.name != "settings" or path.stem == "advice"]
    name = READ_AS.get(setting.field, setting.field)
    read = any(re.search(rf"settings\.{name}\b", path.read_text()) for path in readers)
    assert read == (not setting.no_effect)


ENGINE_SIDE = ("vllm_integration", "trtllm_integration", "leader", "worker", "transfer", "client", "fleet")
MANAGER_SIDE = ("manager", "tiers", "observe", "policy", "fleet")


@pytest.mark.parametrize("setting", SCHEMA, ids=lambda setting: setting.field)
def test_who_reads_a_setting_is_who_is_said_to(setting):
    """Advice reckons for the manager, so what it reads counts as read there."""
    if setting.no_effect:
        return
    root = Path(kvbm.__file__).parent
    reads = re.compile(rf"settings\.{READ_AS.get(setting.field, setting.field)}\b")
    derived = {"disk_admission", "disk_offload_filter", "host_bytes", "disk_bytes", "staging_bytes"}

    def read_in(parts):
        files = [
            path
            for part in parts
            for path in ((root / part).rglob("*.py") if "." not in part else [root / part])
        ]
        return any(reads.search(path.read_text()) for path in files)

    by_engine = read_in(ENGINE_SIDE)
    by_manager = read_in(MANAGER_SIDE) or setting.field in derived
    # The socket and the directory of a manager are arguments by the time that it serves.
    by_manager = by_manager or setting.field in ("manager", "runtime_dir")
    if setting.field == "peer_uids":  # both ask for those that are trusted
        reads = re.compile(r"settings\.trusted_peer_uids\b")
        by_engine, by_manager = read_in(ENGINE_SIDE), read_in(MANAGER_SIDE)
    assert (by_engine, by_manager) == {
        "manager": (False, True),
        "engine": (True, False),
        "both": (True, True),
    }[setting.reader]


def test_names_are_unique():
    for key in ("field", "variable", "flag"):
        names = [getattr(setting, key) for setting in SCHEMA if getattr(setting, key)]
        assert len(names) == len(set(names))
    assert not {setting.variable for setting in SCHEMA} & {row.variable for row in INEFFECTIVE}


@pytest.mark.parametrize("setting", SCHEMA, ids=lambda setting: setting.field)
def test_a_default_is_a_value_that_its_row_accepts(setting):
    default = getattr(Settings(), setting.field)
    if default is None:
        return
    if isinstance(default, bool):
        assert setting.kind is Kind.SWITCH
    elif setting.kind is Kind.PART:
        assert 0 <= default <= 1
    elif isinstance(default, int):
        assert setting.minimum <= default <= setting.maximum
    elif setting.choices:
        assert default in setting.choices
    else:
        assert setting.kind not in (Kind.SWITCH, Kind.CHOICE, Kind.SIZE, Kind.COUNT)


def test_a_row_takes_from_the_type_what_it_does_not_name():
    def row(plain, *names):
        return declared("x", Annotated[plain, Setting("DYN_KVBM_X", "", *names), "what it is for"])

    assert row(bool).kind is Kind.SWITCH
    assert row(int | None).kind is Kind.COUNT
    assert row(int | None, Kind.SIZE).kind is Kind.SIZE
    assert row(str | None).kind is Kind.TEXT
    assert row(float).kind is Kind.PART
    assert (row(Literal["a", "b"]).kind, row(Literal["a", "b"]).choices) == (Kind.CHOICE, ("a", "b"))
    assert (row(int).field, row(int).meaning) == ("x", "what it is for")


def test_the_variable_of_a_field():
    assert [variable(setting.field) for setting in SCHEMA] == [setting.variable for setting in SCHEMA]
    with pytest.raises(AssertionError, match="no setting is called host_byte"):
        variable("host_byte")


def test_the_environment_is_read_here_only():
    root = Path(kvbm.__file__).parent
    reading = re.compile(r"\bos\.(environ|getenv)\b|from os import .*\b(environ|getenv)\b")
    guilty = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.parent.name != "settings" and reading.search(path.read_text())
    ]
    assert guilty == []


def test_settings_import_no_engine():
    code = (
        "import sys, kvbm.settings, kvbm.observe.exporter, kvbm.observe.log\n"
        "print([name for name in ('torch', 'vllm', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")
def test_reference_page_is_current():
    written = ROOT / "docs/reference/settings.md"
    assert written.read_text() == page(), (
        "run: python -m kvbm.settings.reference > docs/reference/settings.md"
    )
    for name in (*(setting.variable for setting in SCHEMA), *(row.variable for row in INEFFECTIVE)):
        assert page().count(f"`{name}`") >= 1
