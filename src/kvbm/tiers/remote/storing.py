"""Stores: blocks become a pack, the pack a blob.

The blocks are copied before the store is asked, while the job is held: then the deadline can end the job at any
moment, and a request that is still under way writes what it was given.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvbm.block import Outcome
from kvbm.clock import Clock
from kvbm.layout import BlockLayout
from kvbm.strict import record_swallowed
from kvbm.tiers.contract import BlockEnd
from kvbm.tiers.remote.blobs import BlobStore, Buffer, Put, StoreError
from kvbm.tiers.remote.catalogue import Catalogue
from kvbm.tiers.remote.exchange import Exchange, StoreJob
from kvbm.tiers.remote.health import StoreHealth
from kvbm.tiers.remote.loading import Effect, read_entry, tenant_of
from kvbm.tiers.remote.packs import Packed, PackEntry, pack
from kvbm.tiers.remote.sealing import Seal
from kvbm.tiers.remote.shared_log import LogWriter

log = logging.getLogger("kvbm.tiers.remote.tier")

COMPRESSED_PAUSE_S = 3600.0
"""Blocks in a compressed pack are stored no second time for so long: each try would send them all again."""
COMPRESSED_MAX = 1024
"""Of so many compressed packs that is remembered."""


class Storer:
    """Runs stores in threads, several at once. `effects` are the owner's to run. `touch` tells the store later that a
    pack is in use."""

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
        own_log: LogWriter,
        touch: Callable[[str], None],
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
        self._own_log = own_log
        self._touch = touch
        self._clock = clock
        self.existed = 0
        """So many packs were in the store already."""
        # Compressed packs that were in the way, and until when they are taken to be there.
        self._compressed: OrderedDict[str, float] = OrderedDict()

    def run(self, job: StoreJob) -> None:
        """Carry a store out. Raises nothing."""
        try:
            self._run(job)
        except StoreError as error:
            self._health.write_failed(error, not self._exchange.over(job))
            self._exchange.retry(job, str(error))
        except Exception as error:
            record_swallowed(error)
            log.exception("remote tier: a defect in a store")
            self._exchange.retry(job, f"{type(error).__name__}: {error}")
        finally:
            self._exchange.end_request(job)

    def _run(self, job: StoreJob) -> None:
        if not self._exchange.hold(job):
            return
        try:
            packed = self._packed(job)
        finally:
            wanted = self._exchange.let_go(job)
        if not wanted or not self._exchange.begin_request(job):
            return
        if self._clock() < self._compressed.get(packed.entry.name, 0.0):
            self._exchange.finish(job, (BlockEnd(Outcome.HIT),) * job.count)
            return
        begun_s = self._clock()
        entry, created = self._put(packed)
        if created:
            in_time = not self._exchange.over(job)
            self._health.write_took(entry.size, self._clock() - begun_s, in_time)
        compressed = entry.has_compressed(self._layout.block_bytes)
        if compressed:
            self._compressed[entry.name] = self._clock() + COMPRESSED_PAUSE_S
            while len(self._compressed) > COMPRESSED_MAX:
                self._compressed.popitem(last=False)
        if created or not (self._catalogue.knows(entry.name) or compressed):
            self._own_log.add(entry)  # also for another node that was killed before it could tell
        keys = [head.key for head in job.blocks]
        learn = partial(self._catalogue.add, entry, self._clock(), keys)
        known = partial(self._effects.append, learn)
        if not self._exchange.finish(job, (BlockEnd(Outcome.HIT),) * job.count, then=known):
            known()  # too late for whoever waited, but it is there

    def _packed(self, job: StoreJob) -> Packed:
        packed = pack(
            self._layout,
            self._fingerprint,
            job.blocks,
            job.sources,
            tail=job.tail,
            seal=self._seal,
            tenant=tenant_of(job.tenant, self._seal),
        )
        if any(isinstance(part, memoryview) for part in packed.parts):
            return packed._replace(parts=[_joined(packed.parts, packed.entry.size)])
        return packed

    def _put(self, packed: Packed) -> tuple[PackEntry, bool]:
        """Write the pack; what is there then, and whether it is ours. Raises StoreError."""
        name = packed.entry.name
        for _ in range(2):
            if self._store.put(name, packed.parts) is Put.CREATED:
                return packed.entry, True
            # Of the same blocks, but perhaps with other facts: only its own index says where its records lie.
            entry = read_entry(self._store, name)
            if entry is not None and entry.prints == packed.entry.prints:
                self.existed += 1
                if not entry.has_compressed(self._layout.block_bytes):
                    self._touch(name)
                return entry, False
            self._store.delete((name,))
        raise StoreError("failed", f"{self._store.place}: {name} can neither be written nor read")


def _joined(parts: Sequence[Buffer], size: int) -> memoryview:
    blob = np.empty(size, np.uint8)
    start = 0
    for part in parts:
        piece = np.frombuffer(part, np.uint8)
        np.copyto(blob[start : start + piece.nbytes], piece)  # holds no other thread up, as a join would
        start += piece.nbytes
    return memoryview(blob)
