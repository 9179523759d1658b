"""How a node learns of the packs of others: their logs again and again, all packs at the start, and after a gap or a
segment that cannot be read.

It runs in a thread of its own; what it learns waits in a bounded queue for the owner thread. Ages are by the store's
clock alone.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import BlobInfo, BlobStore, StoreError
from kvbm.tiers.remote.loading import read_entry
from kvbm.tiers.remote.packs import PACK_PREFIX, PackEntry
from kvbm.tiers.remote.shared_log import (
    LOG_PREFIX,
    SEGMENT_BYTES_MAX,
    LogReader,
    decode_segment,
    is_pack_name,
)
from kvbm.tiers.remote.workers import Workers

log = logging.getLogger("kvbm.tiers.remote.tier")

SCAN_PACKS_MAX = 1 << 16
"""Of all packs so many are read, the newest ones."""
SCAN_PERIOD_S = 60.0
"""All packs are listed at most so often."""
NEW_MARGIN_S = 60.0
SEGMENT_READS_MAX = 3
"""A segment that is not whole is read so often: perhaps only the way from the store is bad, and nobody tells twice."""
_AT_ONCE = 32


class Learned(NamedTuple):
    """A pack of another node's. `used_s` is by our own clock; `older`: it is older than what was told before."""

    entry: PackEntry
    used_s: float
    older: bool


class LearnedQueue:
    """Packs on their way from the discovering thread to the owner's: at most so many blocks at once."""

    def __init__(self, blocks_max: int, signal: Callable[[], None]) -> None:
        self._blocks_max = blocks_max
        self._signal = signal
        self._changed = threading.Condition()
        self._queue: deque[Learned] = deque()
        self._blocks = 0
        self.closed = False

    def put(self, learned: Learned) -> bool:
        """Wait for room, then queue it. False when the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._blocks < self._blocks_max)
            if self.closed:
                return False
            self._queue.append(learned)
            self._blocks += learned.entry.blocks
        self._signal()
        return True

    def take(self, blocks: int) -> list[Learned]:
        """Some of them, of about so many blocks; signals again when there are more."""
        taken: list[Learned] = []
        with self._changed:
            while self._queue and blocks > 0:
                taken.append(self._queue.popleft())
                blocks -= taken[-1].entry.blocks
                self._blocks -= taken[-1].entry.blocks
            more = bool(self._queue)
            self._changed.notify_all()
        if more:
            self._signal()
        return taken

    @property
    def empty(self) -> bool:
        """Whether everything was taken."""
        with self._changed:
            return not self._queue

    def close(self) -> None:
        """Nobody takes any more."""
        with self._changed:
            self.closed = True
            self._queue.clear()
            self._changed.notify_all()


class Discovery:
    """Looks at a store when told to. `look` belongs to one thread."""

    def __init__(
        self,
        store: BlobStore,
        reader: LogReader,
        knows: Callable[[str], bool],
        queue: LearnedQueue,
        scanners: Workers,
        blocks_max: int,
        clock: Clock,
    ) -> None:
        self._store = store
        self._reader = reader
        self._knows = knows
        self._queue = queue
        self._scanners = scanners
        self._blocks_max = blocks_max
        self._clock = clock
        self._scan_wanted = True
        self._scanned_s: float | None = None
        self._looked_s: float | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is known to have been missed."""
        return not self._scan_wanted

    def look(self) -> bool:
        """Learn what is new; whether there was anything. Raises StoreError."""
        begun_s, before_s = self._clock(), self._looked_s
        told = self._read_logs()
        found = bool(told)
        if self._scan_wanted and (self._scanned_s is None or begun_s - self._scanned_s >= SCAN_PERIOD_S):
            self._scanned_s = begun_s
            new_s = 0.0 if before_s is None else begun_s - before_s + NEW_MARGIN_S
            found |= self._scan(told, new_s)
            self._scan_wanted = False
        self._looked_s = begun_s
        return found

    def _read_logs(self) -> set[str]:
        """Learn what the logs say that was not read yet; the names of these packs."""
        unread, gap = self._reader.unread(self._store.listing(LOG_PREFIX))
        self._scan_wanted |= gap
        told: set[str] = set()
        for name in unread:
            data, entries = None, None
            for _ in range(SEGMENT_READS_MAX):
                data = self._store.read(str(name), 0, SEGMENT_BYTES_MAX)
                entries = None if data is None else decode_segment(str(name), data)
                if data is None or entries is not None:
                    break
            if data is None:
                self._reader.missed(name)
                self._scan_wanted = True
                continue
            if entries is None:
                self._reader.skip(name)
                self._scan_wanted = True
                continue
            self._reader.read(name)
            for entry in entries:
                if entry.name not in told:
                    told.add(entry.name)
                    self._queue.put(Learned(entry, self._clock(), False))
        return told

    def _scan(self, told: Container[str], new_s: float) -> bool:
        """Read the ends of all packs that are not known, newest first, as far as the catalogue's bound.

        Those written within the last `new_s` seconds are new; older ones take nobody's place.
        """
        store_now_s, now_s = self._store.now_s(), self._clock()
        blocks = 0
        newest = _newest(self._unknown(told), SCAN_PACKS_MAX)
        for chunk in _chunks(newest):
            for info, entry in zip(chunk, self._read_ends([info.name for info in chunk]), strict=True):
                if entry is None:
                    continue
                age_s = max(0.0, store_now_s - info.modified_s)
                if not self._queue.put(Learned(entry, now_s - age_s, age_s > new_s)):
                    return True
                blocks += entry.blocks
            if blocks >= self._blocks_max:
                break
        return blocks > 0

    def _read_ends(self, names: Sequence[str]) -> list[PackEntry | None]:
        """What these packs say of themselves, several asked at once. Raises the first StoreError."""
        found: dict[str, PackEntry | StoreError | None] = {}
        done = threading.Condition()

        def read(name: str) -> None:
            entry: PackEntry | StoreError | None = None
            try:
                entry = read_entry(self._store, name)
            except StoreError as error:
                entry = error
            finally:
                with done:
                    found[name] = entry
                    done.notify_all()

        for name in names:
            self._scanners.run(partial(read, name))
        with done:
            while len(found) < len(names):
                if self._queue.closed:
                    raise StoreError("failed", "the tier was closed while packs were listed")
                done.wait(1.0)
        entries: list[PackEntry | None] = []
        for name in names:
            entry = found[name]
            if isinstance(entry, StoreError):
                raise entry
            entries.append(entry)
        return entries

    def _unknown(self, told: Container[str]) -> Iterator[BlobInfo]:
        """The packs that are not known, from a listing of all."""
        for info in self._store.listing(PACK_PREFIX):
            if is_pack_name(info.name) and info.name not in told and not self._knows(info.name):
                yield info


def _newest(infos: Iterable[BlobInfo], count: int) -> list[BlobInfo]:
    return heapq.nlargest(count, infos, key=lambda info: info.modified_s)


def _chunks(infos: Sequence[BlobInfo]) -> Iterator[Sequence[BlobInfo]]:
    for start in range(0, len(infos), _AT_ONCE):
        yield infos[start : start + _AT_ONCE]
