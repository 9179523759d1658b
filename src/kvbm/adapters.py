"""LoRA adapters add their content to the keys of their requests: an engine's hash covers a name or a path at most.

A rank loads whatever lies at the path at that moment, and may load it again at any time. So the files are looked at
when the first request with the adapter comes, and their digest stands for all that the ranks load later, as long as the
files stay what they were (`_identity`). They are looked at again at most every `CHECK_EVERY_S` while requests come, and
at once when the engine brings a new load of the path. What this lets through is found before it does harm: blocks are
committed only if the files are unchanged *after* the ranks have copied them (`unchanged`). Whatever a rank has loaded,
it loaded before that. A hit may still be promised up to `CHECK_EVERY_S` after a change. No look can rule that out: a
rank reads the files some time after the promise.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbm import engine_start
from kvbm.clock import Clock
from kvbm.strict import record_swallowed
from kvbm.weights import changed_since, weight_files, weights_digest

log = logging.getLogger("kvbm.adapters")

CHECK_EVERY_S = 0.1

FIRST_DIGEST_S = 0.2
"""How long the first requests with an adapter are held for its digest. A rank takes as long to load it, and once the
digest is remembered (`weights_digest`) it takes a millisecond."""

Background = Callable[[Callable[[], None]], None]
"""Runs a function some time, perhaps at once."""


@dataclass(slots=True)
class _Seen:
    """An adapter as it was at the first look. The digest's thread sets `extras`, or `problem`, once."""

    identity: tuple[object, ...]
    load: int
    first_s: float
    checked_s: float
    extras: bytes | None = None
    problem: str = ""
    in_use: bool = False


class Adapters:
    """The extras of requests with an adapter, by its path.

    Requests neither look up nor store if the files of their adapter changed while the engine runs (it may or may not
    have been loaded again), or if it has no local files (so that it cannot be told from another). An adapter that is
    younger than the engine may have changed between its loading and our first look: its keys are this engine's alone.
    Owned by the scheduler's thread, which never waits for a digest.
    """

    def __init__(self, memo_path: Path, clock: Clock, background: Background | None = None) -> None:
        self._memo_path = memo_path
        self._clock = clock
        self._background = background if background is not None else OneThread()
        self._seen: dict[str, _Seen] = {}
        self._refused: set[str] = set()
        self._own_suffix = os.urandom(16)
        self.digests_made = 0
        """Only the digests' thread counts; whoever waits for one need not ask for it before this has risen."""

    def extras(self, lora_path: str, load: int = 0) -> bytes | None:
        """The extras of a request that uses the adapter at this path; None when its blocks must not be kept, which is
        so for good when the adapter is `refused`, and otherwise until the digest is made.

        Another number `load` than the last one says that the engine has been told anew to load what lies there.
        """
        if lora_path in self._refused:
            return None
        now_s = self._clock()
        seen = self._seen.get(lora_path)
        if seen is None:
            seen = self._first_look(lora_path, load, now_s)
        elif load != seen.load or now_s - seen.checked_s >= CHECK_EVERY_S:
            seen.load = load
            self._look_again(lora_path, seen, now_s)
        if seen is None or lora_path in self._refused:
            return None
        if not seen.in_use and (seen.extras is not None or seen.problem):
            if seen.problem:
                self._refuse(lora_path, seen.problem)
                return None
            seen.in_use = True
            if not self._look_again(lora_path, seen, now_s):
                return None  # changed while it was read: the digest may be of neither
        return seen.extras

    def refused(self, lora_path: str) -> bool:
        """Whether requests with this adapter are not kept, whatever comes."""
        return lora_path in self._refused

    def awaited(self, lora_path: str) -> bool:
        """Whether the adapter's digest is worth waiting for: it is being made, and not for longer than
        `FIRST_DIGEST_S`."""
        seen = self._seen.get(lora_path)
        if seen is None or seen.in_use or lora_path in self._refused:
            return False
        return self._clock() - seen.first_s < FIRST_DIGEST_S

    def unchanged(self, lora_path: str, since_s: float) -> bool:
        """Whether the adapter's files were found as they always were by a look not older than `since_s`."""
        seen = self._seen.get(lora_path)
        if seen is None or lora_path in self._refused:
            return False
        return seen.checked_s >= since_s or self._look_again(lora_path, seen, self._clock())

    def _first_look(self, lora_path: str, load: int, now_s: float) -> _Seen | None:
        try:
            seen = _Seen(_identity(Path(lora_path)), load, now_s, now_s)
        except OSError as error:
            self._refuse(lora_path, f"cannot be read ({error})")
            return None
        self._seen[lora_path] = seen
        self._background(lambda: self._digest(Path(lora_path), seen))
        return seen

    def _look_again(self, lora_path: str, seen: _Seen, now_s: float) -> bool:
        """Whether the files are what they were; a change is for good, whichever of them a rank has loaded."""
        try:
            same = _identity(Path(lora_path)) == seen.identity
        except OSError as error:
            self._refuse(lora_path, f"cannot be read ({error})")
            return False
        if not same:
            self._refuse(lora_path, "changed while the engine runs")
            return False
        seen.checked_s = now_s
        return True

    def _digest(self, location: Path, seen: _Seen) -> None:
        """Make the extras. In the background; `extras` or `problem` is set last."""
        try:
            digest = weights_digest([location], self._memo_path)
            if digest is None:
                seen.problem = "is in no local file that could be digested"
                return
            young = changed_since([location], engine_start.engine_start_s()) is not None
            seen.extras = digest.encode() + (self._own_suffix if young else b"")
        except Exception as error:  # of any kind: the adapter would be waited for, without a word
            if not isinstance(error, OSError):  # files that cannot be read
                record_swallowed(error)
            seen.problem = f"cannot be read ({error})"
        finally:
            self.digests_made += 1

    def _refuse(self, lora_path: str, why: str) -> None:
        self._refused.add(lora_path)
        log.warning("adapter %s %s: from now on its blocks are not kept", lora_path, why)


class OneThread:
    """Runs functions one after the other in a thread of its own, which ends when there are none. It keeps no process
    alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def __call__(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="kvbm-adapters", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                work = self._waiting.popleft()
            work()


def _identity(location: Path) -> tuple[object, ...]:
    """A value that changes when any of an adapter's files changes."""
    return tuple(
        (path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in weight_files(location)
        for status in (path.stat(),)
    )
