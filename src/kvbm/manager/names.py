"""The engines' own names of blocks in host memory, where a name is not the block's key.

A block's key is the engine's own hash, unless something went into the key that the hash leaves out (an adapter, a
reset). Only for such blocks the hash is kept beside the slot, so that it reaches disk with the block, and so is the
group of a block that has one. Until there is such a block this costs nothing, from then on a fixed number of bytes a
slot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm.block import KEY_BYTES, BlockKey

NO_HASH = bytes(KEY_BYTES)
"""Instead of a hash: the engine has none of 32 bytes for this block."""

_ENTRY = struct.Struct("<?xH32s")
_FREE = bytes(_ENTRY.size)


class EngineName(NamedTuple):
    """The engine's own hash of a block, empty where it is not known, and the block's group."""

    engine_hash: bytes
    group: int


class EngineNames:
    """The names of the blocks in `slot_count` slots. Owned by the manager's thread."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._table: bytearray | None = None

    def reserved(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        hashes: bytes,
        first: int,
        group: int | bytes,
    ) -> None:
        """These slots are being filled with blocks of these keys, or with fewer.

        `hashes` holds 32 bytes for each, from number `first` on, and NO_HASH where the engine has no such name; it is
        empty where the keys are the names. `group` is that of all, or has a byte for each, as `hashes`.
        """
        if hashes or group:
            for index, slot in enumerate(slots, first):
                start = index * KEY_BYTES
                own = group if isinstance(group, int) else group[index]
                self._note(slot, hashes[start : start + KEY_BYTES] if hashes else keys[index - first], own)

    def brought(self, slot: int, key: BlockKey, engine_hash: bytes, group: int) -> None:
        """A block came from disk with this name."""
        if engine_hash != key or group:
            self._note(slot, engine_hash or NO_HASH, group)

    def of(self, slot: int, key: BlockKey) -> EngineName:
        """The name of the block in a slot: its key, and no group, where no other was noted."""
        if self._table is not None:
            known, group, engine_hash = _ENTRY.unpack_from(self._table, slot * _ENTRY.size)
            if known:
                return EngineName(b"" if engine_hash == NO_HASH else engine_hash, group)
        return EngineName(key, 0)

    def forget(self, slot: int) -> None:
        """The slot no longer holds its block."""
        self.forget_all((slot,))

    def forget_all(self, slots: Iterable[int]) -> None:
        """`forget` for many slots at once."""
        if self._table is not None:
            for slot in slots:
                self._table[slot * _ENTRY.size : (slot + 1) * _ENTRY.size] = _FREE

    def _note(self, slot: int, engine_hash: bytes, group: int) -> None:
        assert len(engine_hash) == KEY_BYTES
        if self._table is None:
            # Zeros take no memory until they are written to.
            self._table = bytearray(self._slot_count * _ENTRY.size)
        _ENTRY.pack_into(self._table, slot * _ENTRY.size, True, group, engine_hash)
