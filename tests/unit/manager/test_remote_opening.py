"""The settings of the remote tier → the tier, its rules and its admission: each of them has its effect."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.clock import ManualClock, monotonic
from kvbm.errors import SettingsError
from kvbm.layout import Namespace
from kvbm.manager.remote_opening import RemoteOpening
from kvbm.manager.write_behind import RemoteRules
from kvbm.policy import AdmissionPolicy, AdmitAll
from kvbm.settings import Settings
from kvbm.tiers.remote.blob_tier import BlobTier
from kvbm.tiers.remote.named_store import open_named_store
from rigs.manager import LAYOUT, NAMESPACE

SHARE = 2
Open = Callable[..., tuple[BlobTier, RemoteRules, AdmissionPolicy]]
KEY = "one:" + base64.b64encode(bytes(range(32))).decode()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """The remote tier of these settings, over a directory; one of two namespaces."""
    with contextlib.ExitStack() as ends:

        def make(**settings: Any) -> tuple[BlobTier, RemoteRules, AdmissionPolicy]:
            given = {"remote": f"file://{tmp_path}", "salt_share": 0.1, **settings}
            opening = RemoteOpening(Settings(**given), ManualClock(1.0))
            ((tier, rules, admission),) = opening.open(NAMESPACE, LAYOUT, SHARE)
            assert isinstance(tier, BlobTier)
            ends.callback(tier.close)
            return tier, rules, admission

        yield make


def test_what_is_read_and_kept(opened: Open) -> None:
    tier, _, _ = opened(
        remote_known_blocks=1000, remote_deadline_ms=700, remote_collect=False,
        remote_ttl_hours=5, remote_bytes=10**9,
    )  # fmt: skip
    options = tier._options
    assert (options.load_deadline_s, options.collect) == (0.7, False)
    assert (options.ttl_s, options.capacity_bytes) == (5 * 3600.0, 10**9)
    assert options.catalogue_blocks == tier.describe()["blocks_max"] == 1000 // SHARE


def test_what_is_written(opened: Open) -> None:
    _, rules, admission = opened(
        remote_write=False, remote_linger_s=3, remote_write_bytes=10**9, remote_requests=7
    )
    assert rules == RemoteRules(
        writes=False,
        linger_s=3.0,
        bytes_per_hour=10**9 // SHARE,
        requests_per_hour=4,
        known_tenants_only=False,
    )
    assert isinstance(admission, AdmitAll)
    assert not isinstance(opened(remote_admission="filter")[2], AdmitAll)


def test_a_policy_that_is_not_known_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="DYN_KVBM_REMOTE_ADMISSION="):
        RemoteOpening(Settings(remote=f"file://{tmp_path}", remote_admission="nope"), ManualClock(1.0))


@pytest.mark.parametrize("source", ["file", "command"])
def test_with_a_key_only_blocks_of_known_tenants_are_written(
    opened: Open, tmp_path: Path, source: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    settings = {"remote_key_file": str(file)} if source == "file" else {"remote_key_command": f"cat {file}"}
    _, rules, _ = opened(**settings)
    assert rules.known_tenants_only
    with pytest.raises(SettingsError, match="DYN_KVBM_SALT_SHARE"):
        opened(**settings, salt_share=0.0)


@pytest.mark.parametrize("source", ["remote_key_file", "remote_key_command"])
def test_the_library_names_its_own_parameters(tmp_path: Path, source: str) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    keys = {"remote_key_file": str(file), "remote_key_command": f"cat {file}"}
    for settings, field in (
        (keys, "remote_key_command"),
        ({source: keys[source], "salt_share": 0.0}, "salt_share"),
    ):
        with pytest.raises(SettingsError) as caught:
            RemoteOpening(
                Settings(remote=f"file://{tmp_path}", **settings), ManualClock(1.0), lambda name: name
            )  # type: ignore[arg-type]
        assert caught.value.field == field
        assert (source if field == "salt_share" else "remote_key_file") in str(caught.value)
        assert "DYN_KVBM" not in str(caught.value)


def test_a_namespace_that_nobody_else_can_name_has_none(tmp_path: Path) -> None:
    alone = Namespace(model="m", fields=(("weights", "aa"),), ephemeral=True)
    opening = RemoteOpening(Settings(remote=f"file://{tmp_path}"), ManualClock(1.0))
    assert opening.open(alone, LAYOUT, 1) == []


def test_the_variables_of_the_original_name_a_bucket() -> None:
    pytest.importorskip("obstore")
    settings = Settings(
        object_enabled=True, object_bucket="kv-{worker_id}", object_endpoint="http://127.0.0.1:1",
        object_region="eu-west-1", object_access_key="the-user", object_secret_key="the-secret",
    )  # fmt: skip
    store = open_named_store(settings, ManualClock(1.0), 1.0)
    assert store.place.startswith("s3://kv-0?")
    assert "endpoint=http://127.0.0.1:1" in store.place and "region=eu-west-1" in store.place
    assert "the-" not in store.place
    store.close()


def test_the_field_of_a_store_that_cannot_be_used_is_named() -> None:
    for settings, url, field in (
        (Settings(remote="file://relative/path"), "", "DYN_KVBM_REMOTE="),
        (Settings(object_enabled=True, object_bucket="NO"), "", "DYN_KVBM_OBJECT_BUCKET="),
        (Settings(), "ftp://a", "URL="),
    ):
        with pytest.raises(SettingsError, match=field):
            open_named_store(settings, ManualClock(1.0), 1.0, url)


def test_the_arguments_of_a_key_command_are_not_shown() -> None:
    """They may have secrets."""
    for settings in (
        {"remote_key_command": "fetch 'swordfish"},
        {"remote_key_command": "/nowhere/fetch --token swordfish"},
        {"remote_key_command": "/nowhere/fetch --token swordfish", "remote_key_file": "/nowhere"},
    ):
        with pytest.raises(SettingsError) as caught:
            RemoteOpening(Settings(remote="file:///nowhere", **settings), monotonic)
        assert "swordfish" not in str(caught.value)
