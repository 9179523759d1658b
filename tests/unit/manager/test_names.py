"""The engine's name of a block goes with it to disk and back, and costs nothing where it is the block's key."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from kvbm.block import GROUP_MAX, BlockKey
from kvbm.hashing import derive_key
from kvbm.manager.names import NO_HASH, EngineName, EngineNames
from rigs.space import KEYS, ME, OTHER, Bench

HASHES = b"".join(OTHER)


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: int) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.space.check()
        bench.close()


def store(bench: Bench, keys: list[BlockKey], hashes: bytes, group: int = 0) -> None:
    number = next(bench.numbers)
    slots = bench.space.reserve(ME, number, None, keys, hashes, group)
    for key, slot in zip(keys, slots, strict=True):
        if slot >= 0:
            bench.fill(slot, key)
    bench.space.commit(ME, number)
    bench.finish_all()


def written(bench: Bench) -> dict[BlockKey, EngineName]:
    """The medium's record of each block."""
    return {entry.key: EngineName(entry.engine_hash, entry.group) for entry in bench.medium.entries.values()}


def test_a_block_whose_key_is_the_engines_hash_is_written_under_it(make: Callable[..., Bench]) -> None:
    bench = make()
    store(bench, KEYS[:3], b"")
    assert written(bench) == {key: EngineName(key, 0) for key in KEYS[:3]}


def test_a_derived_key_brings_the_engines_hash_and_a_group_stays(make: Callable[..., Bench]) -> None:
    bench = make()
    store(bench, KEYS[:1], b"")
    store(bench, KEYS[:4], HASHES[: 4 * 32], GROUP_MAX)  # the first is held, and keeps its name
    assert written(bench) == {
        KEYS[0]: EngineName(KEYS[0], 0),
        **{KEYS[i]: EngineName(OTHER[i], GROUP_MAX) for i in (1, 2, 3)},
    }


def test_a_group_without_hashes_and_a_hash_that_is_not_known(make: Callable[..., Bench]) -> None:
    bench = make()
    store(bench, KEYS[:2], b"", 7)
    store(bench, OTHER[:2], NO_HASH + KEYS[9])
    assert written(bench) == {
        KEYS[0]: EngineName(KEYS[0], 7),
        KEYS[1]: EngineName(KEYS[1], 7),
        OTHER[0]: EngineName(b"", 0),
        OTHER[1]: EngineName(KEYS[9], 0),
    }


@pytest.mark.parametrize("name", [EngineName(OTHER[0], 3), EngineName(b"", 0), EngineName(KEYS[0], 0)])
def test_a_block_that_came_from_disk_and_is_written_again_keeps_its_name(
    make: Callable[..., Bench], name: EngineName
) -> None:
    bench = make(host_slots=4, disk_slots=4)
    store(bench, KEYS[:1], name.engine_hash or NO_HASH, name.group)
    bench.space.clear("host")
    store(bench, OTHER[:3], HASHES[: 3 * 32])  # the slot is used by others in between
    bench.space.clear("host")
    bench.space.lookup(ME, 90, KEYS[:1], 0)
    bench.finish_all()
    bench.space.release(ME, 90)
    bench.space.clear("disk")
    assert written(bench) == {}
    bench.space.lookup(ME, 91, KEYS[:1], 0)
    bench.finish_all()
    assert written(bench) == {KEYS[0]: name}


def test_a_name_goes_with_its_slot(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=1)
    store(bench, KEYS[:1], HASHES[:32], 5)
    bench.space.clear("host")
    store(bench, OTHER[:1], b"")
    assert written(bench)[OTHER[0]] == EngineName(OTHER[0], 0)
    number = next(bench.numbers)
    bench.space.clear("host")
    assert bench.space.reserve(ME, number, None, KEYS[1:2], HASHES[32:64]) == [0]
    bench.space.commit(ME, number, failed=(0,))
    store(bench, KEYS[2:3], b"")
    assert written(bench)[KEYS[2]] == EngineName(KEYS[2], 0)


def test_ordinary_blocks_cost_nothing_and_others_at_most_40_bytes_a_slot() -> None:
    slot_count = 20_000
    tracemalloc.start()
    try:
        names = EngineNames(slot_count)
        keys = [BlockKey(i.to_bytes(32, "little")) for i in range(1, slot_count + 1)]
        before, _ = tracemalloc.get_traced_memory()
        for slot, key in enumerate(keys):
            names.reserved((slot,), (key,), b"", 0, 0)
            names.brought(slot, key, key, 0)
            names.forget(slot)
        ordinary, _ = tracemalloc.get_traced_memory()
        assert ordinary - before < 1000
        for slot, key in enumerate(keys):
            names.reserved((slot,), (key,), derive_key(bytes(32), key), 0, 0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / slot_count <= 40
    assert all(names.of(slot, key).engine_hash == derive_key(bytes(32), key) for slot, key in enumerate(keys))
