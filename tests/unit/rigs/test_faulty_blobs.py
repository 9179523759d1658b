"""Faults around a store of blobs: each kind, that a seed repeats itself, and that silence ends."""

from __future__ import annotations

import threading

import pytest

from kvbm.clock import ManualClock
from kvbm.tiers.remote.blobs import Put, StoreError
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs, MemoryBlobs

BLOB = bytes(range(200))


def stores(*rules: BlobRule, seed: int = 0) -> tuple[MemoryBlobs, FaultyBlobs]:
    memory = MemoryBlobs(ManualClock(1000.0))
    memory.put("packs/a", [BLOB])
    memory.put("packs/b", [BLOB[::-1]])
    return memory, FaultyBlobs(memory, *rules, seed=seed)


@pytest.mark.parametrize("trouble", ["unreachable", "slow", "refused", "full", "throttled", "failed"])
def test_errors_are_of_their_kind_and_nothing_reaches_the_store(trouble: str) -> None:
    memory, faulty = stores(BlobRule(fault=BlobFault(trouble), operation="put", times=1))
    with pytest.raises(StoreError) as caught:
        faulty.put("packs/c", [BLOB])
    assert caught.value.trouble == trouble
    assert "packs/c" not in memory.blobs
    assert faulty.put("packs/c", [BLOB]) is Put.CREATED
    assert faulty.struck == {BlobFault(trouble): 1}


def test_reads_are_spoilt_as_said() -> None:
    assert stores(BlobRule(fault=BlobFault.TRUNCATED))[1].read("packs/a", 0, 200) == BLOB[:100]
    assert stores(BlobRule(fault=BlobFault.LOST))[1].read("packs/a", 0, 200) is None
    assert stores(BlobRule(fault=BlobFault.FOREIGN))[1].read("packs/a", 0, 200) == BLOB[::-1]
    flipped = stores(BlobRule(fault=BlobFault.FLIPPED))[1].read_end("packs/a", 50)
    assert flipped is not None
    wrong = [ours ^ theirs for ours, theirs in zip(flipped[0], BLOB[150:], strict=True)]
    assert sum(bits.bit_count() for bits in wrong) == 1
    assert flipped[1] == 200


def test_puts_are_lost_torn_or_unsure_as_said() -> None:
    memory, faulty = stores(BlobRule(fault=BlobFault.LOST, times=1))
    assert faulty.put("packs/c", [BLOB]) is Put.CREATED
    assert "packs/c" not in memory.blobs
    faulty.arm(BlobRule(fault=BlobFault.TRUNCATED, times=1))
    assert faulty.put("packs/c", [BLOB]) is Put.CREATED
    assert memory.blobs["packs/c"] == BLOB[:100]
    faulty.arm(BlobRule(fault=BlobFault.UNSURE, times=1))
    with pytest.raises(StoreError):
        faulty.put("packs/d", [BLOB])
    assert memory.blobs["packs/d"] == BLOB


def test_a_listing_that_fails_at_its_half() -> None:
    listed = stores(BlobRule(fault=BlobFault.TRUNCATED))[1].listing("packs/")
    assert next(listed).name == "packs/a"
    with pytest.raises(StoreError):
        next(listed)


def test_rules_are_bounded_by_name_skip_and_times() -> None:
    rule = BlobRule(fault=BlobFault.LOST, operation="read", name="b", skip=1, times=1)
    faulty = stores(rule)[1]
    answers = [faulty.read(name, 0, 1) is None for name in ("packs/a", "packs/b", "packs/b", "packs/b")]
    assert answers == [False, False, True, False]


def test_a_seed_repeats_itself() -> None:
    def drawn(seed: int) -> list[bool]:
        faulty = stores(BlobRule(fault=BlobFault.LOST, chance=0.5), seed=seed)[1]
        return [faulty.read("packs/a", 0, 1) is None for _ in range(40)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 5 < sum(drawn(1)) < 35


def test_silence_ends_with_release_and_with_close() -> None:
    faulty = stores(BlobRule(fault=BlobFault.SILENT, operation="read"))[1]
    answers: list[object] = []

    def read() -> None:
        try:
            answers.append(faulty.read("packs/a", 0, 3))
        except StoreError as error:
            answers.append(error.trouble)

    for end in (faulty.release, faulty.close):
        reader = threading.Thread(target=read)
        reader.start()
        assert faulty.wait_silent(1)
        end()
        reader.join(30.0)
    assert answers == [BLOB[:3], "unreachable"]


def test_memory_is_full_at_its_capacity_and_lists_by_name() -> None:
    clock = ManualClock(5.0)
    memory = MemoryBlobs(clock, capacity_bytes=10)
    assert memory.put("packs/b", [b"123", b"45"]) is Put.CREATED
    clock.advance(2.0)
    assert memory.put("packs/a", [b"6789"]) is Put.CREATED
    assert memory.put("packs/a", [b"x"]) is Put.EXISTS
    with pytest.raises(StoreError, match="full"):
        memory.put("packs/c", [b"12"])
    memory.touch("packs/b")
    assert list(memory.listing("packs/")) == [("packs/a", 4, 7.0), ("packs/b", 5, 7.0)]
    assert memory.now_s() == 7.0
