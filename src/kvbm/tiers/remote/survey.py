"""What lies in a store, by namespace, from its listing; and removing a namespace. For operators, not for a tier.

A listing says how many packs there are, how large, and when they were used. How many blocks a pack has says its index
alone, so that of a large store only so many are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvbm.tiers.remote.blobs import BlobInfo, BlobStore
from kvbm.tiers.remote.collector import DELETED_AT_ONCE, MARK, is_leftover, is_pack
from kvbm.tiers.remote.loading import read_entry
from kvbm.tiers.remote.prefixed import PrefixedBlobs

INDEXES_READ_MAX = 1000
READERS = 8
SHORT_DIGITS = 12


class NamespaceSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace in a store. `oldest_s` and `newest_s`: so long ago its packs were used, by the store's clock; None
    without a pack. `blocks` is None where not all indexes were read."""

    fingerprint: str
    packs: int = 0
    blocks: int | None = None
    pack_bytes: int = 0
    other_blobs: int = 0
    oldest_s: float | None = None
    newest_s: float | None = None

    @property
    def short(self) -> str:
        """The beginning of the fingerprint, as managers show it."""
        return self.fingerprint[:SHORT_DIGITS]


class StoreSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a store; `foreign` blobs have names that are not ours."""

    place: str
    namespaces: tuple[NamespaceSurvey, ...] = ()
    foreign: int = 0

    @property
    def pack_bytes(self) -> int:
        """The bytes of all packs."""
        return sum(each.pack_bytes for each in self.namespaces)


def survey(store: BlobStore, indexes_max: int = INDEXES_READ_MAX) -> StoreSurvey:
    """Look at all that lies there; reads the indexes of the packs where those are at most `indexes_max`.

    Raises StoreError.
    """
    now_s = store.now_s()
    packs: dict[str, list[BlobInfo]] = {}
    others: dict[str, int] = {}
    foreign = 0
    for info in store.listing(""):
        fingerprint = info.name.partition("/")[0]
        if is_pack(info.name):
            packs.setdefault(fingerprint, []).append(info)
        elif is_leftover(info.name):
            others[fingerprint] = others.get(fingerprint, 0) + 1
        elif info.name != MARK:
            foreign += 1
    counted = sum(map(len, packs.values())) <= indexes_max
    namespaces = []
    for fingerprint in sorted({*packs, *others}):
        of_it = packs.get(fingerprint, [])
        ages_s = [max(0.0, now_s - info.modified_s) for info in of_it]
        namespaces.append(
            NamespaceSurvey(
                fingerprint=fingerprint,
                packs=len(of_it),
                blocks=_blocks(store, fingerprint, of_it) if counted else None,
                pack_bytes=sum(info.size for info in of_it),
                other_blobs=others.get(fingerprint, 0),
                oldest_s=max(ages_s, default=None),
                newest_s=min(ages_s, default=None),
            )
        )
    return StoreSurvey(place=store.place, namespaces=tuple(namespaces), foreign=foreign)


def remove(
    store: BlobStore, fingerprints: Iterable[str], on_progress: Callable[[int], None] = lambda count: None
) -> int:
    """Remove all blobs of these namespaces; how many there were. Managers that use them find misses, and no wrong
    block. Raises StoreError; what was removed until then is removed."""
    removed = 0
    for fingerprint in fingerprints:
        names = list[str]()
        for info in store.listing(f"{fingerprint}/"):
            if is_pack(info.name) or is_leftover(info.name):
                names.append(info.name)
            if len(names) == DELETED_AT_ONCE:
                removed += _delete(store, names)
                on_progress(removed)
        removed += _delete(store, names)
        on_progress(removed)
    return removed


def _delete(store: BlobStore, names: list[str]) -> int:
    count = len(names)
    if names:
        store.delete(names)
    names.clear()
    return count


def _blocks(store: BlobStore, fingerprint: str, packs: Sequence[BlobInfo]) -> int:
    """The blocks of these packs of a namespace; one that has gone meanwhile, or is none, has none."""
    prefix = f"{fingerprint}/"
    part = PrefixedBlobs(store, prefix)
    names = [info.name[len(prefix) :] for info in packs]
    with ThreadPoolExecutor(READERS) as readers:
        entries = readers.map(lambda name: read_entry(part, name), names)
        return sum(entry.blocks for entry in entries if entry is not None)
