"""Runs on a medium that fails: each block of a run ends for itself, and nothing wrong is ever found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.layout import BlockLayout
from kvbm.testing.stored_runs import (
    DEADLINE_S,
    LAYOUT,
    NAMESPACE,
    RunMemory,
    by_slot,
    collect,
    heads,
    heal,
    load,
    load_run,
    make_key,
    outcomes,
    store,
    store_run,
)
from kvbm.tiers.contract import RUN_BYTES_MAX, BlockHead
from kvbm.tiers.disk import geometry
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.syscalls import VECTOR_BUFFERS_MAX
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

SLOT_COUNT = 12
HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY


class Bench:
    """A tier on a medium that can be made to fail."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults = FaultySyscalls(1)
        self.tier = self.open()

    def open(self) -> DiskTier:
        return open_disk_tier(
            self.root, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT, io_threads=2, syscalls=self.faults
        )

    def reopen(self) -> list[int]:
        """The slots that are found after a restart."""
        self.faults.disarm()
        self.tier.close(keep=True)
        self.tier = self.open()
        return sorted(by_slot(self.tier.recovered()))

    def file(self, name: str) -> Path:
        assert self.tier.path is not None
        return self.tier.path / name

    def flip(self, name: str, offset: int) -> None:
        with self.file(name).open("r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 4]))
            os.fsync(file.fileno())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.faults.disarm()
    bench.tier.close(keep=False)


def test_a_run_is_one_call_for_the_bytes_and_three_for_its_records(bench: Bench) -> None:
    before = dict(bench.faults.calls)
    store_run(bench.tier, LAYOUT, range(8), 2)
    assert bench.faults.calls["pwritev"] - before.get("pwritev", 0) == 3
    before = dict(bench.faults.calls)
    assert outcomes(load_run(bench.tier, LAYOUT, range(8), 2)) == [HIT] * 8
    assert bench.faults.calls["preadv"] - before["preadv"] == 2
    before = dict(bench.faults.calls)
    bench.tier.forget(SlotIndex(2), 8)
    assert bench.tier.drain(DEADLINE_S)
    assert bench.faults.calls["pwritev"] - before["pwritev"] == 1


@pytest.mark.parametrize("name", ["slab-000", "journal"])
@pytest.mark.parametrize("struck", [0, 2, 4])
def test_a_bit_flipped_in_one_block_costs_that_block(bench: Bench, name: str, struck: int) -> None:
    store_run(bench.tier, LAYOUT, range(5), 3)
    bench.flip(name, (3 + struck) * (LAYOUT.block_bytes if name != "journal" else RECORD_BYTES) + 100)
    loaded = load_run(bench.tier, LAYOUT, range(5), 3)
    assert outcomes(loaded) == [MISS if place == struck else HIT for place in range(5)]
    assert (loaded.corrupt, [end.corrupt for end in loaded.blocks].index(True)) == (True, struck)
    again = load_run(bench.tier, LAYOUT, range(5), 3)
    assert (outcomes(again), again.corrupt) == (outcomes(loaded), False)
    assert bench.tier.fault == ""
    assert bench.reopen() == [slot for slot in range(3, 8) if slot != 3 + struck]


@pytest.mark.parametrize("operation", ["preadv", "pwritev"])
def test_short_and_interrupted_calls_make_whole_runs(bench: Bench, operation: str) -> None:
    for fault in (Fault.SHORT, Fault.EINTR):
        bench.faults.arm(FaultRule(operation=operation, fault=fault, chance=0.5))
    for start in range(0, 12, 4):
        assert outcomes(store_run(bench.tier, LAYOUT, range(start, start + 4), start)) == [HIT] * 4
    assert outcomes(load_run(bench.tier, LAYOUT, range(10), 0)) == [HIT] * 10
    assert sum(bench.faults.struck.values()) > 2


@pytest.mark.parametrize("struck", [0, 2, 4])
def test_a_sector_that_cannot_be_read_costs_one_block_of_a_run(bench: Bench, struck: int) -> None:
    store_run(bench.tier, LAYOUT, range(5), 3)
    offset = (3 + struck) * LAYOUT.block_bytes + 5000
    bench.faults.arm(FaultRule(operation="preadv", fault=Fault.EIO, file="slab", offset=offset))
    loaded = load_run(bench.tier, LAYOUT, range(5), 3)
    assert outcomes(loaded) == [HIT] * struck + [RETRY] * (5 - struck)
    assert (loaded.outcome, loaded.still_in_use) == (RETRY, False)
    assert loaded.error == bench.tier.fault
    assert f"reading slot {3 + struck}" in bench.tier.fault and "EIO" in bench.tier.fault
    bench.faults.disarm()
    assert heal(bench.tier)
    assert sorted(by_slot(bench.tier.recovered())) == [slot for slot in range(3, 8) if slot != 3 + struck]


def test_single_loads_that_went_together_lose_one_block_to_a_bad_sector(bench: Bench) -> None:
    store_run(bench.tier, LAYOUT, range(6), 0)
    bench.faults.arm(
        FaultRule(operation="preadv", fault=Fault.EIO, file="slab", offset=2 * LAYOUT.block_bytes)
    )
    targets = [RunMemory(LAYOUT) for _ in range(6)]
    for slot, target in enumerate(targets):
        bench.tier.submit_load(slot, [make_key(slot)], SlotIndex(slot), target.views)
    found = collect(bench.tier, 6)
    assert all(
        targets[slot].holds(make_key(slot)) for slot, done in found.items() if done.outcome is Outcome.HIT
    )
    assert found[2].outcome is RETRY
    assert bench.reopen() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(("file", "skip"), [("journal", 0), ("slab", 0), ("journal", 1)])
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC])
def test_a_run_that_cannot_be_written_leaves_nothing_of_it(
    bench: Bench, file: str, skip: int, fault: Fault
) -> None:
    store_run(bench.tier, LAYOUT, range(20, 24), 4)
    store(bench.tier, LAYOUT, make_key(9), 9)
    bench.faults.arm(FaultRule(operation="pwritev", fault=fault, file=file, skip=skip))
    stored = store_run(bench.tier, LAYOUT, range(5), 3)
    assert outcomes(stored) == [RETRY] * 5
    assert stored.error == bench.tier.fault
    kept = [4, 5, 6, 7, 9] if (file, skip) == ("journal", 0) else [9]
    assert bench.reopen() == kept, "only a run whose records were not voided yet is what it was"


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_power_lost_between_the_writes_of_a_run(bench: Bench, writes: int) -> None:
    store_run(bench.tier, LAYOUT, range(20, 26), 3)
    bench.faults.cut_power(writes)
    assert set(outcomes(store_run(bench.tier, LAYOUT, range(6), 3))) == {RETRY}
    bench.tier.close(keep=True)
    bench.faults = FaultySyscalls(2)
    bench.tier = bench.open()
    found = {slot: block.key for slot, block in by_slot(bench.tier.recovered()).items()}
    for slot, key in found.items():
        old, new = make_key(20 + slot - 3), make_key(slot - 3)
        assert key == (old if writes == 0 else new), "a record was there before its bytes or outlived them"
        assert load(bench.tier, LAYOUT, key, slot).outcome is HIT


