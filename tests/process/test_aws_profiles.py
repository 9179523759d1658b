"""AWS profiles against real servers: SeaweedFS looks at the keys of each request, moto gives roles."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("botocore")

from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.settings import Settings, load_settings
from kvbm.testing.blob_contract import blob_name
from kvbm.tiers.remote.blobs import BlobStore, Put, StoreError
from kvbm.tiers.remote.drivers import aws_profile
from kvbm.tiers.remote.drivers.credentials import NOBODY, Credentials
from kvbm.tiers.remote.drivers.opening import open_blobs
from kvbm.tiers.remote.named_store import open_named_store
from rigs.blob_services import ACCESS_KEY, REGION, SECRET_KEY, S3Service, moto, seaweedfs
from rigs.manager_probe import wait_for

NAME = blob_name(1)
WAIT_S = 30.0
BACKOFF_S = 0.15
"""Obstore asks again no sooner, whatever end it was told."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """A server that knows one pair of keys."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as service:
        service.make_bucket("bucket")
        yield service


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a word about AWS, in an environment without one too."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path


@pytest.fixture
def profiles(home: Path) -> Path:
    """`right` has the server's keys and region, `wrong` has others, `program` prints the right ones."""
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY}
    (home / "answer.json").write_text(json.dumps(answer))
    credentials = home / ".aws" / "credentials"
    credentials.write_text(
        f"[right]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        f"[wrong]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = swordfish\n"
    )
    printing = f"import pathlib; print(pathlib.Path({str(home / 'answer.json')!r}).read_text())"
    failing = "import sys; sys.exit('swordfish')"
    (home / ".aws" / "config").write_text(
        f"[profile right]\nregion = {REGION}\n"
        f'[profile program]\nregion = {REGION}\ncredential_process = {sys.executable} -c "{printing}"\n'
        f'[profile failing]\nregion = {REGION}\ncredential_process = {sys.executable} -c "{failing}"\n'
        f"[profile empty]\nregion = {REGION}\n"
    )
    return credentials


def opened(service: S3Service, profile: str = "", keys: Credentials = NOBODY) -> BlobStore:
    """The server's bucket by this profile; without one, as the environment and the files say."""
    named = f"&profile={profile}" if profile else f"&region={REGION}"
    return open_blobs(
        f"s3://bucket/{os.urandom(8).hex()}?endpoint={service.endpoint}{named}",
        credentials=keys,
        field="--remote",
    )


def works(store: BlobStore) -> bool:
    """Whether the server takes its credentials. Raises StoreError where it does not."""
    assert store.put(NAME, [b"blob"]) is Put.CREATED
    read = store.read(NAME, 0, 10)
    return read is not None and bytes(read) == b"blob"


def refusal(store: BlobStore) -> str:
    """The one line of a request that has no right credentials; it holds none."""
    with pytest.raises(StoreError) as caught:
        store.read(NAME, 0, 10)
    assert caught.value.trouble == "refused"
    line = str(caught.value)
    assert "swordfish" not in line and SECRET_KEY not in line and "\n" not in line
    return line


@pytest.mark.parametrize("profile", ["right", "program"])
def test_the_profile_that_the_url_names(profiles: Path, service: S3Service, profile: str) -> None:
    assert works(opened(service, profile))


def test_it_wins_over_keys_of_the_environment(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "swordfish")
    monkeypatch.setenv("AWS_PROFILE", "wrong")
    assert works(opened(service, "right"))
    assert "refuses these credentials" in refusal(opened(service))


def test_the_profile_that_the_environment_names(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "right")
    assert works(opened(service))
    monkeypatch.setenv("AWS_PROFILE", "wrong")
    assert "refuses these credentials" in refusal(opened(service))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert works(opened(service)), "keys win, as for AWS's own tools"


