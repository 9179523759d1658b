"""Sealing: what a store's owner, or another tenant, shall not read or forge is encrypted before it leaves.

With a seal, whoever can write to the store can still take blocks away, or put an older block back under its own key:
that is the same block. He cannot make up bytes, move them to another key, namespace, group or tenant, or read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from kvbm.tiers.remote.blobs import Buffer


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
