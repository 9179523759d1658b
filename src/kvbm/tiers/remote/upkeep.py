"""What a remote tier does beside loads and stores: looking for packs, its own log, touches, doubts, probes, collecting.

`tick` says what is due by the clock, and each kind of work has a thread of its own, so that one that hangs holds up no
other.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from itertools import chain, islice

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import BlobStore, StoreError
from kvbm.tiers.remote.chore import Chore
from kvbm.tiers.remote.collector import Collected, Collector
from kvbm.tiers.remote.discovery import Discovery
from kvbm.tiers.remote.health import StoreHealth
from kvbm.tiers.remote.loading import Loader
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.shared_log import LogWriter

log = logging.getLogger("kvbm.tiers.remote.tier")

LOG_PERIOD_S = 1.0
TOUCHES_MAX = 1024
TOUCHES_AT_ONCE = 32
"""So many packs are touched in a `LOG_PERIOD_S`: our log waits for no more of them."""
PROBE_BYTES = 1 << 20
PROBE_READS = 3


class Upkeep:
    """Everything but `tick`, `active` and `touch_room` may be called by any thread; these belong to the owner."""

    def __init__(
        self,
        store: BlobStore,
        options: RemoteOptions,
        discovery: Discovery,
        own_log: LogWriter,
        loader: Loader,
        collector: Collector,
        health: StoreHealth,
        clock: Clock,
        jitter: random.Random,
    ) -> None:
        self._store = store
        self._options = options
        self._discovery = discovery
        self._own_log = own_log
        self._loader = loader
        self._collector = collector
        self._health = health
        self._clock = clock
        self._jitter = jitter
        self._touch_lock = threading.Lock()
        self._touches: dict[str, None] = {}
        self._poll_wait_s = options.poll_s
        self._looked_s = self._logged_s = clock()
        self._look_now = True
        self._active = False
        self._found = False
        self._collect_s = self._next_collection()
        self._probes = 0
        self.touch_errors = 0
        self.touched = 0
        """So many packs were touched."""
        self.collected: Collected | None = None
        """What this node's last collection did."""
        self.collect_error = ""
        self._look = Chore("discovery", self._run_look)
        self._log = Chore("log", self._run_log)
        self._mend = Chore("mending", self._run_mend)
        self._measure = Chore("measuring", self._run_measure)
        self._read_probe = Chore("read-probe", self._run_read_probe)
        self._write_probe = Chore("write-probe", self._run_write_probe)
        self._collect = Chore("collecting", self._run_collect)
        self._chores = (
            self._look,
            self._log,
            self._mend,
            self._measure,
            self._read_probe,
            self._write_probe,
            self._collect,
        )

    def begin(self) -> None:
        """Measure the store, and look what is there."""
        self._measure.start()
        self.tick(may_probe=True)

    def active(self) -> None:
        """Blocks are loaded or stored: look more often again."""
        self._active = True

    @property
    def touch_room(self) -> bool:
        """Whether another pack can wait to be touched."""
        return len(self._touches) < TOUCHES_MAX

    def touch(self, name: str) -> None:
        """Tell the store, soon, that this pack is in use."""
        with self._touch_lock:
            if len(self._touches) < TOUCHES_MAX:
                self._touches[name] = None

    def tick(self, *, may_probe: bool) -> None:
        """Begin what is due. `may_probe`: a thread is free for what would be read from the store after a probe."""
        now_s = self._clock()
        if may_probe and self._health.reading.probe_due():
            self._read_probe.start()
        if self._health.fault:
            return
        if self._health.writing.probe_due():
            self._write_probe.start()
        if self._loader.in_doubt:
            self._mend.start()
        if not self._look.busy and self._look_due(now_s):
            self._looked_s, self._look_now, self._found = now_s, False, False
            self._look.start()
        to_write = self._touches or (self._own_log.pending and self._health.writing.closed)
        if to_write and now_s - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = now_s
            self._log.start()
        if self._options.collect and now_s >= self._collect_s and not self._collect.busy:
            self._collect_s = self._next_collection()
            self._collect.start()

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until nothing of it is under way."""
        end_s = time.monotonic() + deadline_s
        return all(chore.wait_idle(end_s - time.monotonic()) for chore in self._chores)

    def flush(self, deadline_s: float) -> None:
        """Write our log now, as far as it can be done in so many seconds."""
        end_s = time.monotonic() + deadline_s
        for _ in range(2):  # what was added while it was being written
            if self._own_log.pending and not self._health.store_fault:
                self._log.start()
            self._log.wait_idle(end_s - time.monotonic())

    def stop(self) -> None:
        """Begin nothing more."""
        for chore in self._chores:
            chore.stop()

    def _look_due(self, now_s: float) -> bool:
        if self._active or self._found or not self._discovery.complete:
            self._poll_wait_s = self._options.poll_s
        since_s = now_s - self._looked_s
        if not self._look_now and since_s < self._poll_wait_s:
            return False
        quiet = not (self._active or self._found)
        self._poll_wait_s = (
            min(self._options.poll_max_s, 2 * self._poll_wait_s) if quiet else self._options.poll_s
        )
        self._active = False
        return True

    def _next_collection(self) -> float:
        return self._clock() + self._options.collect_period_s * (0.5 + self._jitter.random())

    def _run_look(self) -> None:
        try:
            self._found = self._discovery.look()
        except StoreError as error:
            self._health.read_failed(error)

    def _run_log(self) -> None:
        try:
            while (segment := self._own_log.next()) is not None:
                name, data = segment
                self._store.put(str(name), [data])
                old = self._own_log.written()
                if old:
                    self._store.delete(old)
        except StoreError as error:
            self._health.write_failed(error)
        with self._touch_lock:
            due = list(islice(self._touches, TOUCHES_AT_ONCE))
            for pack in due:
                del self._touches[pack]
        self._touch_all(due)

    def _touch_all(self, names: Sequence[str]) -> None:
        for place, name in enumerate(names, 1):
            try:
                self._store.touch(name)
                self.touched += 1
            except StoreError as error:
                # No reason to store nothing: that may be allowed. They are used again, or not worth it.
                self.touch_errors += 1
                log.debug("remote tier: touching %s: %s", name, error)
                with self._touch_lock:  # the others were not tried: they are next
                    waiting = dict.fromkeys(chain(names[place:], self._touches))
                    self._touches = dict.fromkeys(islice(waiting, TOUCHES_MAX))
                return

    def _run_mend(self) -> None:
        try:
            self._loader.settle_doubts()
        except StoreError as error:
            self._health.read_failed(error)

    def _run_measure(self) -> None:
        """What a small read takes, and a large one each way."""
        size = min(PROBE_BYTES, self._store.blob_bytes_max)
        name = self._probe_name()
        try:
            for _ in range(PROBE_READS):
                self._timed_read(self._probe_name(), 1)
            try:
                begun_s = self._clock()
                self._store.put(name, [self._jitter.randbytes(size)])
                self._health.write_took(size, self._clock() - begun_s)
                self._timed_read(name, size)
                self._store.delete([name])
            except StoreError as error:
                self._health.write_failed(error)
        except StoreError as error:
            self._health.read_failed(error)

    def _timed_read(self, name: str, byte_count: int) -> None:
        begun_s = self._clock()
        found = self._store.read(name, 0, byte_count)
        taken = 0 if found is None else memoryview(found).nbytes
        self._health.read_took(taken, self._clock() - begun_s)

    def _run_read_probe(self) -> None:
        try:
            self._store.read(self._probe_name(), 0, 1)
        except StoreError as error:
            self._health.reading.probed(error.trouble, str(error))
            return
        self._health.reading.probed(None)
        log.info("remote tier: %s answers again", self._store.place)
        self._look_now = True

    def _run_write_probe(self) -> None:
        try:
            name = self._probe_name()
            self._store.put(name, [b"kvbm"])
            self._store.delete([name])
        except StoreError as error:
            self._health.writing.probed(error.trouble, str(error))
            return
        self._health.writing.probed(None)

    def _probe_name(self) -> str:
        self._probes += 1
        return f"probe/{self._own_log.writer}/{self._probes:08x}"

    def _run_collect(self) -> None:
        try:
            self.collected = self._collector.run()
            self.collect_error = ""
        except StoreError as error:
            self.collect_error = str(error)
            self._health.read_failed(error)