def test_the_default_profile_where_nobody_says_a_word(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = profiles.with_name("moved")
    moved.write_text(profiles.read_text().replace("[right]", "[default]"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(moved))
    assert works(opened(service))


def test_given_keys_win_over_every_profile(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "wrong")
    assert works(opened(service, "wrong", Credentials(ACCESS_KEY, SECRET_KEY)))
    variables = {
        "DYN_KVBM_REMOTE": f"s3://bucket/x?endpoint={service.endpoint}&region={REGION}",
        "DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY,
        "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY,
    }
    assert works(open_named_store(load_settings(variables).settings, monotonic, 10.0))


@pytest.mark.parametrize("by_url", [True, False])
def test_a_profile_that_is_not_there_is_one_line(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch, by_url: bool
) -> None:
    if not by_url:
        monkeypatch.setenv("AWS_PROFILE", "rihgt")
    with pytest.raises(SettingsError, match=r"no AWS profile 'rihgt' in .*; there are: .*right") as caught:
        opened(service, "rihgt" if by_url else "")
    assert caught.value.field == ("--remote" if by_url else "AWS_PROFILE")
    url = f"s3://bucket?profile=rihgt&endpoint={service.endpoint}" if by_url else "s3://bucket"
    with pytest.raises(SettingsError, match="no AWS profile 'rihgt'"):
        open_named_store(Settings(remote=url), monotonic, 10.0)


def test_what_a_failing_program_prints_is_not_shown(profiles: Path, service: S3Service) -> None:
    line = refusal(opened(service, "failing"))
    assert "AWS profile 'failing' gives no credentials (CredentialRetrievalError)" in line


def test_a_profile_without_credentials_is_named(profiles: Path, service: S3Service) -> None:
    assert "AWS profile 'empty' gives no credentials" in refusal(opened(service, "empty"))


def test_new_keys_in_the_file_count(profiles: Path, service: S3Service) -> None:
    """A tool that writes them again and again."""
    text = profiles.read_text()
    profiles.write_text(text.replace(SECRET_KEY, "swordfish"))
    profile = aws_profile.open_profile(
        aws_profile.WantedProfile("right", True, "--remote", "s3://b"),
        aws_profile.AwsEnvironment(files=(profiles,)),
        10.0,
    )
    assert profile is not None and profile()["secret_access_key"] == "swordfish"
    profiles.write_text(text)
    os.utime(profiles, ns=(1, 1))
    assert profile()["secret_access_key"] == SECRET_KEY


def test_a_role_that_is_assumed(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with moto(tmp_path) as service:
        service.make_bucket("bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.endpoint)
        (home / ".aws" / "credentials").write_text(
            f"[base]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        (home / ".aws" / "config").write_text(
            f"[profile role]\nregion = {REGION}\nsource_profile = base\n"
            "role_arn = arn:aws:iam::123456789012:role/kvbm\n"
        )
        said = aws_profile.AwsEnvironment(files=(home / ".aws" / "credentials", home / ".aws" / "config"))
        wanted = aws_profile.wanted_profile("role", "--remote", "s3://b", said)
        assert wanted is not None
        profile = aws_profile.open_profile(wanted, said, 10.0)
        assert profile is not None
        given = profile()
        assert given["access_key_id"] != ACCESS_KEY and given["token"], "those of the role"
        assert works(opened(service, "role"))


def test_a_program_that_hangs_fails_requests_in_time_and_holds_up_nobody(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws_profile, "PATIENCE_S_MAX", 0.2)
    gate = profiles.with_name("gate")
    os.mkfifo(gate)
    config = profiles.with_name("config")
    config.write_text(f"[profile hangs]\nregion = {REGION}\ncredential_process = cat {gate}\n")
    store = opened(service, "hangs")
    lines: list[str] = []
    threads = [threading.Thread(target=lambda: lines.append(refusal(store))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(lines) == 3 and all("gave no credentials within 0.2 s" in line for line in lines)
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY}
    gate.write_text(json.dumps(answer))  # returns when the program reads it
    monkeypatch.setattr(aws_profile, "PATIENCE_S_MAX", 10.0)
    wait_until_it_works(store)


def after(moment_s: float) -> bool:
    return time.monotonic() > moment_s


@pytest.mark.parametrize("renewed", [True, False])
def test_requests_are_many_and_searches_few(
    profiles: Path, service: S3Service, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    """As obstore asks: it renews what ends within 5 minutes."""
    searches = list[bool]()
    real = aws_profile.ProfileCredentials._look
    began = datetime.now(timezone.utc) - aws_profile.FRESH

    def look(asked: aws_profile.ProfileCredentials) -> aws_profile._Found:
        searches.append(True)
        if renewed:
            return real(asked)
        if len(searches) > 1:
            raise StoreError("refused", "no more")
        return real(asked)._replace(since=began)  # its time is over at once, and it is kept

    monkeypatch.setattr(aws_profile.ProfileCredentials, "_look", look)
    store = opened(service, "right")
    assert works(store)
    for _ in range(5):
        again_s = time.monotonic() + BACKOFF_S
        wait_for(partial(after, again_s), WAIT_S, "the clock stands still")
        store.read(NAME, 0, 10)
    assert len(searches) == (1 if renewed else 2)


def wait_until_it_works(store: BlobStore) -> None:
    """The program has answered; a request sees it once it has ended."""

    def there() -> bool:
        try:
            return works(store)
        except StoreError:
            return False

    wait_for(there, WAIT_S, lambda: "still refused")
