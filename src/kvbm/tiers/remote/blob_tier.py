"""G4, the remote tier over a store of named blobs: what its owner thread sees of it.

The owner asks the catalogue, submits jobs and collects their ends. Threads call the store: for loads (`loading`), for
stores (`storing`), and for everything else (`upkeep`); `watch` looks after their time. What they find out reaches the
catalogue through `poll`.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvbm.block import GROUP_MAX, KEY_BYTES, BlockKey, Outcome
from kvbm.clock import Clock, monotonic
from kvbm.errors import SettingsError
from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.contract import CLOSE_LIMIT_S, BlockHead, Completion
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.catalogue import Catalogue
from kvbm.tiers.remote.collector import Collector
from kvbm.tiers.remote.contract import NOWHERE, Buffers, News
from kvbm.tiers.remote.discovery import Discovery, LearnedQueue
from kvbm.tiers.remote.exchange import Exchange, LoadJob, StoreJob
from kvbm.tiers.remote.health import StoreHealth
from kvbm.tiers.remote.loading import Effect, Loader
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.pack_size import blocks_of_a_load, blocks_of_a_pack, record_bytes
from kvbm.tiers.remote.prefixed import PrefixedBlobs
from kvbm.tiers.remote.sealing import Seal
from kvbm.tiers.remote.shared_log import LogReader, LogWriter
from kvbm.tiers.remote.storing import Storer
from kvbm.tiers.remote.upkeep import Upkeep
from kvbm.tiers.remote.watch import JobWatch
from kvbm.tiers.remote.workers import Workers

log = logging.getLogger("kvbm.tiers.remote.tier")

LEARNED_BLOCKS = 4096
"""Of what was discovered, so many blocks are taken into the catalogue by one `poll`: about 2 ms."""
JOBS_SHARE = 0.5
"""The part of the time for closing in which jobs may end. Then the log is written."""
STORES_A_THREAD = 2
"""So many stores may be pending for each thread that writes."""
AS_DEFAULT = RemoteOptions()


def open_blob_tier(
    store: BlobStore,
    layout: BlockLayout,
    namespace: Namespace,
    options: RemoteOptions = AS_DEFAULT,
    clock: Clock = monotonic,
    jitter: random.Random | None = None,
    seal: Seal | None = None,
) -> BlobTier:
    """The tier of one namespace in a store, which it takes over and closes.

    Its blobs lie under `<fingerprint, 64 hex>/`, and nothing else is read; only the collector goes through all of the
    store. The namespace must not be ephemeral: nobody else could ever name it. `jitter` must be seeded otherwise on
    every node. It does not wait for the store. Raises SettingsError where a block is too large for the store.
    """
    assert not namespace.ephemeral, "an ephemeral namespace is of no use to others"
    return BlobTier(store, layout, namespace, options, clock, jitter or random.Random(), seal)


class BlobTier:
    """A `RemoteTier` over blobs. All methods belong to one owner thread."""

    name = "remote"

    def __init__(
        self,
        store: BlobStore,
        layout: BlockLayout,
        namespace: Namespace,
        options: RemoteOptions,
        clock: Clock,
        jitter: random.Random,
        seal: Seal | None,
    ) -> None:
        """Use `open_blob_tier`. Raises as it does."""
        self._options = options
        self._layout = layout
        self._clock = clock
        self._closed = False
        self.pending_limit = options.pending_limit
        # A store pins a pack's slots, and waits behind the others: more than a few would wait for nothing.
        self._store_limit = min(options.pending_limit, STORES_A_THREAD * options.store_threads)
        self.load_blocks_max = blocks_of_a_load(layout.block_bytes)
        self.store_blocks_max = _store_blocks_max(store, layout)
        fingerprint = namespace.fingerprint
        self._store = part = PrefixedBlobs(store, f"{fingerprint.hex()}/")
        self._catalogue = Catalogue(options.catalogue_blocks, layout.block_bytes)
        self._exchange = exchange = Exchange(clock, layout.block_bytes)
        self._health = health = StoreHealth(clock, jitter, store.place)
        self._effects: deque[Effect] = deque()
        writer = f"{jitter.getrandbits(64):016x}"
        self._own_log, self._reader = LogWriter(writer), LogReader(writer)
        self._loads = Workers("remote-load", options.load_threads)
        self._stores = Workers("remote-store", options.store_threads)
        self._scanners = Workers("remote-scan", options.scan_threads)
        shared = (part, layout, fingerprint, seal, exchange, health, self._catalogue, self._effects)
        self._loader = Loader(*shared, clock)
        self._queue = LearnedQueue(4 * LEARNED_BLOCKS, exchange.signal)
        self._discovery = Discovery(
            part,
            self._reader,
            self._catalogue.knows,
            self._queue,
            self._scanners,
            options.catalogue_blocks,
            clock,
        )
        self.collector = Collector(
            store,
            ttl_s=options.ttl_s,
            capacity_bytes=options.capacity_bytes,
            period_s=options.collect_period_s,
            stopping=lambda: self._closed,
        )
        """For operators: `collector.run` may be called by any thread but the owner's."""
        self._upkeep = Upkeep(
            part,
            options,
            self._discovery,
            self._own_log,
            self._loader,
            self.collector,
            health,
            clock,
            jitter,
        )
        self._storer = Storer(*shared, self._own_log, self._upkeep.touch, clock)
        self._watch = JobWatch(part.place, options, exchange, health, clock)
        self._upkeep.begin()

    # ---- where blocks are

    def places(self, keys: Sequence[BlockKey]) -> list[int]:
        places = self._catalogue.places(keys)
        if NOWHERE in places:
            self._upkeep.active()  # somebody asks for what others may have written by now
        return places

    def tail(self, place: int) -> bool:
        return self._catalogue.tail(place)

    def news(self) -> News:
        return self._catalogue.news()

    def used(self, keys: Sequence[BlockKey], may_tell: Callable[[], bool]) -> None:
        now_s = self._clock()
        for name in self._catalogue.used(keys, now_s - self._options.touch_period_s):
            if self._closed or not self._upkeep.touch_room or not may_tell():
                return
            self._catalogue.touched(name, now_s)
            self._upkeep.touch(name)

    # ---- loads and stores

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        targets: Sequence[Buffers],
        tenant: str | None,
    ) -> Outcome:
        assert 0 < len(keys) <= self.load_blocks_max and place >= 0
        self._check(keys, targets)
        if self._closed or self._health.fault:
            return Outcome.RETRY
        if self.load_room == 0:
            return Outcome.THROTTLED
        span = self._catalogue.span(place, len(keys))
        if span is None:
            return Outcome.MISS
        now_s = self._clock()
        untold_s = now_s - self._catalogue.use(span.name, now_s)
        if untold_s >= self._options.touch_period_s and self._upkeep.touch_room:
            self._catalogue.touched(span.name, now_s)
            self._upkeep.touch(span.name)
        self._upkeep.active()
        job = LoadJob(
            job_id=job_id,
            begun_s=now_s,
            deadline_s=now_s + self._options.load_deadline_s,
            keys=tuple(keys),
            place=place,
            span=span,
            targets=targets,
            tenant=tenant,
        )
        self._watch.accept(job)
        self._loads.run(partial(self._loader.run, job))
        return Outcome.PENDING

    def submit_store(
        self,
        job_id: int,
        blocks: Sequence[BlockHead],
        sources: Sequence[Buffers],
        tenant: str | None,
        tail: bool = False,
    ) -> Outcome:
        assert 0 < len(blocks) <= self.store_blocks_max
        for block in blocks:
            assert len(block.engine_hash) in (0, KEY_BYTES) and 0 <= block.group <= GROUP_MAX
        self._check([block.key for block in blocks], sources)
        if self._closed or self._health.store_fault:
            return Outcome.RETRY
        if self.store_room == 0:
            return Outcome.THROTTLED
        now_s = self._clock()
        self._upkeep.active()
        job = StoreJob(
            job_id=job_id,
            begun_s=now_s,
            deadline_s=now_s + self._options.store_deadline_s,
            blocks=tuple(blocks),
            sources=sources,
            tenant=tenant,
            tail=tail,
        )
        self._watch.accept(job)
        self._stores.run(partial(self._storer.run, job))
        return Outcome.PENDING

    @property
    def load_room(self) -> int:
        # A load's deadline begins when it is submitted: it shall not wait for a thread.
        reading = self._exchange.uncollected(LoadJob)
        return max(0, min(self._room, self._free_readers - reading))

    @property
    def store_room(self) -> int:
        writers = self._options.store_threads - self._exchange.count_hanging(StoreJob)
        limit = min(self._store_limit, STORES_A_THREAD * writers)
        return max(0, min(self._room, limit - self._exchange.uncollected(StoreJob)))

    @property
    def _free_readers(self) -> int:
        """Threads for loads whose request does not hang."""
        return self._options.load_threads - self._exchange.count_hanging(LoadJob)

    @property
    def _room(self) -> int:
        return self.pending_limit - self._exchange.uncollected(LoadJob) - self._exchange.uncollected(StoreJob)

    def expected_s(self, byte_count: int) -> float:
        return self._health.expected_s(byte_count)

    def poll(self) -> list[Completion]:
        self._watch.expire()
        completions = self._exchange.collect()
        # A job's effects come before its completion, so they are all there.
        while self._effects:
            self._effects.popleft()()
        for learned in self._queue.take(LEARNED_BLOCKS):
            self._catalogue.add(learned.entry, learned.used_s, older=learned.older)
        return completions

    def fileno(self) -> int:
        return self._exchange.fileno()

    # ---- how it is

    @property
    def fault(self) -> str:
        return self._health.fault

    @property
    def store_fault(self) -> str:
        return self._health.store_fault

    def tick(self) -> None:
        if not self._closed:
            self._watch.expire()
            self._upkeep.tick(may_probe=self._free_readers > 0)

    def describe(self) -> dict[str, object]:
        health, upkeep = self._health, self._upkeep
        reads, writes = health.bandwidths
        return {
            "place": self._store.place,
            "notes": list(self._store.notes),
            "requests": self._store.requests(),
            "read_bytes": health.read_bytes,
            "written_bytes": health.written_bytes,
            "packs": self._catalogue.pack_count,
            "blocks": self._catalogue.block_count,
            "blocks_max": self._catalogue.blocks_max,
            "forgotten_packs": self._catalogue.forgotten_packs,
            "compressed_packs": self._catalogue.compressed_packs,
            "reading": health.reading.state.value,
            "writing": health.writing.state.value,
            "fault": health.fault,
            "store_fault": health.store_fault,
            "read_errors": health.read_errors,
            "write_errors": health.write_errors,
            "latency_s": health.latency_s,
            "read_bytes_per_s": reads,
            "write_bytes_per_s": writes,
            "hanging": self._exchange.count_hanging(LoadJob) + self._exchange.count_hanging(StoreJob),
            "corrupt_blocks": self._loader.corrupt,
            "deleted_packs": self._loader.deleted,
            "existed": self._storer.existed,
            "touched": upkeep.touched,
            "touch_errors": upkeep.touch_errors,
            "log": {
                "writer": self._own_log.writer,
                "gaps": self._reader.gaps,
                "skipped": self._reader.skipped,
            },
            "complete": self._discovery.complete and self._queue.empty,
            "collected": upkeep.collected,
            "collect_error": upkeep.collect_error,
        }

    def drain(self, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        idle = self._exchange.wait_idle(deadline_s)
        self._upkeep.flush(end_s - time.monotonic())
        return idle

    def close(self, deadline_s: float = CLOSE_LIMIT_S) -> None:
        """As the contract says. The completions of pending jobs can still be polled afterwards."""
        if self._closed:
            return
        end_s = time.monotonic() + deadline_s
        self._exchange.wait_idle(deadline_s * JOBS_SHARE)
        self._upkeep.flush(end_s - time.monotonic())
        self._closed = True
        self._watch.stop()
        self._queue.close()
        self._upkeep.stop()
        self._exchange.stop("the tier was closed", max(0.0, end_s - time.monotonic()))
        for workers in (self._loads, self._stores, self._scanners):
            workers.stop(max(0.0, end_s - time.monotonic()))
        self._store.close()

    def settle(self, deadline_s: float) -> bool:
        """Wait until nothing is under way, upkeep too. `poll` then takes in what was found. For tests."""
        end_s = time.monotonic() + deadline_s
        return self._exchange.wait_idle(deadline_s) and self._upkeep.wait_idle(end_s - time.monotonic())

    # ---- inside

    def _check(self, keys: Sequence[BlockKey], buffers: Sequence[Buffers]) -> None:
        layout = self._layout
        assert len(keys) == len(buffers) == len(set(keys)) and set(map(len, keys)) == {KEY_BYTES}
        for shards in buffers:
            assert len(shards) == layout.shard_count, "one buffer per shard"
            assert all(shard.nbytes == layout.slot_bytes for shard in shards), "whole slots, padding included"


def _store_blocks_max(store: BlobStore, layout: BlockLayout) -> int:
    blocks = blocks_of_a_pack(layout.block_bytes, store.blob_bytes_max)
    if blocks == 0:
        record = record_bytes(layout.block_bytes)
        accepted = (
            f"{store.place} takes blobs of at most {store.blob_bytes_max} bytes, and a block is {record}"
        )
        raise SettingsError("remote", store.place, accepted)
    return blocks
