"""What an operator is told of a store, and the removal of a namespace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbm.clock import ManualClock
from kvbm.tiers.remote.blob_tier import open_blob_tier
from kvbm.tiers.remote.survey import remove, survey
from rigs.faulty_blobs import MemoryBlobs
from rigs.stored_packs import KEYS, LAYOUT, ONE, TWO, put


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[MemoryBlobs]:
    """Two packs of one namespace, of which one is older, and one of another."""
    store, tiers = MemoryBlobs(clock), []
    for namespace, packs in ((ONE, (KEYS[:3], KEYS[3:5])), (TWO, (KEYS[5:],))):
        tier = open_blob_tier(store, LAYOUT, namespace)
        tiers.append(tier)
        for keys in packs:
            put(tier, keys)
            clock.advance(100.0)
    yield store
    for tier in tiers:
        tier.close()


def test_what_lies_there(store: MemoryBlobs) -> None:
    store.put("theirs/file", [b"x"])
    found = survey(store)
    by_name = {each.fingerprint: each for each in found.namespaces}
    one, two = by_name[ONE.fingerprint.hex()], by_name[TWO.fingerprint.hex()]
    assert (one.packs, one.blocks, two.packs, two.blocks, found.foreign) == (2, 5, 1, 3, 1)
    assert one.short == ONE.short
    assert one.oldest_s is not None and one.newest_s is not None and two.newest_s is not None
    assert (one.oldest_s, one.newest_s, two.newest_s) == pytest.approx((300.0, 200.0, 100.0))
    sizes = [len(blob) for name, blob in store.blobs.items() if "/packs/" in name]
    assert found.pack_bytes == sum(sizes) == one.pack_bytes + two.pack_bytes


def test_of_many_packs_no_index_is_read(store: MemoryBlobs) -> None:
    before = store.requests()["get"]
    assert [each.blocks for each in survey(store, indexes_max=2).namespaces] == [None, None]
    assert store.requests()["get"] == before


def test_what_is_no_pack_has_no_blocks(store: MemoryBlobs) -> None:
    torn = next(name for name in store.blobs if name.startswith(TWO.fingerprint.hex()) and "/packs/" in name)
    store.blobs[torn] = b"torn"
    assert [
        each.blocks for each in survey(store).namespaces if each.fingerprint == TWO.fingerprint.hex()
    ] == [0]


def test_a_namespace_is_removed_and_nothing_else(store: MemoryBlobs) -> None:
    store.put(f"{ONE.fingerprint.hex()}/notes", [b"of somebody"])
    store.put("theirs/file", [b"x"])
    ours = [
        name for name in store.blobs if name.startswith(ONE.fingerprint.hex()) and not name.endswith("notes")
    ]
    others = set(store.blobs) - set(ours)
    assert remove(store, [ONE.fingerprint.hex()]) == len(ours) > 0
    assert set(store.blobs) == others
