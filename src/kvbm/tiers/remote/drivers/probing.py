"""What a store can do and how fast it is, found by trying with a few small blobs of its own, `probe/...`."""

from __future__ import annotations

import secrets

import msgspec

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import BlobStore, Put
from kvbm.tiers.remote.drivers.objects import ObjectBlobs, RangesIgnored, Traits, Unknown

PROBE_BYTES = 1 << 20
SMALL_BYTES = 16
TRIES = 3
MEASURED = "measured/"


class Probe(msgspec.Struct, frozen=True):
    """How fast a store is for one request at a time: seconds until the answer of a small read, and bytes a second."""

    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


def find_traits(store: ObjectBlobs, kind: Traits) -> Traits:
    """What an object store can do, by trial. Four requests, or five. Raises StoreError."""
    name = f"probe/{secrets.token_hex(16)}"
    text = b"0123456789abcdef"
    try:
        store.put_object(name, [text], create=True)
        refuses_second = store.put_object(name, [text], create=True) is Put.EXISTS
    except Unknown:
        refuses_second = False
        store.put_object(name, [text], create=False)
    try:
        part = store.range(name, 3, 7)
        ranges = part is not None and bytes(part) == text[3:7]
    except RangesIgnored:
        ranges = False
    store.delete_object(name)
    return kind._replace(refuses_second=refuses_second, ranges=ranges)


def measure(store: BlobStore, clock: Clock, byte_count: int = PROBE_BYTES) -> Probe:
    """Put and get a small and a larger blob a few times; the best of each counts. They are gone afterwards.

    Takes about a dozen requests. Raises StoreError.
    """
    byte_count = min(byte_count, store.blob_bytes_max)
    names = [f"{MEASURED}{secrets.token_hex(16)}" for _ in range(1 + TRIES)]
    try:
        store.put(names[0], [bytes(SMALL_BYTES)])
        latency_s = min(_read_s(store, names[0], SMALL_BYTES, clock) for _ in range(TRIES))
        writes_s, reads_s = [], []
        for name in names[1:]:
            # Bytes that no compression on the way makes fewer.
            blob = secrets.token_bytes(byte_count)
            began_s = clock()
            store.put(name, [blob])
            writes_s.append(clock() - began_s)
            reads_s.append(_read_s(store, name, byte_count, clock))
    finally:
        store.delete(names)
    return Probe(latency_s, byte_count / max(min(reads_s), 1e-6), byte_count / max(min(writes_s), 1e-6))


def _read_s(store: BlobStore, name: str, byte_count: int, clock: Clock) -> float:
    began_s = clock()
    store.read(name, 0, byte_count)
    return clock() - began_s
