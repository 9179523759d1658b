"""Digests of files that were made once, for every process of this user on the node, in one small file.

A file is known by its identity (device, inode, size, modification and change time), as a version control system
remembers files it has seen. Whoever makes a digest holds that file's lock meanwhile: another process that needs it too
takes other files first, and then waits for it. A digest is in the memo before its lock is free.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvbm.byte_locks import ByteLocks, LockBusy
from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.runtime_dir import is_ours, make_own_dir, read_private, replace_private

log = logging.getLogger("kvbm.weights")

WAIT_S = 120.0
"""For so long one memo waits for the digests that others make, all of its waits together. It is time for 12 GB at
100 MB/s; whoever takes longer hangs, or reads from a device that two readers would not make slower."""

_ENTRIES_MAX = 10_000
_VERSION = "2"
_SETTLED_S = 2.0
_MERGE_WAIT_S = 5.0
_MERGING = "the memo itself"
_DIGEST = re.compile("[0-9a-f]{64}")

MakeDigest = Callable[[BinaryIO, str], str]
"""Hex digest (32 bytes) of the content of an open file with this name."""


class WeightsMemo:
    """Digests already known. A memo that cannot be read, written or locked only costs making digests again.

    A user who can write to it can give other weights the name of ours. So it is used only where no other user can: a
    memo or a directory of another user's, one that others can write to, or a link, is not used, and one line says so.
    Owned by one thread; other threads and processes have objects of their own.
    """

    def __init__(
        self,
        path: Path,
        make_digest: MakeDigest,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = path
        self._make_digest = make_digest
        self._clock = clock
        # Not the memo itself: that is replaced as a whole, and a lock stays with the old file.
        self._locks = ByteLocks(path.with_suffix(".lock"), clock, sleep)
        self._known: dict[str, str] = {}
        self._merge_wait_s = _MERGE_WAIT_S
        self._wait_left_s = WAIT_S
        self._in_use = True
        self._read()

    def digests(self, paths: Sequence[Path]) -> list[str]:
        """Hex digests of these files' contents, in their order. Raises OSError for a file that cannot be read."""
        found: dict[Path, str] = {}
        busy: list[Path] = []
        for path in paths:
            try:
                found[path] = self._digest(path, self._clock())
            except LockBusy:
                busy.append(path)
        for path in busy:
            found[path] = self._awaited(path)
        return [found[path] for path in paths]

    def _awaited(self, path: Path) -> str:
        """A digest that another process makes, or that is made here once this memo has waited for long enough."""
        began_s = self._clock()
        try:
            return self._digest(path, began_s + self._wait_left_s)
        except LockBusy:
            log.warning(
                "another process makes the digest of %s, and others were waited for %g s: it is made here too",
                path,
                WAIT_S,
            )
            self._wait_left_s = 0.0
            return self._made(path)
        finally:
            self._wait_left_s = max(0.0, self._wait_left_s - (self._clock() - began_s))

    def _digest(self, path: Path, until_s: float) -> str:
        """Raises LockBusy when another process still makes this digest at `until_s`."""
        with path.open("rb") as file:  # on NFS opening a file asks the server, where looking at it may not
            identity = _identity(os.fstat(file.fileno()))
        known = self._remembered(identity)
        if known:
            return known
        with contextlib.ExitStack() as lock:
            if self._in_use:
                # Where there can be no lock, two processes may make it.
                with contextlib.suppress(OSError, SettingsError):
                    lock.enter_context(self._locks.held(identity, until_s))
                    self._read()  # it may have been made while we waited
            return self._remembered(identity) or self._made(path)

    def _remembered(self, identity: str) -> str:
        known = self._known.get(identity, "")
        return known if _DIGEST.fullmatch(known) else ""

    def _made(self, path: Path) -> str:
        """A digest made now, and remembered if it is certain which file's it is."""
        with path.open("rb") as file:
            before, now_s = os.fstat(file.fileno()), time.time()
            value = self._make_digest(file, path.name)
            after = os.fstat(file.fileno())
        # Shortly after a change a file could change again without its times moving: that digest is made anew next time.
        settled = now_s - max(before.st_ctime, before.st_mtime) > _SETTLED_S
        if settled and _identity(before) == _identity(after):
            self._known[_identity(before)] = value
            self._write()
        return value

    def _read(self) -> None:
        """Take in what the file has. Entries of our own stay: what we made we need not believe."""
        if not self._in_use:
            return
        try:
            if is_ours(str(self.path.parent)):
                stored = msgspec.json.decode(read_private(str(self.path)), type=dict[str, str])
                self._known = {**stored, **self._known}
        except FileNotFoundError:
            pass  # nothing was digested yet
        except msgspec.MsgspecError:
            pass  # of another version, or cut short: it is replaced
        except (OSError, SettingsError) as error:
            self._in_use = False
            _tell_unused(str(self.path), str(error))

    def _write(self) -> None:
        """Replace the file as a whole by what it has and what we know."""
        if not self._in_use:
            return
        with contextlib.ExitStack() as lock:
            # Without it another's latest entries may be lost, and are made again.
            try:
                lock.enter_context(self._locks.held(_MERGING, self._clock() + self._merge_wait_s))
            except LockBusy:
                self._merge_wait_s = 0.0
            except (OSError, SettingsError):
                pass
            self._replace()

    def _replace(self) -> None:
        self._read()
        if not self._in_use:
            return
        newest = dict(list(self._known.items())[-_ENTRIES_MAX:])
        try:
            make_own_dir(str(self.path.parent), "the directory")
            replace_private(str(self.path), msgspec.json.encode(newest))
        except (OSError, SettingsError):
            return


@functools.cache
def _tell_unused(path: str, why: str) -> None:
    """Once in a process."""
    log.warning("digests of weights are not remembered in %s, and are made anew each time: %s", path, why)


def _identity(status: os.stat_result) -> str:
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, (_VERSION, *parts)))
