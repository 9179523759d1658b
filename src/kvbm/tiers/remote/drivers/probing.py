"""What a store can do, found by trying with a small blob of its own, `probe/...`."""

from __future__ import annotations

import secrets

from kvbm.tiers.remote.blobs import Put
from kvbm.tiers.remote.drivers.objects import ObjectBlobs, RangesIgnored, Traits, Unknown


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
