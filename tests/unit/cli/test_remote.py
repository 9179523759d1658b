"""`kvbm remote`: what a directory that nodes share holds, collecting in it, and clearing it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli.main import main
from kvbm.clock import monotonic
from kvbm.settings import SCHEMA
from kvbm.tiers.remote.blob_tier import open_blob_tier
from kvbm.tiers.remote.drivers.opening import open_blobs
from rigs.stored_packs import KEYS, LAYOUT, ONE, TWO, put

Remote = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A shared directory with a pack of each of two namespaces."""
    for namespace, keys in ((ONE, KEYS[:3]), (TWO, KEYS[3:])):
        tier = open_blob_tier(open_blobs(f"file://{tmp_path}", clock=monotonic), LAYOUT, namespace)
        put(tier, keys)
        tier.close()
    return f"file://{tmp_path}"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str) -> Remote:
    for setting in SCHEMA:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("DYN_KVBM_REMOTE", place)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["remote", *words])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def of(remote: Remote, *words: str) -> Any:
    code, out, err = remote(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_show(remote: Remote, place: str) -> None:
    code, out, _ = remote("show")
    assert code == 0
    assert ONE.short in out and TWO.short in out
    found = of(remote, "show", place)
    assert found["place"] == place
    assert {each["fingerprint"]: each["blocks"] for each in found["namespaces"]} == {
        ONE.fingerprint.hex(): 3,
        TWO.fingerprint.hex(): 5,
    }
    assert (
        found["pack_bytes"]
        == sum(each["pack_bytes"] for each in found["namespaces"])
        > 8 * LAYOUT.block_bytes
    )


def test_collect_only_says_or_does(remote: Remote) -> None:
    assert of(remote, "collect")["removed_packs"] == 0
    would = of(remote, "collect", "--max", "1kB", "--dry-run")
    assert (would["removed_packs"], would["dry_run"], len(would["named"])) == (2, True, 2)
    assert sum(each["packs"] for each in of(remote, "show")["namespaces"]) == 2
    code, out, _ = remote("collect", "--max", "1kB", "--dry-run")
    assert (code, "would be removed" in out, "/packs/" in out) == (0, True, True)
    assert of(remote, "collect", "--max", "1kB")["removed_packs"] == 2
    assert sum(each["packs"] for each in of(remote, "show")["namespaces"]) == 0


def test_clear_asks_and_removes_what_was_named(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, _, err = remote("clear", "--namespace", ONE.short)
    assert (code, "Remove 1 packs" in err) == (1, True)
    assert len(of(remote, "show")["namespaces"]) == 2
    done = of(remote, "clear", "--namespace", ONE.short, "--yes")
    assert done["namespaces"] == [ONE.fingerprint.hex()]
    assert [each["fingerprint"] for each in of(remote, "show")["namespaces"]] == [TWO.fingerprint.hex()]
    assert of(remote, "clear", "--all", "--yes")["namespaces"] == [TWO.fingerprint.hex()]
    assert of(remote, "show")["namespaces"] == []


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (("clear",), "--namespace="),
        (("clear", "--all", "--namespace", "aa"), "--namespace="),
        (("clear", "--namespace", "ffff00001111"), "one namespace in the store"),
        (("collect", "--max", "much"), "--max="),
        (("show", "ftp://x"), "URL="),
        (("show", "redis://user:very-secret@/x"), "URL="),
        (("show", "file:///nowhere/at/all"), "is it mounted?"),
    ],
)
def test_what_is_wrong_is_one_line(remote: Remote, words: tuple[str, ...], accepted: str) -> None:
    code, out, err = remote(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert accepted in err and "very-secret" not in err


def test_without_a_store_it_says_how_to_name_one(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_KVBM_REMOTE")
    code, _, err = remote("show")
    assert (code, "DYN_KVBM_REMOTE" in err) == (2, True)