def test_a_run_over_the_end_of_a_slab_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "SLAB_BYTES", 4 * LAYOUT.block_bytes)
    bench = Bench(tmp_path)
    store_run(bench.tier, LAYOUT, range(9), 2)
    assert outcomes(load_run(bench.tier, LAYOUT, range(9), 2)) == [HIT] * 9
    bench.flip("slab-001", 100)
    bench.faults.arm(FaultRule(operation="preadv", fault=Fault.EIO, file="slab-002", offset=0))
    assert outcomes(load_run(bench.tier, LAYOUT, range(9), 2)) == [HIT] * 2 + [MISS] + [HIT] * 3 + [RETRY] * 3
    assert bench.reopen() == [2, 3, 5, 6, 7, 9, 10]
    bench.tier.close(keep=False)


def test_blocks_of_a_run_that_have_no_room_end_alone(tmp_path: Path) -> None:
    """Sparse files on a filesystem that is full: slots that were written before take nothing more."""
    rule = FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP)
    faults = FaultySyscalls(0, rule)
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT, syscalls=faults)
    store_run(tier, LAYOUT, [11, 12], 3)
    faults.arm(FaultRule(operation="free_bytes", fault=Fault.SHORT))
    stored = store_run(tier, LAYOUT, range(5), 2)
    assert outcomes(stored) == [RETRY, HIT, HIT, RETRY, RETRY]
    assert stored.error.startswith("disk tier: no room")
    assert tier.fault == ""
    assert outcomes(load_run(tier, LAYOUT, range(5), 2)) == [MISS, HIT, HIT, MISS, MISS]
    tier.close(keep=False)


def test_neighbours_submitted_block_by_block_go_to_disk_as_runs(bench: Bench) -> None:
    """While one thread is busy with each, the others' jobs queue up behind it."""
    memory = [RunMemory.of([make_key(slot)], LAYOUT) for slot in range(SLOT_COUNT)]
    for slot, sources in enumerate(memory):
        accepted = bench.tier.submit_store(
            slot, [BlockHead(make_key(slot), None)], SlotIndex(slot), sources.views
        )
        assert accepted is Outcome.PENDING
    assert {done.outcome for done in collect(bench.tier, SLOT_COUNT).values()} == {HIT}
    assert bench.tier.drain(DEADLINE_S)
    assert bench.reopen() == list(range(SLOT_COUNT))
    for slot in range(SLOT_COUNT):
        assert load(bench.tier, LAYOUT, make_key(slot), slot).outcome is HIT


@pytest.mark.parametrize(
    ("shard_bytes", "shards", "expected"),
    [(1 << 16, 1, 16), (3 << 20, 1, 1), (4096, 2, 128), (4096, 256, 1), (RUN_BYTES_MAX, 1, 1)],
)
def test_the_length_of_runs_is_bounded_in_bytes_and_buffers(
    tmp_path: Path, shard_bytes: int, shards: int, expected: int
) -> None:
    layout = BlockLayout(block_tokens=16, shard_bytes=shard_bytes, shard_count=shards)
    tier = open_disk_tier(tmp_path, layout, NAMESPACE, capacity_blocks=2)
    assert tier.run_blocks_max == expected
    assert expected * shards <= VECTOR_BUFFERS_MAX
    memory = RunMemory(layout, expected + 1)
    with pytest.raises(AssertionError):
        tier.submit_store(1, heads(range(expected + 1)), SlotIndex(0), memory.views)
    tier.close(keep=False)
