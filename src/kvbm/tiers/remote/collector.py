"""Garbage collection: packs that nobody used for long, packs beyond the bound, and what writers left behind.

Any number of nodes may collect at once. They judge by names and by the store's own times alone, so all come to the same
packs; right before a deletion the packs' times are looked at again, and one that was used meanwhile stays. It covers
all namespaces of a store, also those that nobody serves any more, and it reads no blob.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from kvbm.tiers.remote.blobs import BlobInfo, BlobStore, Put

log = logging.getLogger("kvbm.tiers.remote.tier")

LEFT_S = 3600.0
"""A writer that wrote nothing for so long is dead, or has nothing to say that others have not read or listed."""

MARK = "gc/last"
"""It is touched when somebody has collected: then the others need not, for half a period."""

LOW_SHARE = 0.95
"""Beyond the bound, packs are removed until they take no more than this part of it."""

DELETED_AT_ONCE = 500
NAMED_MAX = 1000
_PACK = re.compile(r"([0-9a-f]{64}/packs/[0-9a-f]{2}/)[0-9a-f]{40}")
_LEFTOVER = re.compile(r"[0-9a-f]{64}/(log|probe)/.*")


def is_pack(name: str) -> bool:
    """Whether a blob of a store is a pack of some namespace, by its name."""
    return _PACK.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Whether it is something else of a namespace: what writers tell each other, or a trial."""
    return _LEFTOVER.fullmatch(name) is not None


class Victim(NamedTuple):
    """A blob to be removed, and the time that it had when that was decided."""

    name: str
    size: int
    modified_s: float


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, or would do."""

    packs: int = 0
    """So many there were."""
    pack_bytes: int = 0
    removed_packs: int = 0
    removed_bytes: int = 0
    removed_leftovers: int = 0
    spared: int = 0
    """Packs that were used between the decision and the deletion."""
    foreign: int = 0
    """Blobs of names that are not ours: they are left alone."""
    dry_run: bool = False
    named: tuple[str, ...] = ()
    """The first thousand of the blobs that were removed, or would be."""
    skipped: bool = False
    """Another node has collected lately: nothing was done."""


class _Survey(NamedTuple):
    packs: list[Victim]
    leftovers: list[Victim]
    foreign: int


def choose(packs: Sequence[Victim], now_s: float, ttl_s: float, capacity_bytes: int | None) -> list[Victim]:
    """The packs to remove, by the store's clock: the expired ones, then the least recently used beyond the bound."""
    by_age = sorted(packs, key=lambda pack: (pack.modified_s, pack.name))
    left = sum(pack.size for pack in by_age)
    bound = float("inf")
    if capacity_bytes is not None and left > capacity_bytes:
        bound = capacity_bytes * LOW_SHARE
    chosen: list[Victim] = []
    for pack in by_age:
        if now_s - pack.modified_s <= ttl_s and left <= bound:
            break
        chosen.append(pack)
        left -= pack.size
    return chosen


class Collector:
    """Collects in a store, the whole of it and not one namespace's part. `run` takes as long as it takes."""

    def __init__(
        self,
        store: BlobStore,
        *,
        ttl_s: float,
        capacity_bytes: int | None,
        period_s: float,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        assert ttl_s > 0.0 and period_s > 0.0 and (capacity_bytes is None or capacity_bytes >= 0)
        self._store = store
        self._ttl_s = ttl_s
        self._capacity_bytes = capacity_bytes
        self._period_s = period_s
        self._stopping = stopping

    def run(self, *, dry_run: bool = False, in_turn: bool = True) -> Collected:
        """Collect once. `dry_run`: only say what it would remove. `in_turn`: not if another node did it lately.

        Raises StoreError; what was removed until then is removed.
        """
        now_s = self._store.now_s()
        if in_turn and not dry_run and self._done_lately(now_s):
            return Collected(skipped=True)
        packs, leftovers, foreign = self._survey(now_s)
        chosen = choose(packs, now_s, self._ttl_s, self._capacity_bytes)
        removed, spared = (chosen, 0) if dry_run else self._remove(chosen)
        if not dry_run:
            self._delete([blob.name for blob in leftovers])
            if self._store.put(MARK, [b"kvbm"]) is Put.EXISTS:
                self._store.touch(MARK)
        return Collected(
            packs=len(packs),
            pack_bytes=sum(pack.size for pack in packs),
            removed_packs=len(removed),
            removed_bytes=sum(pack.size for pack in removed),
            removed_leftovers=len(leftovers),
            spared=spared,
            foreign=foreign,
            dry_run=dry_run,
            named=tuple(blob.name for blob in (*removed, *leftovers)[:NAMED_MAX]),
        )

    def _done_lately(self, now_s: float) -> bool:
        marks = self._store.listing(MARK.partition("/")[0] + "/")
        return any(
            info.name == MARK and 0.0 <= now_s - info.modified_s < self._period_s / 2 for info in marks
        )

    def _survey(self, now_s: float) -> _Survey:
        packs: list[Victim] = []
        leftovers: list[Victim] = []
        foreign = 0
        newest: dict[str, float] = {}
        for info in self._store.listing(""):
            blob = Victim(*info)
            if is_pack(info.name):
                packs.append(blob)
            elif is_leftover(info.name):
                writer = _writer(info.name)
                newest[writer] = max(newest.get(writer, info.modified_s), info.modified_s)
                leftovers.append(blob)
            elif info.name != MARK:
                foreign += 1
        dead = [blob for blob in leftovers if now_s - newest[_writer(blob.name)] > LEFT_S]
        return _Survey(packs, dead, foreign)

    def _remove(self, chosen: Iterable[Victim]) -> tuple[list[Victim], int]:
        """Remove packs that are still as they were; these, and how many are not."""
        removed: list[Victim] = []
        spared = 0
        by_name = sorted(chosen)
        for directory, group in groupby(by_name, key=lambda pack: pack.name[:-40]):
            if self._stopping():
                break
            wanted = {pack.name: pack for pack in group}
            still = {info.name: info.modified_s for info in _those(self._store.listing(directory), wanted)}
            sure = [
                pack for pack in wanted.values() if still.get(pack.name, pack.modified_s) == pack.modified_s
            ]
            spared += len(wanted) - len(sure)
            self._delete([pack.name for pack in sure if pack.name in still])
            removed += sure
        return removed, spared

    def _delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), DELETED_AT_ONCE):
            self._store.delete(names[start : start + DELETED_AT_ONCE])


def _writer(name: str) -> str:
    """Whose a leftover is: its name without the last part."""
    return name.rpartition("/")[0]


def _those(infos: Iterable[BlobInfo], wanted: dict[str, Victim]) -> Iterator[BlobInfo]:
    return (info for info in infos if info.name in wanted)
