"""Which AWS profile counts, and its credentials: renewed, kept while renewing fails, waited for a bounded time."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.errors import SettingsError
from kvbm.settings import AwsEnvironment
from kvbm.tiers.remote.blobs import StoreError
from kvbm.tiers.remote.drivers import aws_profile
from kvbm.tiers.remote.drivers.aws_profile import (
    AHEAD,
    FRESH,
    KEPT,
    KEPT_STEP,
    LEFT_AFTER,
    SEARCHES_MAX,
    ProfileCredentials,
    open_profile,
    wanted_profile,
)

WAIT_S = 30.0
BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ...]:
    """The two files of profiles."""
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    credentials.write_text("[one]\naws_access_key_id = AKONE\naws_secret_access_key = swordfish\n")
    config.write_text(
        "[profile one]\nregion = eu-west-7\n[profile coded]\nrole_arn = arn:aws:iam::1:role/x\n"
        "source_profile = one\nmfa_serial = arn:aws:iam::1:mfa/me\n"
    )
    return credentials, config


@pytest.fixture
def aws(files: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore, which reads these files and nothing else."""
    pytest.importorskip("botocore")
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(files[0]))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(files[1]))


@pytest.mark.parametrize(
    ("by_url", "said", "name"),
    [
        ("", {}, None),
        ("one", {}, "one"),
        ("one", {"keys": True, "profile": "two"}, "one"),
        ("", {"profile": "two"}, "two"),
        ("", {"profile": "two", "workload": True}, "two"),
        ("", {"profile": "two", "keys": True}, None),
        ("", {"files": "there"}, ""),
        ("", {"files": "there", "keys": True}, None),
        ("", {"files": "there", "workload": True}, None),
        ("", {"files": "elsewhere"}, None),
    ],
)
def test_which_profile_counts(
    by_url: str, said: dict[str, Any], name: str | None, files: tuple[Path, ...]
) -> None:
    paths = {"there": files, "elsewhere": (Path("/nowhere/credentials"),), "": ()}[said.get("files", "")]
    wanted = wanted_profile(by_url, "--remote", "s3://b", AwsEnvironment(**{**said, "files": paths}))
    assert (None if wanted is None else wanted.name) == name


def test_the_keys_of_a_profile(aws: None, files: tuple[Path, ...]) -> None:
    said = AwsEnvironment(files=files)
    wanted = wanted_profile("one", "--remote", "s3://b", said)
    assert wanted is not None
    profile = open_profile(wanted, said, 10.0)
    assert profile is not None and profile.region == "eu-west-7"
    given = profile()
    assert (given["access_key_id"], given["secret_access_key"]) == ("AKONE", "swordfish")
    assert "swordfish" not in repr(profile)
    elsewhere = open_profile(wanted, said._replace(region=True), 10.0)
    assert elsewhere is not None and elsewhere.region == "", "the environment's counts"


