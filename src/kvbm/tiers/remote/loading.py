"""Loads: one ranged read for blocks that lie together, verified into their targets.

What is read lands in memory of its own. The targets are touched only while the job is held, so bytes that come after
the deadline are thrown away.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvbm.block import BlockKey, Outcome
from kvbm.clock import Clock
from kvbm.layout import BlockLayout
from kvbm.strict import record_swallowed
from kvbm.tiers.contract import BlockEnd
from kvbm.tiers.remote.blobs import BlobStore, StoreError
from kvbm.tiers.remote.catalogue import Catalogue
from kvbm.tiers.remote.exchange import Exchange, LoadJob
from kvbm.tiers.remote.health import StoreHealth
from kvbm.tiers.remote.packs import INDEX_GUESS_BYTES, PRINT_BYTES, PackEntry, entry_of, unpack
from kvbm.tiers.remote.sealing import Seal

log = logging.getLogger("kvbm.tiers.remote.tier")

Effect = Callable[[], object]
"""What the owner thread does to the catalogue because of what a thread found."""

DOUBTS_MAX = 64


class Doubt(NamedTuple):
    """A record that did not verify: to be read once more, and its pack to be deleted if that is no better. If it is,
    the way from the store was bad, and the block is known again."""

    name: str
    start: int
    end: int
    key: BlockKey
    place: int
    tenant: str | None


class Loader:
    """Runs loads in threads, several at once. `effects` are the owner's to run."""

    def __init__(
        self,
        store: BlobStore,
        layout: BlockLayout,
        fingerprint: bytes,
        seal: Seal | None,
        exchange: Exchange,
        health: StoreHealth,
        catalogue: Catalogue,
        effects: deque[Effect],
        clock: Clock,
    ) -> None:
        self._store = store
        self._layout = layout
        self._fingerprint = fingerprint
        self._seal = seal
        self._exchange = exchange
        self._health = health
        self._catalogue = catalogue
        self._effects = effects
        self._clock = clock
        self._doubts: deque[Doubt] = deque(maxlen=DOUBTS_MAX)
        self.corrupt = 0
        """So many blocks did not verify."""
        self.deleted = 0
        """So many packs were deleted because of that."""

    @property
    def in_doubt(self) -> bool:
        """Whether there is a record to look at again (`settle_doubts`)."""
        return bool(self._doubts)

    def run(self, job: LoadJob) -> None:
        """Carry a load out. Raises nothing."""
        try:
            self._run(job)
        except Exception as error:
            record_swallowed(error)
            log.exception("remote tier: a defect in a load")
            self._exchange.retry(job, f"{type(error).__name__}: {error}")
        finally:
            self._exchange.end_request(job)

    def _run(self, job: LoadJob) -> None:
        if not self._exchange.begin_request(job):
            return
        name, start, end, offsets = job.span
        begun_s = self._clock()
        try:
            found = self._store.read(name, start, end)
        except StoreError as error:
            self._health.read_failed(error, not self._exchange.over(job))
            self._exchange.retry(job, str(error))
            return
        if found is None:
            self._health.read_took(0, self._clock() - begun_s)
            gone = partial(self._effects.append, partial(self._catalogue.forget_pack, name))
            self._exchange.finish(job, (BlockEnd(Outcome.MISS),) * job.count, then=gone)
            return
        in_time = not self._exchange.over(job)
        self._health.read_took(memoryview(found).nbytes, self._clock() - begun_s, in_time)
        if not self._exchange.hold(job):
            return
        ends = unpack(
            self._layout,
            self._fingerprint,
            job.keys,
            found,
            job.targets,
            offsets=offsets,
            unseal=self._seal,
            tenant=tenant_of(job.tenant, self._seal),
        )
        self._exchange.finish(job, ends, then=partial(self._tell, job, ends))

    def _tell(self, job: LoadJob, ends: Sequence[BlockEnd]) -> None:
        if all(end.outcome is Outcome.HIT for end in ends):
            self._effects.append(partial(self._catalogue.seen, job.place, job.keys))
            return
        name, start, _, offsets = job.span
        for number, (key, end) in enumerate(zip(job.keys, ends, strict=True)):
            if end.outcome is Outcome.HIT:
                self._effects.append(partial(self._catalogue.seen, job.place + number, (key,)))
                continue
            self._effects.append(partial(self._catalogue.forget_block, job.place + number))
            if end.corrupt:
                self.corrupt += 1
                record = start + offsets[number], start + offsets[number + 1]
                self._doubts.append(Doubt(name, *record, key, job.place + number, job.tenant))
                log.warning(
                    "remote tier: a block in %s/%s failed verification", self._store.place.rstrip("/"), name
                )

    def settle_doubts(self) -> None:
        """Read again what did not verify, and delete the packs in which it still does not. Raises StoreError.

        Until then nobody could store these blocks again: a pack of that name is there. It may also be another one than
        was believed: then it is learned anew. In a thread of its own.
        """
        while self._doubts:
            name, start, end, key, place, tenant = self._doubts.popleft()
            found = self._store.read(name, start, end)
            if found is None:
                continue
            entry = read_entry(self._store, name)
            if entry is not None and not _lies_at(entry, key, start, end):
                self._effects.append(partial(self._catalogue.add, entry, self._clock()))
                continue
            size = self._layout.slot_bytes
            scratch = [memoryview(bytearray(size)) for _ in range(self._layout.shard_count)]
            ends = unpack(
                self._layout,
                self._fingerprint,
                (key,),
                found,
                (scratch,),
                offsets=(0, end - start),
                unseal=self._seal,
                tenant=tenant_of(tenant, self._seal),
            )
            if ends[0].corrupt:
                self._store.delete((name,))
                self.deleted += 1
                self._effects.append(partial(self._catalogue.forget_pack, name))
            elif ends[0].outcome is Outcome.HIT:
                self._effects.append(partial(self._catalogue.restore_block, place, key))


def _lies_at(entry: PackEntry, key: BlockKey, start: int, end: int) -> bool:
    """Whether the pack has this block in just these bytes."""
    numbers = [number for number in range(entry.blocks) if entry.offsets[number : number + 2] == (start, end)]
    prints = [entry.prints[number * PRINT_BYTES :][:PRINT_BYTES] for number in numbers]
    return prints == [key[:PRINT_BYTES]]


def read_entry(store: BlobStore, name: str) -> PackEntry | None:
    """What a pack says of itself; None where there is none, or no pack. Raises StoreError."""
    length = INDEX_GUESS_BYTES
    for _ in range(2):
        found = store.read_end(name, length)
        if found is None:
            return None
        entry = entry_of(name, *found)
        if not isinstance(entry, int):
            return entry
        length = entry
    return None


def tenant_of(tenant: str | None, seal: Seal | None) -> str | None:
    """Whose key seals: blocks of nobody in particular have one together."""
    return None if seal is None else tenant or ""
