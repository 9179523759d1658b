"""Seals: what opens, what does not, and why."""

from __future__ import annotations

import hmac
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import KvbmError
from kvbm.tiers.remote.sealing import MasterKey, Sealer, Unopened
from rigs.packed import flipped, sealer

pytest.importorskip("cryptography", reason="cryptography is not installed")

PLAIN = b"some bytes of a block"


def seal(by: Sealer, tenant: str = "ann", associated: bytes = b"for this") -> bytes:
    return b"".join(by.seal(tenant, [PLAIN[:5], memoryview(PLAIN)[5:]], associated))


@given(st.lists(st.binary(max_size=100), max_size=4), st.binary(max_size=100), st.text(max_size=20))
def test_what_was_sealed_opens(parts: list[bytes], associated: bytes, tenant: str) -> None:
    by = sealer()
    sealed = b"".join(by.seal(tenant, parts, associated))
    assert len(sealed) == sum(map(len, parts)) + 28
    assert by.open(tenant, by.key_id(tenant), memoryview(sealed), associated) == b"".join(parts)
    assert sealer().open(tenant, by.key_id(tenant), sealed, associated) == b"".join(parts)


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    by = sealer()
    sealed, key_id = seal(by), by.key_id("ann")
    for bit in range(len(sealed) * 8):
        assert by.open("ann", key_id, flipped(sealed, bit), b"for this") is Unopened.FORGED
    for length in range(len(sealed)):
        assert by.open("ann", key_id, sealed[:length], b"for this") is Unopened.FORGED
    assert by.open("ann", key_id, sealed, b"for that") is Unopened.FORGED


def test_another_tenant_or_key_is_told_from_a_forgery() -> None:
    one, same_id = sealer("one"), Sealer([MasterKey("one", b"x" * 32)])
    sealed, key_id = seal(one), one.key_id("ann")
    assert one.open("bob", key_id, sealed, b"for this") is Unopened.NO_KEY
    assert sealer("two").open("ann", key_id, sealed, b"for this") is Unopened.NO_KEY
    assert same_id.open("ann", key_id, sealed, b"for this") is Unopened.NO_KEY
    for odd in ("", "one", "one.", ".", "one.zz", key_id + "0", key_id.upper()):
        assert one.open("ann", odd, sealed, b"for this") is Unopened.NO_KEY, odd
    # Somebody claims it for the other tenant.
    assert one.open("bob", one.key_id("bob"), sealed, b"for this") is Unopened.FORGED


def test_key_ids_fit_into_a_record_and_tell_keys_and_tenants_apart() -> None:
    ids = [sealer(key).key_id(tenant) for key in ("a", "b" * 16) for tenant in ("ann", "bob", "", "\udcff")]
    assert len(set(ids)) == len(ids)
    assert all(each.isascii() and 0 < len(each) <= 32 for each in ids)


def test_the_first_key_seals_and_all_open() -> None:
    old, both, new = sealer("old"), sealer("new", "old"), sealer("new")
    assert both.key_id("ann") == new.key_id("ann") != old.key_id("ann")
    assert both.open("ann", old.key_id("ann"), seal(old), b"for this") == PLAIN
    assert new.open("ann", both.key_id("ann"), seal(both), b"for this") == PLAIN
    assert new.open("ann", old.key_id("ann"), seal(old), b"for this") is Unopened.NO_KEY


def test_each_seal_takes_a_new_nonce_from_the_source_it_was_given() -> None:
    count = itertools.count(1)
    by = sealer(random_bytes=lambda length: next(count).to_bytes(length, "big"))
    first, second = seal(by), seal(by)
    assert first[:12] == (1).to_bytes(12, "big") and second[:12] == (2).to_bytes(12, "big")
    assert first[12:] != second[12:]
    assert seal(sealer()) != seal(sealer())


def test_each_tenant_and_each_master_key_has_a_key_of_its_own() -> None:
    """Derived as RFC 5869 says, here with the standard library's HMAC."""
    both = sealer("one", "two")
    keys = {both._tenant_key(master, tenant).key for master in ("one", "two") for tenant in ("ann", "bob")}
    assert len(keys) == 4
    extracted = hmac.digest(bytes(32), b"one" * 10 + b"on", "sha256")
    assert both._tenant_key("one", "ann").key == hmac.digest(extracted, b"kvbm seal 1 key\0ann\1", "sha256")


def test_nothing_shows_a_secret() -> None:
    key = MasterKey("one", b"secret-secret-secret-secret-secr")
    by = Sealer([key])
    by.key_id("ann")
    texts = [repr(key), str(key), repr(by), f"{by}", repr(by._tenant_key("one", "ann"))]
    assert not any("secret" in text for text in texts)
    assert by._tenant_key("one", "ann").key.hex() not in "".join(texts)
    assert "Sealer([MasterKey('one')])" in texts


def test_without_cryptography_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(KvbmError, match=r"cryptography.*pip install openkvbm\[remote\]") as raised:
        Sealer([MasterKey("one", bytes(32))])
    assert "\n" not in str(raised.value)
