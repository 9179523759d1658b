"""Where slots lie, and that a capacity is used as far as it goes and never exceeded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import SlotIndex
from kvbm.errors import SettingsError
from kvbm.layout import BlockLayout
from kvbm.tiers.disk.geometry import SLAB_BYTES, SLAB_COUNT_MAX, DiskSetting, plan_geometry

META_BYTES = 700


def make_layout(shard_bytes: int, shard_count: int = 1) -> BlockLayout:
    return BlockLayout(block_tokens=16, shard_bytes=shard_bytes, shard_count=shard_count)


@given(
    capacity=st.integers(1 << 17, 1 << 42),
    shard_bytes=st.integers(1, 1 << 26),
    shard_count=st.integers(1, 8),
)
def test_a_capacity_is_used_and_never_exceeded(capacity: int, shard_bytes: int, shard_count: int) -> None:
    layout = make_layout(shard_bytes, shard_count)
    try:
        geometry = plan_geometry(layout, capacity, None, META_BYTES)
    except SettingsError:
        assert capacity < layout.block_bytes + 20 * 4096
        return
    assert geometry.slot_count > 0
    assert geometry.total_bytes(META_BYTES) <= capacity
    more = msgspec.structs.replace(geometry, slot_count=geometry.slot_count + 1)
    assert more.total_bytes(META_BYTES) > capacity or geometry.slot_count == 1 << 28
    assert geometry.slab_count <= SLAB_COUNT_MAX
    slabs = [geometry.slab_bytes(slab) for slab in range(geometry.slab_count)]
    assert sum(slabs) == geometry.slot_count * layout.block_bytes
    assert all(0 < size <= slabs[0] for size in slabs)


@given(slot_count=st.integers(1, 3000), slab_blocks=st.integers(1, 40))
def test_slots_lie_side_by_side(slot_count: int, slab_blocks: int) -> None:
    layout = make_layout(SLAB_BYTES // slab_blocks // 4096 * 4096)
    geometry = plan_geometry(layout, None, slot_count, META_BYTES)
    assert geometry.slot_count == slot_count
    end = (0, 0)
    for slot in range(slot_count):
        slab, offset = geometry.locate(SlotIndex(slot))
        assert (slab, offset) in (end, (end[0] + 1, 0))
        assert offset + layout.block_bytes <= geometry.slab_bytes(slab)
        end = (slab, offset + layout.block_bytes)


def test_the_number_of_blocks_wins_over_the_bytes() -> None:
    assert plan_geometry(make_layout(4096), 1, 17, META_BYTES).slot_count == 17


def test_overhead_is_small_for_blocks_of_usual_size() -> None:
    geometry = plan_geometry(make_layout(2 << 20), 8 * 10**9, None, META_BYTES)
    assert geometry.slot_count * geometry.block_bytes > 0.999 * 8 * 10**9


@pytest.mark.parametrize(
    ("capacity_bytes", "capacity_blocks", "field"),
    [
        (4096, None, "capacity_bytes"),
        (None, 0, "capacity_blocks"),
        (None, 1 << 40, "capacity_blocks"),
    ],
)
def test_a_capacity_that_cannot_be_used_is_refused(
    capacity_bytes: int | None, capacity_blocks: int | None, field: str
) -> None:
    with pytest.raises(SettingsError, match=field) as caught:
        plan_geometry(make_layout(4096), capacity_bytes, capacity_blocks, META_BYTES)
    assert "\n" not in str(caught.value)


def test_an_error_names_what_the_caller_set_and_what_it_accepts_is_enough() -> None:
    layout, setting = make_layout(4096), DiskSetting(size="disk", as_set="8KB")
    with pytest.raises(SettingsError, match=r"^disk='8KB' cannot be used: at least ([0-9.]+) GB ") as caught:
        plan_geometry(layout, 8000, None, META_BYTES, setting)
    needed = round(float(caught.value.accepted.split()[2]) * 1e9)
    assert plan_geometry(layout, needed, None, META_BYTES, setting).slot_count == 1
    with pytest.raises(SettingsError):
        plan_geometry(layout, needed - 1, None, META_BYTES, setting)
