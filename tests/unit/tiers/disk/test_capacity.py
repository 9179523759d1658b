"""The bytes that the tier takes on the medium, and the blocks that are left after the settings changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.errors import TierError
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, OTHER_NAMESPACE, by_slot, heal, load, make_key, store
from kvbm.tiers.disk import geometry
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls


def open_tier(
    root: Path,
    capacity_blocks: int | None = None,
    layout: BlockLayout = LAYOUT,
    namespace: Namespace = NAMESPACE,
    capacity_bytes: int | None = None,
    zerofill_fallback: bool = False,
    persist: bool = True,
    syscalls: Syscalls | None = None,
) -> DiskTier:
    return open_disk_tier(
        root,
        layout,
        namespace,
        capacity_blocks=capacity_blocks,
        capacity_bytes=capacity_bytes,
        io_threads=2,
        zerofill_fallback=zerofill_fallback,
        persist=persist,
        syscalls=syscalls,
    )


def medium_bytes(root: Path) -> int:
    """The bytes of everything under `root`, directories included, as du counts."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*"))


def fill(tier: DiskTier, layout: BlockLayout = LAYOUT, step: int = 1) -> None:
    for slot in range(0, tier.slot_count, step):
        assert store(tier, layout, make_key(slot), slot).outcome is Outcome.HIT


def found_slots(tier: DiskTier) -> list[int]:
    return sorted(by_slot(tier.recovered()))


@pytest.mark.parametrize("capacity_bytes", [90_000, 700_000, 5_000_000])
@pytest.mark.parametrize("shard_bytes", [4096, 40_000])
def test_the_medium_never_holds_more_than_the_capacity(
    tmp_path: Path, capacity_bytes: int, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "SLAB_BYTES", 1 << 19)
    layout = BlockLayout(block_tokens=16, shard_bytes=shard_bytes)
    tier = open_tier(tmp_path, capacity_bytes=capacity_bytes, layout=layout)
    # Every other slot first: the filesystem's map of the files is then as scattered as it gets.
    fill(tier, layout, step=2)
    assert medium_bytes(tmp_path) <= capacity_bytes
    fill(tier, layout)
    assert medium_bytes(tmp_path) <= capacity_bytes
    assert tier.slot_count * layout.block_bytes > capacity_bytes * 0.7 - 50_000
    tier.close(keep=True)
    assert medium_bytes(tmp_path) <= capacity_bytes


def test_blocks_that_still_fit_are_kept_when_the_capacity_changes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 8)
    fill(tier)
    tier.close(keep=True)
    for slot_count, expected in ((3, 3), (20, 3), (5, 3)):
        tier = open_tier(tmp_path, slot_count)
        assert tier.slot_count == slot_count
        assert found_slots(tier) == list(range(expected)), "what a shrunk tier gave up must not come back"
        for slot in range(slot_count):
            loaded = load(tier, LAYOUT, make_key(slot), slot)
            assert loaded.outcome is (Outcome.HIT if slot < expected else Outcome.MISS)
            assert not loaded.corrupt
        tier.close(keep=True)


