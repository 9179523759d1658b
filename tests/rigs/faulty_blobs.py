"""A store of named blobs in memory, and faults around any store of blobs: for tests of what stands on one.

`MemoryBlobs` keeps the contract of `kvbm.tiers.remote.blobs`, with a clock that the test moves. `FaultyBlobs` wraps a
store and does what real ones do on bad days: it is silent, slow, refuses, is full, cuts a read short, flips a bit,
answers with another blob's bytes, says that it has written what it has not. Faults are set by hand or drawn with a
seed: the same seed and the same calls give the same faults.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import BlobInfo, BlobStore, Buffer, Put, StoreError, StoreTrouble, valid_name

BLOB_BYTES_MAX = 64 << 20

_Answer = TypeVar("_Answer")


class MemoryBlobs:
    """A store in memory. Thread-safe. `blobs` may be looked at and broken by a test, `modified_s` too.

    `capacity_bytes` in all, of blobs' bytes: what goes beyond is refused as `full`.
    """

    def __init__(
        self, clock: Clock, *, blob_bytes_max: int = BLOB_BYTES_MAX, capacity_bytes: int | None = None
    ) -> None:
        self.place = "memory://"
        self.blob_bytes_max = blob_bytes_max
        self.notes: tuple[str, ...] = ()
        self.blobs: dict[str, bytes] = {}
        self.modified_s: dict[str, float] = {}
        self.closed = False
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        blob = b"".join(parts)
        assert valid_name(name) and 0 < len(blob) <= self.blob_bytes_max
        with self._lock:
            self._begin("put")
            if name in self.blobs:
                return Put.EXISTS
            used = sum(map(len, self.blobs.values()))
            if self._capacity_bytes is not None and used + len(blob) > self._capacity_bytes:
                raise StoreError(
                    "full", f"{self.place} is full: {used} of {self._capacity_bytes} bytes are used"
                )
            self.blobs[name] = blob
            self.modified_s[name] = self._clock()
            return Put.CREATED

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        assert 0 <= start < end
        with self._lock:
            self._begin("get")
            blob = self.blobs.get(name)
            return None if blob is None else blob[start:end]

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        assert length > 0
        with self._lock:
            self._begin("get")
            blob = self.blobs.get(name)
            return None if blob is None else (blob[-length:], len(blob))

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`. What is put or deleted while it is read may be missing or there."""
        with self._lock:
            self._begin("list")
            names = sorted(name for name in self.blobs if name.startswith(prefix))
        for name in names:
            with self._lock:
                blob = self.blobs.get(name)
                if blob is None:
                    continue
                info = BlobInfo(name, len(blob), self.modified_s[name])
            yield info

    def touch(self, name: str) -> None:
        """See `BlobStore`."""
        with self._lock:
            self._begin("put")
            if name in self.blobs:
                self.modified_s[name] = self._clock()

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`."""
        with self._lock:
            self._begin("delete")
            for name in names:
                self.blobs.pop(name, None)
                self.modified_s.pop(name, None)

    def now_s(self) -> float:
        """See `BlobStore`."""
        with self._lock:
            self._begin(None)
            return self._clock()

    def requests(self) -> dict[str, int]:
        """See `BlobStore`."""
        with self._lock:
            return {kind: self._requests[kind] for kind in ("put", "get", "list", "delete")}

    def close(self) -> None:
        """See `BlobStore`. What was stored stays in `blobs`."""
        self.closed = True

    def _begin(self, kind: str | None) -> None:
        if self.closed:
            raise StoreError("unreachable", f"{self.place} was closed")
        if kind is not None:
            self._requests[kind] += 1


class BlobFault(enum.Enum):
    """The kinds of faults."""

    SILENT = "silent"
    """The call does not return before `release` or `close`; then it goes on as if nothing had been, or fails."""
    DELAYED = "delayed"
    """The call takes `BlobRule.seconds` longer, by the `pause` that the store was made with."""
    UNREACHABLE = "unreachable"
    SLOW = "slow"
    REFUSED = "refused"
    FULL = "full"
    THROTTLED = "throttled"
    FAILED = "failed"
    """These six raise StoreError of that kind; nothing reaches the store."""
    UNSURE = "unsure"
    """The store does it, and the answer is lost: raises StoreError `unreachable` afterwards."""
    TRUNCATED = "truncated"
    """A read brings half of its bytes; of a put half is kept, reported as CREATED; a listing fails at its half."""
    FLIPPED = "flipped"
    """A bit is wrong in what a read brings, or in what a put keeps."""
    FOREIGN = "foreign"
    """A read answers with another blob's bytes, of the same length as far as that blob has them."""
    LOST = "lost"
    """A put that is reported and never happens; a read that answers that there is no such blob; an empty listing."""


_TROUBLES: dict[BlobFault, StoreTrouble] = {
    BlobFault.UNREACHABLE: "unreachable",
    BlobFault.SLOW: "slow",
    BlobFault.REFUSED: "refused",
    BlobFault.FULL: "full",
    BlobFault.THROTTLED: "throttled",
    BlobFault.FAILED: "failed",
}


class BlobRule(msgspec.Struct, frozen=True, kw_only=True):
    """The calls in which it goes wrong: those of the method `operation` (empty: all) on names with `name` in them.

    The first `skip` such calls are spared, then each is struck with `chance`, at most `times` in all. Calls without
    a name (`listing`, `delete`, `now_s`) count as named by their prefix or their first name. `seconds`: of DELAYED.
    """

    fault: BlobFault
    operation: str = ""
    name: str = ""
    skip: int = 0
    times: int | None = None
    chance: float = 1.0
    seconds: float = 0.0


class FaultyBlobs:
    """A store with faults around `store`. Thread-safe; `struck` counts what was injected, by fault."""

    def __init__(
        self, store: BlobStore, *rules: BlobRule, seed: int = 0, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.store = store
        self.place = store.place
        self.blob_bytes_max = store.blob_bytes_max
        self.notes = store.notes
        self.struck: Counter[BlobFault] = Counter()
        self._pause = pause
        self._random = random.Random(seed)
        self._rules: list[BlobRule] = []
        self._seen: dict[BlobRule, int] = {}
        self._times: Counter[BlobRule] = Counter()
        self._changed = threading.Condition()
        self._silent = 0
        self._releases = 0
        self._closed = False
        for rule in rules:
            self.arm(rule)

    def arm(self, rule: BlobRule) -> None:
        """Put a rule into force. The first rule that strikes decides."""
        with self._changed:
            self._rules.append(rule)
            self._seen.setdefault(rule, 0)

    def disarm(self) -> None:
        """Drop all rules: the store works again. Calls that are silent stay so until `release`."""
        with self._changed:
            self._rules.clear()

    def release(self) -> None:
        """Let every call go on that is silent now."""
        with self._changed:
            self._releases += 1
            self._changed.notify_all()

    def wait_silent(self, count: int, deadline_s: float = 30.0) -> bool:
        """Wait until at least `count` calls are silent. False when the deadline passed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._silent >= count, deadline_s)

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        fault = self._strike("put", name)
        if fault is BlobFault.LOST:
            return Put.CREATED
        if fault in (BlobFault.TRUNCATED, BlobFault.FLIPPED):
            return self.store.put(name, [self._spoilt(fault, b"".join(parts))])
        return self._sure(fault, self.store.put(name, parts))

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        fault = self._strike("read", name)
        if fault is BlobFault.LOST:
            return None
        if fault is BlobFault.FOREIGN:
            return self.store.read(self._another(name), start, end)
        found = self.store.read(name, start, end)
        return self._sure(fault, found if found is None else self._spoilt(fault, found))

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        fault = self._strike("read_end", name)
        if fault is BlobFault.LOST:
            return None
        if fault is BlobFault.FOREIGN:
            return self.store.read_end(self._another(name), length)
        found = self.store.read_end(name, length)
        return self._sure(fault, found if found is None else (self._spoilt(fault, found[0]), found[1]))

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`. A fault strikes when the first blob is asked for."""
        fault = self._strike("listing", prefix)
        if fault is BlobFault.LOST:
            return
        if fault is not BlobFault.TRUNCATED:
            yield from self._sure(fault, self.store.listing(prefix))
            return
        found = list(self.store.listing(prefix))
        yield from found[: len(found) // 2]
        raise StoreError("failed", f"{self.place} failed in the middle of a listing, as the test wants it")

    def touch(self, name: str) -> None:
        """See `BlobStore`."""
        fault = self._strike("touch", name)
        if fault is not BlobFault.LOST:
            self.store.touch(name)
            self._sure(fault, None)

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`."""
        fault = self._strike("delete", names[0] if names else "")
        if fault is not BlobFault.LOST:
            self.store.delete(names)
            self._sure(fault, None)

    def now_s(self) -> float:
        """See `BlobStore`."""
        return self._sure(self._strike("now_s", ""), self.store.now_s())

    def requests(self) -> dict[str, int]:
        """See `BlobStore`. Calls that never reached the store are not counted."""
        return self.store.requests()

    def close(self) -> None:
        """See `BlobStore`. Ends the silence of every call with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.store.close()

    def _strike(self, operation: str, name: str) -> BlobFault | None:
        """The fault of this call; raises where the fault is an error, and waits where it is time."""
        with self._changed:
            rule = next((rule for rule in self._rules if self._strikes(rule, operation, name)), None)
            if rule is None:
                return None
            self._times[rule] += 1
            self.struck[rule.fault] += 1
            if rule.fault is BlobFault.SILENT:
                self._wait()
                return None
        if rule.fault is BlobFault.DELAYED:
            self._pause(rule.seconds)
            return None
        trouble = _TROUBLES.get(rule.fault)
        if trouble is not None:
            raise StoreError(trouble, f"{self.place}: {operation} {name}: {trouble}, as the test wants it")
        return rule.fault

    def _strikes(self, rule: BlobRule, operation: str, name: str) -> bool:
        if rule.operation not in ("", operation) or rule.name not in name:
            return False
        self._seen[rule] += 1
        if self._seen[rule] <= rule.skip or (rule.times is not None and self._times[rule] >= rule.times):
            return False
        return self._random.random() < rule.chance

    def _wait(self) -> None:
        """Until the next `release`, or `close`. Called with the lock held."""
        releases = self._releases
        self._silent += 1
        self._changed.notify_all()
        try:
            self._changed.wait_for(lambda: self._closed or self._releases != releases)
        finally:
            self._silent -= 1
        if self._closed:
            raise StoreError("unreachable", f"{self.place} was closed")

    def _sure(self, fault: BlobFault | None, answer: _Answer) -> _Answer:
        if fault is BlobFault.UNSURE:
            raise StoreError("unreachable", f"{self.place}: the answer was lost, as the test wants it")
        return answer

    def _spoilt(self, fault: BlobFault | None, found: Buffer) -> Buffer:
        if fault is BlobFault.TRUNCATED:
            return bytes(found[: len(found) // 2])
        if fault is BlobFault.FLIPPED and len(found):
            flipped = bytearray(found)
            with self._changed:
                bit = self._random.randrange(8 * len(flipped))
            flipped[bit // 8] ^= 1 << bit % 8
            return flipped
        return found

    def _another(self, name: str) -> str:
        """Another blob's name of the same kind (the part before the first `/`); `name` itself if there is no other."""
        kind = name.partition("/")[0] + "/" if "/" in name else ""
        others = [info.name for info in self.store.listing(kind) if info.name != name]
        with self._changed:
            return self._random.choice(others) if others else name
