"""A removed setting is ignored with one line that names the substitute, wherever its name comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm.settings import FIELDS, SCHEMA, load_settings, reference
from kvbm.settings import ineffective as names
from kvbm.settings.ineffective import INEFFECTIVE, REMOVED, RemovedSetting
from kvbm.settings.load import file_faults

HOST = {"DYN_KVBM_CPU_CACHE_GB": "4"}
TAPE = RemovedSetting("DYN_KVBM_TAPE_GB", "tape_bytes", "set DYN_KVBM_DISK_CACHE_GB")
LINE = "was removed and is ignored: set DYN_KVBM_DISK_CACHE_GB"


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "REMOVED", (TAPE,))
    monkeypatch.setattr(reference, "REMOVED", (TAPE,))


def test_a_variable() -> None:
    assert load_settings({**HOST, "DYN_KVBM_TAPE_GB": "4"}).warnings == [f"DYN_KVBM_TAPE_GB {LINE}"]
    assert load_settings({**HOST, "DYN_KVBM_TAPE_GB": " "}).warnings == []


def test_a_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvbm.toml"
    file.write_text('host_bytes = "4GB"\ntape_bytes = "1TB"\n')
    assert load_settings({}, file=file).warnings == [f"{file}: tape_bytes {LINE}"]
    assert file_faults(file) == [f"{file}: tape_bytes {LINE}"]


def test_a_key_of_an_engines_configuration() -> None:
    loaded = load_settings(HOST, extra_config={"tape_bytes": "1TB", "metrics": True})
    assert loaded.warnings == [f"kv_connector_extra_config: tape_bytes {LINE}"]
    assert loaded.settings.metrics


def test_the_page_lists_it() -> None:
    assert reference.page().endswith("| `DYN_KVBM_TAPE_GB` | `tape_bytes` | set DYN_KVBM_DISK_CACHE_GB |\n")


def test_what_is_removed_is_not_there() -> None:
    assert not {row.field for row in REMOVED} & FIELDS.keys()
    known = {row.variable for row in (*SCHEMA, *INEFFECTIVE)}
    assert not {row.variable for row in REMOVED} & known