def test_slabs_grow_and_shrink_with_the_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "SLAB_BYTES", 4 * LAYOUT.block_bytes)
    tier = open_tier(tmp_path, 10)
    fill(tier)
    path = tier.path
    assert path is not None
    assert {p.name: p.stat().st_size // LAYOUT.block_bytes for p in path.glob("slab-*")} == {
        "slab-000": 4,
        "slab-001": 4,
        "slab-002": 2,
    }
    tier.close(keep=True)
    tier = open_tier(tmp_path, 5)
    assert {p.name: p.stat().st_size // LAYOUT.block_bytes for p in path.glob("slab-*")} == {
        "slab-000": 4,
        "slab-001": 1,
    }
    assert found_slots(tier) == list(range(5))
    for slot in range(5):
        assert load(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
    tier.close(keep=False)


@pytest.mark.parametrize(
    "layout",
    [
        BlockLayout(block_tokens=32, shard_bytes=9000, shard_count=2),
        BlockLayout(block_tokens=16, shard_bytes=9001, shard_count=2),
        BlockLayout(block_tokens=16, shard_bytes=9000, shard_count=1),
    ],
)
def test_another_layout_starts_empty_in_a_place_of_its_own(tmp_path: Path, layout: BlockLayout) -> None:
    """Two engines of one model may differ in it: the first start of one must not empty what the other has left."""
    tier = open_tier(tmp_path, 8)
    fill(tier)
    path = tier.path
    tier.close(keep=True)
    tier = open_tier(tmp_path, 8, layout)
    assert tier.path != path
    assert found_slots(tier) == []
    assert load(tier, layout, make_key(0), 0).outcome is Outcome.MISS
    fill(tier, layout)
    tier.close(keep=True)
    assert found_slots(open_and_close(tmp_path, 8, layout)) == list(range(8))
    assert found_slots(open_and_close(tmp_path, 8)) == list(range(8))


def open_and_close(root: Path, capacity_blocks: int, layout: BlockLayout = LAYOUT) -> DiskTier:
    tier = open_tier(root, capacity_blocks, layout)
    tier.close(keep=True)
    return tier


@pytest.mark.parametrize("damage", ["version", "garbage", "gone"])
def test_a_directory_of_another_format_starts_empty(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path, 4)
    fill(tier)
    assert tier.path is not None
    meta = tier.path / "meta.json"
    tier.close(keep=True)
    if damage == "version":
        meta.write_text(meta.read_text().replace('"format": 2', '"format": 1'))
    elif damage == "garbage":
        meta.write_bytes(b"\0" * 100)
    else:
        meta.unlink()
    tier = open_tier(tmp_path, 4)
    assert found_slots(tier) == []
    assert load(tier, LAYOUT, make_key(0), 0).outcome is Outcome.MISS
    tier.close(keep=True)
    assert '"format": 2' in meta.read_text()


def test_without_persistence_nothing_is_taken_over_and_nothing_left(tmp_path: Path) -> None:
    left = open_tier(tmp_path, 4)
    fill(left)
    left.close(keep=True)
    tier = open_tier(tmp_path, 4, persist=False)
    assert tier.path != left.path
    assert found_slots(tier) == []
    fill(tier)
    tier.close(keep=True)
    assert len(os.listdir(tmp_path)) == 1
    again = open_tier(tmp_path, 4)
    assert found_slots(again) == [0, 1, 2, 3], "what another replica keeps"
    again.close(keep=False)


def test_without_persistence_a_tier_that_heals_starts_empty_and_leaves_nothing(tmp_path: Path) -> None:
    left = open_tier(tmp_path, 4)
    fill(left)
    left.close(keep=True)
    syscalls = FaultySyscalls(0)
    tier = open_tier(tmp_path, 4, persist=False, syscalls=syscalls)
    fill(tier)
    path = tier.path
    syscalls.arm(FaultRule(operation="pwritev", fault=Fault.EIO, times=1))
    assert store(tier, LAYOUT, make_key(0), 0).outcome is Outcome.RETRY
    assert heal(tier)
    assert tier.path == path, "the old one has made room first"
    assert found_slots(tier) == []
    assert len(os.listdir(tmp_path)) == 2
    tier.close(keep=True)
    assert found_slots(open_and_close(tmp_path, 4)) == [0, 1, 2, 3]


def test_what_one_without_persistence_left_in_a_crash_goes_with_the_next_claim(tmp_path: Path) -> None:
    crashed = open_tier(tmp_path, 4, persist=False)
    fill(crashed)
    medium, crashed._upkeep.medium = crashed._upkeep.medium, None
    assert medium is not None
    medium.close(remove=False)  # as the kernel does it
    tier = open_tier(tmp_path, 4)
    assert found_slots(tier) == []
    assert crashed.path != tier.path
    assert len(os.listdir(tmp_path)) == 1
    tier.close(keep=False)
    crashed.close(keep=False)


def test_two_tiers_of_one_namespace_do_not_meet(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path, 4), open_tier(tmp_path, 4)
    store(first, LAYOUT, make_key(1), 0)
    assert load(second, LAYOUT, make_key(1), 0).outcome is Outcome.MISS
    store(second, LAYOUT, make_key(2), 0)
    assert load(first, LAYOUT, make_key(1), 0).outcome is Outcome.HIT
    first.close(keep=True)
    second.close(keep=True)


def test_too_little_space_is_refused_with_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"needs [\d.]+ GB more and .* has [\d.]+ GB free") as caught:
        open_tier(tmp_path, capacity_bytes=1 << 60, layout=BlockLayout(block_tokens=16, shard_bytes=1 << 35))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_room_is_made_from_what_nobody_owns(tmp_path: Path) -> None:
    """Another model's directory goes when the space is needed, and not before; one that is owned never goes."""
    left, owned = open_tier(tmp_path, 4, namespace=OTHER_NAMESPACE), None
    left_path = left.path
    assert left_path is not None
    left.close(keep=True)
    owned = open_tier(tmp_path, 4, namespace=Namespace(model="owned", fields=()))
    tier = open_tier(tmp_path, 4)
    assert left_path.exists()
    tier.close(keep=False)
    short_of_space = FaultySyscalls(0, FaultRule(operation="free_bytes", fault=Fault.SHORT, times=1))
    tier = open_tier(tmp_path, 4, syscalls=short_of_space)
    assert not left_path.exists()
    assert owned.path is not None
    assert owned.path.exists()
    tier.close(keep=False)
    owned.close(keep=False)


def test_without_fallocate_the_files_are_sparse_or_filled(tmp_path: Path) -> None:
    def without_fallocate() -> FaultySyscalls:
        return FaultySyscalls(0, FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP))

    for zerofill, least, most in ((False, 0, 8), (True, 64, 80)):
        tier = open_tier(tmp_path, 64, zerofill_fallback=zerofill, syscalls=without_fallocate())
        assert tier.path is not None
        pages = (tier.path / "slab-000").stat().st_blocks * 512 // LAYOUT.block_bytes
        assert least <= pages <= most
        fill(tier)
        for slot in range(64):
            assert load(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
        tier.close(keep=False)


def test_zero_filling_destroys_no_block_of_an_earlier_run(tmp_path: Path) -> None:
    rule = FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP)
    tier = open_tier(tmp_path, 5, zerofill_fallback=True, syscalls=FaultySyscalls(0, rule))
    fill(tier)
    tier.close(keep=True)
    tier = open_tier(tmp_path, 9, zerofill_fallback=True, syscalls=FaultySyscalls(0, rule))
    assert found_slots(tier) == list(range(5))
    for slot in range(5):
        assert load(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
    assert load(tier, LAYOUT, make_key(7), 7).outcome is Outcome.MISS
    tier.forget(SlotIndex(0))
    tier.close(keep=False)
