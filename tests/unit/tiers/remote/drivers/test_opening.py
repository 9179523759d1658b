"""URLs of stores: what is taken, and that errors name what is wrong and hold no secret."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest

from kvbm.errors import SettingsError
from kvbm.tiers.remote.blobs import valid_name
from kvbm.tiers.remote.drivers.credentials import Credentials
from kvbm.tiers.remote.drivers.opening import object_url, open_blobs, parsed


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "s3://"),
        ("bucket/prefix", "s3://"),
        ("s3://Bucket/x", "small letters"),
        ("s3:///x", "bucket"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket/x?regoin=a", "no option 'regoin'; s3 takes region, endpoint"),
        ("s3://bucket/x?region=", "region is empty"),
        ("s3://bucket?endpoint=host:9000", "endpoint is http"),
        ("s3://bucket?endpoint=http://me:secret@host", "without credentials"),
        ("s3://me:secret@bucket/x", "environment"),
        ("s3://bucket?virtual-host=true", "yes or no"),
        ("s3://bucket?ca=/no/such/file", "no file /no/such/file"),
        ("s3://bucket?secret_access_key=secret", "no option 'secret_access_key'"),
        ("az://container/x?account=a&sas=secret", "no option 'sas'"),
        ("https://host/x?X-Amz-Signature=secret", "s3://"),
        ("mooncake://host?index=redis://h/0%3Fpass%3Dsecret", "no option 'pass'; redis takes"),
        ("gs://bucket?region=a", "no option 'region'; gs takes"),
        ("file://host/path", "three slashes"),
        ("file:///", "three slashes"),
        ("redis://host/name", "number of the database"),
        ("redis://:secret@host:port/0", "no URL"),
        ("redis://me:secret@host/0?prefix=a b", "prefix is of letters"),
        ("mooncake://host:50051", "Mooncake lists nothing: index=URL"),
        ("mooncake://host/path?index=file:///x", "without a path"),
        ("mooncake://me:secret@host?index=file:///x", "without a path or a user"),
        (
            "mooncake://host?index=mooncake://other?index=file:///x",
            "index is a directory, a Redis or a bucket",
        ),
        ("mooncake://host?index=redis://me:secret@other/x", "number of the database"),
        ("mooncake://host?index=file:///x&protocol=udp", "protocol is tcp or rdma"),
        ("mooncake://host?index=file:///x&segment=4GB", "segment is 0, or as 512MiB or 4GiB"),
        ("mooncake://host?index=file:///x&replicas=0", "replicas is 1 to 8"),
        ("mooncake://host?index=file:///x&device=a b", "device is of letters"),
        ("mooncake://host?index=file:///x&color=a", "no option 'color'; mooncake takes index, prefix"),
    ],
)
def test_what_cannot_be_used_is_named_without_secrets(url: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_blobs(url, field="--remote")
    assert str(caught.value).startswith("--remote=")
    assert said in str(caught.value)
    assert "secret" not in str(caught.value).replace("secret_access_key", "")
    assert "secret" not in repr(caught.value.value).replace("secret_access_key", "")


def test_places_hold_no_secret() -> None:
    pytest.importorskip("valkey")
    url = "rediss://me:sec%40ret@host:7000/2?prefix=a/b"
    assert parsed(url).credentials.user == "me"
    assert parsed(url).credentials.secret == "sec@ret"
    store = open_blobs(url)
    assert store.place == "rediss://host:7000/2?prefix=a/b"
    assert "sec" not in repr(parsed(url))
    assert "sec" not in repr(Credentials("me", "secret"))


def test_an_index_s_password_is_shown_nowhere() -> None:
    url = "mooncake://host:50051?index=redis://me:secret@other:7000/2?prefix=a&segment=4GiB"
    place = parsed(url)
    assert (place.credentials.user, place.credentials.secret) == ("me", "secret")
    assert parsed(place.options["index"]).options == {"prefix": "a"}
    assert place.shown == "mooncake://host:50051?index=redis://other:7000/2%3Fprefix%3Da&segment=4GiB"
    assert parsed(place.shown).options == place.options
    assert "secret" not in repr(place)


def test_mooncake_s_package_is_looked_for_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"mooncake://host?index=file://{tmp_path}"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install openkvbm\[remote-mooncake\]"):
        open_blobs(url)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    store = open_blobs(url, blob_bytes_max=1 << 20)
    assert store.blob_bytes_max == 1 << 20
    assert "mooncake" not in sys.modules
    store.close()


def test_a_bucket_by_the_original_s_variables() -> None:
    url = object_url("kv-cache", endpoint="http://minio:9000", region="eu-west-1", prefix="/a/b/")
    assert url == "s3://kv-cache/a/b?region=eu-west-1&endpoint=http://minio:9000"
    assert parsed(url).options == {"region": "eu-west-1", "endpoint": "http://minio:9000"}
    assert object_url("kv-cache") == "s3://kv-cache"


def test_a_missing_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> object:
        raise ImportError("no", name=name)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(SettingsError, match=r"pip install openkvbm\[remote-objects\]"):
        open_blobs("s3://bucket")
    with pytest.raises(SettingsError, match=r"pip install openkvbm\[remote-redis\]"):
        open_blobs("redis://host")


def test_a_directory_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: object) -> object:
        assert name not in ("obstore", "valkey")
        return real(name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    store = open_blobs(f"file://{tmp_path}", blob_bytes_max=1 << 20)
    assert store.blob_bytes_max == 1 << 20
    store.put("packs/a", [b"x"])
    store.close()


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("packs/ab/0123", True),
        ("used-up/a", True),
        ("a" * 200, True),
        ("a" * 201, False),
        ("used/packs/a", False),
        ("now", False),
        ("packs//a", False),
        ("packs/../a", False),
        ("packs/.hidden", False),
        ("/packs", False),
        ("packs/", False),
        ("Packs", False),
        ("packs/a\n", False),
    ],
)
def test_names(name: str, valid: bool) -> None:
    assert valid_name(name) is valid
