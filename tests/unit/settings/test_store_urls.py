"""URLs of stores as they are printed: what is there of use, and no secret, however the URL was written."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.settings import FIELDS, shown, without_credentials
from kvbm.tiers.remote.drivers.opening import parsed

SECRET = "TOPSECRET"


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("mooncake://m:1?index=redis%3A//u:TOPSECRET%40h/0", "mooncake://m:1?index=redis://***@h/0"),
        ("mooncake://m:1?index=redis://u:TOPSECRET@h/0", "mooncake://m:1?index=redis://***@h/0"),
        (
            "mooncake://m:1?index=redis://u:TOPSECRET@h/0%3Fprefix%3Da&segment=4GiB",
            "mooncake://m:1?index=redis://***@h/0%3Fprefix%3Da&segment=4GiB",
        ),
        ("mooncake://m:1?index=redis://u:1&TOPSECRET@h/0", "mooncake://***"),
        (
            "mooncake://m:1?index=redis://h/0%3Fpassword%3DTOPSECRET",
            "mooncake://m:1?index=redis://h/0%3Fpassword%3D***",
        ),
        ("redis://u:TOPSECRET@h:7000/2?prefix=a/b", "redis://***@h:7000/2?prefix=a/b"),
        ("redis://u:TOPSECRET%40h/0", "redis://***"),
        ("redis://u:1/TOPSECRET@h/0", "redis://***"),
        ("redis://u:1?a=TOPSECRET@h/0", "redis://***"),
        ("redis://u:1?prefix=TOPSECRET@h/0", "redis://***"),
        ("redis://u:1#TOPSECRET@h/0", "redis://***"),
        ("redis://[::1]:7000/2", "redis://[::1]:7000/2"),
        ("redis://[u:TOPSECRET@h", "redis://***"),
        ("redis://h/0?password=TOPSECRET", "redis://h/0?password=***"),
        ("s3://bucket?secret_access_key=TOPSECRET&region=a", "s3://bucket?secret_access_key=***&region=a"),
        ("s3://bucket/x?TOPSECRET", "s3://bucket/x?***"),
        ("s3://bucket?endpoint=http://me:TOPSECRET@h:9000", "s3://bucket?endpoint=http://***@h:9000"),
        ("az://container/x?account=a&sas=TOPSECRET", "az://container/x?account=a&sas=***"),
        ("https://b.example/x?X-Amz-Signature=TOPSECRET", "https://b.example/x?X-Amz-Signature=***"),
        ("file:///mnt/kv@home?fsync=yes", "file:///mnt/kv%40home?fsync=yes"),
        ("/mnt/shared", "/mnt/shared"),
        ("u:TOPSECRET@h", "***"),
    ],
)
def test_a_store_is_printed_without_secrets(url: str, printed: str) -> None:
    assert without_credentials(url) == printed
    assert shown(FIELDS["remote"], url) == printed


@given(
    secret=st.text(st.sampled_from("QXZ@/?#&=:%+ "), min_size=3).filter(lambda text: set("QXZ") & set(text)),
    form=st.sampled_from(
        [
            "redis://u:{}@h/0",
            "mooncake://m:1?index=redis://u:{}@h/0",
            "s3://bucket?sas={}",
            "https://h/x?a={}#b",
            "{}@h",
        ]
    ),
    encode=st.booleans(),
)
def test_no_letter_of_a_password_is_printed(secret: str, form: str, encode: bool) -> None:
    printed = without_credentials(form.format(quote(secret, safe="") if encode else secret))
    assert not set("QXZ") & set(printed)


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://m:1?index=redis://u:p@h:7000/0%3Fprefix%3Da&segment=4GiB",
        "s3://bucket/prefix?endpoint=http://minio:9000",
        "rediss://u:p@h/0?prefix=a",
    ],
)
def test_what_is_printed_of_a_usable_store_is_the_same_place(url: str) -> None:
    place, printed = parsed(url), parsed(without_credentials(url))
    assert printed.shown == place.shown


def test_the_user_in_another_setting_s_address_is_not_printed() -> None:
    assert shown(FIELDS["object_endpoint"], "http://me:TOPSECRET@h:9000") == "http://***@h:9000"
    assert shown(FIELDS["object_endpoint"], "http://h:9000") == "http://h:9000"
