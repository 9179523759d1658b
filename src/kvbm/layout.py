"""KV geometry and the namespace: everything that must agree before bytes may be shared.

A block's bytes are opaque to the manager. The *namespace* fixes their meaning, and the namespace's
hash, the *fingerprint*, is part of every session, of every disk directory and of every checksum. A block key means
something inside one namespace only.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvbm.groups import GROUPS_MAX, Group

PART = "part"
"""The field that says which shards of its engine's blocks a node holds, where other nodes hold the others."""

PAGE_BYTES = 4096
"""Alignment of slots in memory and on disk (O_DIRECT)."""

LAYOUT_MAX = 1 << 40
"""No size or count of a layout is above this."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a block, as every process of one namespace sees it.

    A *shard* is the part of a block that one rank holds. Ranks that hold the same bytes (MLA) share a shard,
    so `shard_count` may be below the number of ranks. All shards of a block have `shard_bytes` bytes.

    `groups` names the kinds of layers of a hybrid model; it is empty where every block holds all layers. A block of
    any group has the same size, and `block_tokens` is by how many tokens the engine names content.
    """

    block_tokens: int
    shard_bytes: int
    shard_count: int = 1
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, because layouts arrive in messages."""
        for name in ("block_tokens", "shard_bytes", "shard_count"):
            if not 0 < getattr(self, name) <= LAYOUT_MAX:
                raise ValueError(f"{name}={getattr(self, name)} cannot be used: 1 to {LAYOUT_MAX}")
        if len(self.groups) > GROUPS_MAX:
            raise ValueError(f"{len(self.groups)} groups cannot be used: at most {GROUPS_MAX}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one shard's slot in the host arena and on disk: `shard_bytes` rounded up to a page."""
        return round_up(self.shard_bytes, PAGE_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its shards, padding included, as a tier accounts for it."""
        return self.slot_bytes * self.shard_count


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must agree before two engines may share bytes.

    `fields` holds name and value of each part in a fixed order: the digest of the weights, KV dtype, block
    size, physical layout (and CPU instruction set packing), parallel shape. Two namespaces are equal when
    their fingerprints are. `model` is a label for people: the same weights may be served under many names.
    `ephemeral`: only one start of an engine can name it, so nothing of it outlives that.
    """

    model: str
    fields: tuple[tuple[str, str], ...]
    ephemeral: bool = False

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: sha256 over the length-prefixed fields."""
        digest = hashlib.sha256(b"kvbm-namespace-1")
        for name, value in self.fields:
            for part in (name.encode(), value.encode()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.digest()

    @property
    def whole(self) -> Namespace:
        """The namespace of all nodes of its engine: by its fingerprint the engine names blocks."""
        fields = tuple(field for field in self.fields if field[0] != PART)
        return self if fields == self.fields else msgspec.structs.replace(self, fields=fields)

    def part(self, shards: str) -> Namespace:
        """The namespace of a node that holds these shards of the blocks and no others."""
        return msgspec.structs.replace(self.whole, fields=(*self.whole.fields, (PART, shards)))

    @property
    def short(self) -> str:
        """The first 12 hex digits of the fingerprint: for logs and directory names."""
        return self.fingerprint.hex()[:12]

    def difference(self, other: Namespace) -> str:
        """One line naming the first field in which `other` differs, for refusals and logs."""
        ours, theirs = dict(self.fields), dict(other.fields)
        for name in {**ours, **theirs}:
            if theirs.get(name) != ours.get(name):
                return f"{name} is {theirs.get(name)!r} here, {ours.get(name)!r} there"
        return "no field differs" if self.fields == other.fields else "the order of the fields differs"
