"""Sealing: what a store's owner, or another tenant, shall not read or forge is encrypted before it leaves.

With a seal, whoever can write to the store can still take blocks away, or put an older record of a block back: that is
the same block. He cannot make up bytes, move them to another key, namespace, group or tenant, or read them. He sees
how many bytes a block has, coded, which blocks there are (their keys), and which are one tenant's.

`Sealer` is AES-256-GCM with a key for each tenant, derived by HKDF-SHA256 from a master key and the tenant's name.
Nonces are random, 96 bits: a tenant shall seal at most 2³² blocks before the master key is changed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kvbm.errors import KvbmError
from kvbm.tiers.remote.blobs import Buffer

MASTER_BYTES = 32
ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,16}", re.ASCII)
"""What the id of a master key is made of."""

_NONCE_BYTES = 12
_TAG_BYTES = 16
_LABEL_BYTES = 6
_TENANTS_KEPT = 1024
_EXTRA = "pip install openkvbm[remote]"


class Unopened(Enum):
    """Why something sealed was not opened."""

    NO_KEY = "no key"
    """It is sealed for another tenant, or with a key that is not there."""
    FORGED = "forged"
    """The key is there, and these are not the bytes that were sealed with it, or not what they were sealed for."""


class Seal(Protocol):
    """Seals and opens blocks, of one tenant each. Called by several threads at once."""

    def key_id(self, tenant: str) -> str:
        """What a record says it is sealed with: ASCII, 1 to 32 characters. Tells keys and tenants apart."""

    def seal(self, tenant: str, parts: Sequence[Buffer], associated: bytes) -> list[Buffer]:
        """The sealed form of the parts, joined, in parts; it opens only with the same `associated` bytes."""

    def open(self, tenant: str, key_id: str, sealed: Buffer, associated: bytes) -> bytes | Unopened:
        """What was sealed. `key_id` is what the record says, perhaps a foreign one."""


class MasterKey:
    """A master key: its id, and 32 secret bytes that no representation of it shows."""

    __slots__ = ("key_id", "secret")

    def __init__(self, key_id: str, secret: bytes) -> None:
        assert ID_PATTERN.fullmatch(key_id) and len(secret) == MASTER_BYTES
        self.key_id = key_id
        self.secret = secret

    def __repr__(self) -> str:
        return f"MasterKey({self.key_id!r})"


class _TenantKey(NamedTuple):
    label: str
    key: bytes

    def __repr__(self) -> str:
        return f"_TenantKey({self.label!r})"


class Sealer:
    """A `Seal`: the first of its master keys seals, all of them open.

    To change the master key, first give every node the new one behind the old one; then put it in front; and take the
    old one away when what it sealed may be lost. `random_bytes` must be fit for cryptography.

    A key's id in a record is that of the master key and a label that is derived from it for the tenant, so that a
    record of another tenant, or of another key with the same id, is told from a forged one.
    """

    def __init__(self, keys: Sequence[MasterKey], random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        """Raises KvbmError where `cryptography` is not installed."""
        assert keys and len({key.key_id for key in keys}) == len(keys)
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives import ciphers, hashes
            from cryptography.hazmat.primitives.ciphers import aead
            from cryptography.hazmat.primitives.kdf import hkdf
        except ImportError as error:
            raise KvbmError(
                f"sealing needs cryptography, which cannot be used ({error}): {_EXTRA}"
            ) from error
        self._ciphers, self._hashes, self._aead, self._hkdf = ciphers, hashes, aead, hkdf
        self._invalid_tag = InvalidTag
        self._masters = {key.key_id: key for key in keys}
        self._first = keys[0].key_id
        self._random_bytes = random_bytes
        self._tenant_key = functools.lru_cache(_TENANTS_KEPT)(self._derived)

    def __repr__(self) -> str:
        return f"Sealer({list(self._masters.values())!r})"

    def key_id(self, tenant: str) -> str:
        return self._tenant_key(self._first, tenant).label

    def seal(self, tenant: str, parts: Sequence[Buffer], associated: bytes) -> list[Buffer]:
        label, key = self._tenant_key(self._first, tenant)
        nonce = self._random_bytes(_NONCE_BYTES)
        assert len(nonce) == _NONCE_BYTES
        cipher = self._ciphers.Cipher(self._ciphers.algorithms.AES(key), self._ciphers.modes.GCM(nonce))
        # Part by part: the bytes of a block need not be joined before.
        encryptor = cipher.encryptor()
        encryptor.authenticate_additional_data(_bound(label, tenant, associated))
        sealed: list[Buffer] = [nonce, *(encryptor.update(part) for part in parts)]
        sealed += (encryptor.finalize(), encryptor.tag)
        return sealed

    def open(self, tenant: str, key_id: str, sealed: Buffer, associated: bytes) -> bytes | Unopened:
        master_id = key_id.partition(".")[0]
        if master_id not in self._masters:
            return Unopened.NO_KEY
        label, key = self._tenant_key(master_id, tenant)
        if label != key_id:
            return Unopened.NO_KEY
        view = memoryview(sealed)
        if view.nbytes < _NONCE_BYTES + _TAG_BYTES:
            return Unopened.FORGED
        nonce, rest = view[:_NONCE_BYTES], view[_NONCE_BYTES:]
        try:
            return self._aead.AESGCM(key).decrypt(nonce, rest, _bound(label, tenant, associated))
        except self._invalid_tag:
            return Unopened.FORGED

    def _derived(self, master_id: str, tenant: str) -> _TenantKey:
        secret, name = self._masters[master_id].secret, _encoded(tenant)
        label = self._hkdf_bytes(secret, b"kvbm seal 1 label\0" + name, _LABEL_BYTES).hex()
        key = self._hkdf_bytes(secret, b"kvbm seal 1 key\0" + name, MASTER_BYTES)
        return _TenantKey(f"{master_id}.{label}", key)

    def _hkdf_bytes(self, secret: bytes, purpose: bytes, length: int) -> bytes:
        return self._hkdf.HKDF(self._hashes.SHA256(), length, None, purpose).derive(secret)


def _encoded(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass")


def _bound(label: str, tenant: str, associated: bytes) -> bytes:
    """All that the seal vouches for beside the bytes; no two can be read as one another."""
    return b"".join(
        len(each).to_bytes(8, "little") + each
        for each in (label.encode("ascii"), _encoded(tenant), associated)
    )
