"""How a store does: what requests took, and whether it may be asked at all. One lock around what threads tell.

Reading and writing have a breaker each. A store that is full, or whose credentials may not write, only takes no
stores; one that cannot be reached is off for both.
"""

from __future__ import annotations

import logging
import random
import threading

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import StoreError, StoreTrouble
from kvbm.tiers.remote.breaker import Breaker
from kvbm.tiers.remote.pace import Pace

log = logging.getLogger("kvbm.tiers.remote.tier")


class StoreHealth:
    """Thread-safe. `place` is the store's, for the lines that people read."""

    def __init__(self, clock: Clock, jitter: random.Random, place: str) -> None:
        self.reading = Breaker(clock, jitter)
        self.writing = Breaker(clock, jitter)
        self.read_errors = 0
        self.write_errors = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self._place = place
        self._lock = threading.Lock()
        self._reads = Pace()
        self._writes = Pace()

    @property
    def fault(self) -> str:
        """Empty, or why nothing can be read."""
        return self._line("remote tier is off", self.reading)

    @property
    def store_fault(self) -> str:
        """Empty, or why nothing can be written."""
        return self.fault or self._line("remote tier takes no stores", self.writing)

    def expected_s(self, byte_count: int) -> float:
        """Seconds that a read of so many bytes takes; 0 if unknown."""
        return self._reads.expected_s(byte_count)

    @property
    def bandwidths(self) -> tuple[float, float]:
        """Bytes per second of reads and of writes; 0 where unknown."""
        return self._reads.bytes_per_s, self._writes.bytes_per_s

    @property
    def latency_s(self) -> float:
        """Of a read; 0 if unknown."""
        return self._reads.latency_s

    def read_took(self, byte_count: int, seconds: float, in_time: bool = True) -> None:
        """A read succeeded; not `in_time`: after its deadline, which is no success."""
        with self._lock:
            self.read_bytes += byte_count
            self._reads.took(byte_count, seconds)
        if in_time:
            self.reading.succeeded()

    def write_took(self, byte_count: int, seconds: float, in_time: bool = True) -> None:
        """A write succeeded; not `in_time`: after its deadline, which is no success."""
        with self._lock:
            self.written_bytes += byte_count
            self._writes.took(byte_count, seconds)
        if in_time:
            self.writing.succeeded()

    def read_failed(self, error: StoreError, in_time: bool = True) -> None:
        """A read or a listing failed; not `in_time`: after its deadline, when it was counted already."""
        with self._lock:
            self.read_errors += in_time
        self._tell(self.reading, error.trouble, str(error))

    def write_failed(self, error: StoreError, in_time: bool = True) -> None:
        """A write failed; `in_time` as above. What cannot be reached cannot be read from either."""
        with self._lock:
            self.write_errors += in_time
        self._tell(self.writing, error.trouble, str(error))
        if error.trouble == "unreachable":
            self._tell(self.reading, error.trouble, str(error))

    def read_late(self, deadline_s: float) -> None:
        """A read did not end within its deadline."""
        with self._lock:
            self.read_errors += 1
        self._tell(self.reading, None, f"{self._place} did not answer a read within {deadline_s:g} s")

    def write_late(self, deadline_s: float) -> None:
        """A write did not end within its deadline."""
        with self._lock:
            self.write_errors += 1
        self._tell(self.writing, None, f"{self._place} did not answer a write within {deadline_s:g} s")

    def _tell(self, breaker: Breaker, trouble: StoreTrouble | None, line: str) -> None:
        """Tell a breaker of trouble; None: it was late."""
        before = breaker.openings
        if trouble is None:
            breaker.late(line)
        else:
            breaker.failed(trouble, line)
        if breaker.openings != before:
            log.warning("%s", self.store_fault)

    def _line(self, what: str, breaker: Breaker) -> str:
        return "" if breaker.closed else f"{what} ({breaker.trouble}): {breaker.line}"