@pytest.mark.parametrize(
    ("by_url", "profile", "says"),
    [
        (
            "nope",
            "",
            r"^--remote='s3://b' .*no AWS profile 'nope' in .*credentials or .*config; .*: one, coded",
        ),
        ("", "nope", r"^AWS_PROFILE='nope' .*no AWS profile 'nope'"),
        ("coded", "", r"^--remote='s3://b' .*AWS profile 'coded' asks for a code.*mfa_serial"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named(
    aws: None, files: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, by_url: str, profile: str, says: str
) -> None:
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    said = AwsEnvironment(files=files, profile=profile)
    wanted = wanted_profile(by_url, "--remote", "s3://b", said)
    assert wanted is not None
    with pytest.raises(SettingsError, match=says) as caught:
        open_profile(wanted, said, 10.0)
    assert "swordfish" not in str(caught.value)


def test_a_file_that_is_none_of_profiles_is_named(aws: None, files: tuple[Path, ...]) -> None:
    files[0].write_text("swordfish\n")
    said = AwsEnvironment(files=files)
    wanted = wanted_profile("one", "--remote", "s3://b", said)
    assert wanted is not None
    with pytest.raises(SettingsError, match="cannot be read") as caught:
        open_profile(wanted, said, 10.0)
    assert "swordfish" not in str(caught.value)


def test_without_the_package_a_line_says_which(
    files: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    aws_profile._say_unread.cache_clear()
    said = AwsEnvironment(files=files)
    for by_url, profile in (("one", ""), ("", "one")):
        wanted = wanted_profile(by_url, "--remote", "s3://b", said._replace(profile=profile))
        assert wanted is not None
        with pytest.raises(SettingsError, match=r"AWS profile 'one'.*openkvbm\[remote-aws\]"):
            open_profile(wanted, said, 10.0)
    wanted = wanted_profile("", "--remote", "s3://b", said)
    assert wanted is not None
    with caplog.at_level(logging.WARNING):
        assert [open_profile(wanted, said, 10.0) for _ in range(2)] == [None, None], (
            "obstore looks for itself"
        )
    assert len(caplog.messages) == 1 and "openkvbm[remote-aws]" in caplog.messages[0]


# ---- renewing


class Source:
    """What a session gives: each look takes the next of `answers`, keys or an error."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.answers: deque[str | Exception | None] = deque()
        self.sessions = 0
        self.gate = threading.Event()
        self.gate.set()
        self.looking = threading.Event()

    def session(self) -> SimpleNamespace:
        """Another session."""
        self.sessions += 1
        return SimpleNamespace(get_credentials=lambda: self if self.answers[0] is not None else None)

    def get_frozen_credentials(self) -> SimpleNamespace:
        """As `botocore`'s."""
        self.looking.set()
        assert self.gate.wait(WAIT_S)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(access_key=answer, secret_key="swordfish", token=None)


class SSOTokenLoadError(Exception):
    """Named as `botocore` names it."""


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.gate.set()


@pytest.fixture
def make(source: Source, files: tuple[Path, ...]) -> Callable[[float], ProfileCredentials]:
    """Credentials out of `source`, waited for so many seconds."""
    return lambda patience_s: ProfileCredentials(
        source.session, "AWS profile 'one'", files, patience_s, now=lambda: source.now
    )


def test_credentials_are_asked_for_again_and_the_files_when_they_change(
    source: Source, make: Callable[[float], ProfileCredentials], files: tuple[Path, ...]
) -> None:
    profile = make(WAIT_S)
    source.answers.extend(("AK1", "AK2", "AK3"))
    first = profile()
    assert (first["access_key_id"], first["expires_at"]) == ("AK1", BEGIN + FRESH + AHEAD)
    source.now += FRESH
    assert profile()["access_key_id"] == "AK2"
    assert source.sessions == 1, "botocore renews by itself"
    files[0].unlink()
    assert profile()["access_key_id"] == "AK3"
    assert source.sessions == 2


def test_while_renewing_fails_what_was_given_before_is_used_for_some_minutes(
    source: Source, make: Callable[[float], ProfileCredentials]
) -> None:
    profile = make(WAIT_S)
    source.answers.extend(("AK1", SSOTokenLoadError("swordfish"), SSOTokenLoadError("swordfish"), "AK2"))
    profile()
    source.now += FRESH
    again = profile()
    assert again["access_key_id"] == "AK1"
    assert again["expires_at"] == source.now + KEPT_STEP + AHEAD
    source.now = BEGIN + KEPT
    with pytest.raises(StoreError) as caught:
        profile()
    assert str(caught.value) == (
        "AWS profile 'one' gives no credentials (SSOTokenLoadError); `aws sso login` renews a login"
    )
    assert profile()["access_key_id"] == "AK2", "after a login they are there again"
    assert source.sessions == 3


def test_a_profile_without_credentials(source: Source, make: Callable[[float], ProfileCredentials]) -> None:
    source.answers.append(None)
    with pytest.raises(StoreError, match=r"'one' gives no credentials$") as caught:
        make(WAIT_S)()
    assert caught.value.trouble == "refused"


def test_nobody_waits_longer_than_is_said_and_one_look_is_under_way_at_most(
    source: Source, make: Callable[[float], ProfileCredentials]
) -> None:
    profile = make(0.01)
    source.gate.clear()
    source.answers.extend(("AK1", "AK2"))
    for _ in range(3):
        with pytest.raises(StoreError, match=r"'one' gave no credentials within 0.01 s") as caught:
            profile()
    assert caught.value.trouble == "slow"
    assert source.looking.wait(WAIT_S) and source.sessions == 1
    source.gate.set()
    search = profile._search
    assert search is not None and search.ended.wait(WAIT_S)
    assert profile()["access_key_id"] == "AK1", "what came late is used"


def test_what_came_much_too_late_is_looked_for_again(
    source: Source, make: Callable[[float], ProfileCredentials]
) -> None:
    profile = make(0.01)
    source.gate.clear()
    source.answers.extend(("AK1", "AK2"))
    with pytest.raises(StoreError):
        profile()
    source.gate.set()
    search = profile._search
    assert search is not None and search.ended.wait(WAIT_S)
    source.now += FRESH
    profile._patience_s = WAIT_S
    assert profile()["access_key_id"] == "AK2"


def test_a_search_that_hangs_holds_up_one_request_and_is_given_up(
    source: Source, make: Callable[[float], ProfileCredentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience_s = 10.0
    source.answers.extend(f"AK{number}" for number in range(SEARCHES_MAX + 1))
    profile = make(patience_s)
    source.gate.clear()
    waits = list[float]()

    class Ended(threading.Event):
        """Nobody waits here: how long one would is written down."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return self.is_set()

    begun = list[threading.Event]()

    def event() -> threading.Event:
        begun.append(Ended())
        return begun[-1]

    # Threads have events too: only those of searches are ours.
    monkeypatch.setattr(aws_profile, "threading", SimpleNamespace(Event=event, Thread=threading.Thread))

    def asked() -> list[float]:
        waits.clear()
        for _ in range(3):
            with pytest.raises(StoreError, match="gave no credentials within 10 s"):
                profile()
        return list(waits)

    for number in range(1, SEARCHES_MAX + 1):
        assert asked() == [patience_s, 0.0, 0.0], "one waits, the others are told at once"
        assert len(begun) == number
        source.now += timedelta(seconds=LEFT_AFTER * patience_s)
    assert asked() == [0.0, 0.0, 0.0] and len(begun) == SEARCHES_MAX, "no more of them"
    source.gate.set()
    for ended in begun:
        assert threading.Event.wait(ended, WAIT_S)
    assert profile()["access_key_id"].startswith("AK"), "what came late is used"
