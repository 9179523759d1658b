"""Where each slot lies on disk, and how many bytes a number of slots takes there."""

from __future__ import annotations

import msgspec

from kvbm.block import SlotIndex
from kvbm.errors import SettingsError
from kvbm.layout import PAGE_BYTES, BlockLayout, round_up

RECORD_BYTES = 256
"""One slot's record in the journal. It divides a sector, so a record is written whole or not at all."""

SLAB_BYTES = 1 << 30
"""A slab file is about this large, or the next power-of-two multiple that keeps to `SLAB_COUNT_MAX`."""

SLAB_COUNT_MAX = 64
"""Bounds the open descriptors of a tier."""

SLOT_COUNT_MAX = 1 << 28

_EXTENTS_PER_PAGE = 128
"""Entries that a page of a file's extent tree holds at the very least (ext4: 340, half full after a split)."""


class DiskSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The setting that a disk tier comes from, for errors and log lines: what the caller calls each part of it.

    `as_set` is the capacity as it was written, which `tier_count` tiers share. `unowned` is empty where that cannot be
    set.
    """

    root: str = "root"
    size: str = "capacity_bytes"
    as_set: str | int | None = None
    blocks: str = "capacity_blocks"
    unowned: str = "unowned_bytes"
    tier_count: int = 1


AS_PARAMETERS = DiskSetting()
"""The names of `open_disk_tier`'s own parameters."""


class DiskGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed arrangement of slots in slab files. Slot s lies in slab `s // slab_slots`; only whole slots in a slab."""

    block_bytes: int
    slot_count: int
    slab_slots: int
    fact_bytes: int = 0
    """A slot's record of facts (see `facts_file`); 0 where none are kept."""

    @property
    def slab_count(self) -> int:
        return -(-self.slot_count // self.slab_slots)

    def slab_bytes(self, slab: int) -> int:
        """The size of one slab file; the last may be smaller."""
        assert 0 <= slab < self.slab_count
        return min(self.slab_slots, self.slot_count - slab * self.slab_slots) * self.block_bytes

    def locate(self, slot: SlotIndex) -> tuple[int, int]:
        """(slab, byte offset in it)."""
        assert 0 <= slot < self.slot_count
        slab, place = divmod(slot, self.slab_slots)
        return slab, place * self.block_bytes

    @property
    def journal_bytes(self) -> int:
        return round_up(self.slot_count * RECORD_BYTES, PAGE_BYTES)

    def total_bytes(self, meta_bytes: int) -> int:
        """All that the directory may ever take on the medium: data, journal, meta (twice, while it is replaced),
        lock, the directory itself, a mark of a reset, and the filesystem's own maps of the files when they are as
        scattered as can be.
        """
        facts_bytes = round_up(self.slot_count * self.fact_bytes, PAGE_BYTES)
        extents = self.slot_count + (self.journal_bytes + facts_bytes) // PAGE_BYTES
        file_maps = (
            2 * self.slab_count + 2 + (self.fact_bytes > 0) + extents // _EXTENTS_PER_PAGE
        ) * PAGE_BYTES
        small_files = 2 * round_up(meta_bytes, PAGE_BYTES) + 3 * PAGE_BYTES
        files = self.slot_count * self.block_bytes + self.journal_bytes + facts_bytes
        return files + small_files + file_maps


def plan_geometry(
    layout: BlockLayout,
    capacity_bytes: int | None,
    capacity_blocks: int | None,
    meta_bytes: int,
    setting: DiskSetting = AS_PARAMETERS,
    fact_bytes: int = 0,
) -> DiskGeometry:
    """The geometry for a capacity: exactly `capacity_blocks` slots when given, else as many as `capacity_bytes` holds.

    Raises SettingsError when not even one block fits.
    """
    block_bytes = layout.block_bytes
    each = f" for each of {setting.tier_count} namespaces" if setting.tier_count > 1 else ""
    if capacity_blocks is not None:
        if not 0 < capacity_blocks <= SLOT_COUNT_MAX:
            accepted = f"1 to {SLOT_COUNT_MAX} blocks{each}"
            raise SettingsError(setting.blocks, setting.as_set or capacity_blocks, accepted)
        return _arrange(block_bytes, capacity_blocks, _slab_slots(block_bytes, capacity_blocks), fact_bytes)
    assert capacity_bytes is not None, "a capacity is needed, in bytes or in blocks"
    bound = min(capacity_bytes // block_bytes, SLOT_COUNT_MAX)
    slab_slots = _slab_slots(block_bytes, bound)
    low, high = 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        if _arrange(block_bytes, middle, slab_slots, fact_bytes).total_bytes(meta_bytes) <= capacity_bytes:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        needed = _arrange(block_bytes, 1, 1, fact_bytes).total_bytes(meta_bytes) * setting.tier_count
        accepted = f"at least {needed / 1e9:.9f} GB (one block of this model){each}"
        raise SettingsError(setting.size, setting.as_set or capacity_bytes, accepted)
    return _arrange(block_bytes, low, slab_slots, fact_bytes)


def _slab_slots(block_bytes: int, slot_count: int) -> int:
    slab_slots = max(1, SLAB_BYTES // block_bytes)
    while slab_slots * SLAB_COUNT_MAX < slot_count:
        slab_slots *= 2
    return slab_slots


def _arrange(block_bytes: int, slot_count: int, slab_slots: int, fact_bytes: int) -> DiskGeometry:
    return DiskGeometry(
        block_bytes=block_bytes, slot_count=slot_count, slab_slots=slab_slots, fact_bytes=fact_bytes
    )
