"""`meta.json` of a directory of the disk tier: whose blocks are in it, and how they lie there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec

from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.disk.geometry import DiskGeometry

META_NAME = "meta.json"
FORMAT_VERSION = 2
META_BYTES_MAX = 1 << 20


class DirectoryMeta(msgspec.Struct, frozen=True, kw_only=True):
    """`meta.json`: everything that must agree before a directory's blocks may be used again."""

    format: int
    fingerprint: str
    namespace: Namespace
    block_tokens: int
    shard_bytes: int
    shard_count: int
    block_bytes: int
    slot_count: int
    slab_slots: int
    persist: bool = True
    """False: its owner asked for nothing to be left behind, so without an owner it is of no use."""
    reset: int = 0
    """The number of the last reset whose blocks are not here any more (see `reset_marks`)."""

    def same_blocks(self, other: DirectoryMeta) -> bool:
        """True when slot i of one holds the same bytes in the same place as slot i of the other.

        The number of slots may differ, whether they are left behind, resets, and the model's name: the fingerprint
        counts.
        """
        alike = msgspec.structs.replace(
            self,
            slot_count=other.slot_count,
            namespace=other.namespace,
            persist=other.persist,
            reset=other.reset,
        )
        return alike == other and self.namespace.fingerprint == other.namespace.fingerprint

    def difference(self, wanted: DirectoryMeta) -> str:
        """One line saying why its blocks are not those of `wanted`."""
        if self.reset < wanted.reset and self.same_blocks(wanted):
            return "its blocks were reset while it could not be written"
        for name in ("format", "block_tokens", "shard_bytes", "shard_count", "block_bytes", "slab_slots"):
            if getattr(self, name) != getattr(wanted, name):
                return f"its {name} is {getattr(self, name)}, and {getattr(wanted, name)} is wanted"
        return "it is of another namespace"

    @property
    def geometry(self) -> DiskGeometry:
        return DiskGeometry(
            block_bytes=self.block_bytes, slot_count=self.slot_count, slab_slots=self.slab_slots
        )


def describe(
    namespace: Namespace, layout: BlockLayout, geometry: DiskGeometry, persist: bool = True, reset: int = 0
) -> DirectoryMeta:
    """The meta of a directory with these contents."""
    return DirectoryMeta(
        format=FORMAT_VERSION,
        fingerprint=namespace.fingerprint.hex(),
        namespace=namespace,
        block_tokens=layout.block_tokens,
        shard_bytes=layout.shard_bytes,
        shard_count=layout.shard_count,
        block_bytes=layout.block_bytes,
        slot_count=geometry.slot_count,
        slab_slots=geometry.slab_slots,
        persist=persist,
        reset=reset,
    )


def encode_meta(meta: DirectoryMeta) -> bytes:
    """The text of `meta.json`."""
    return msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n"


def meta_bytes_bound(namespace: Namespace, layout: BlockLayout) -> int:
    """No meta of this namespace is longer, whatever the geometry."""
    widest = DiskGeometry(block_bytes=layout.block_bytes, slot_count=10**18, slab_slots=10**18)
    return len(encode_meta(describe(namespace, layout, widest, persist=False, reset=10**18)))


def read_meta(path: Path | str, dir_fd: int | None = None) -> DirectoryMeta | None:
    """The meta in that file; None when it is missing, unreadable, too long or not one of ours."""
    try:
        fd = open_to_read(path, dir_fd)
    except OSError:
        return None
    with open(fd, "rb") as file:
        try:
            meta = msgspec.json.decode(file.read(META_BYTES_MAX), type=DirectoryMeta)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
    sane = 0 < meta.slot_count and 0 < meta.slab_slots and 0 < meta.shard_count
    return meta if sane and 0 < meta.block_bytes and meta.block_bytes % meta.shard_count == 0 else None


def open_to_read(path: Path | str, dir_fd: int | None = None) -> int:
    """Open a regular file, and nothing else: in a directory that all may write to, a pipe could hold us for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd
