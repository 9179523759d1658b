"""Marks of resets that a disk could not record: its blocks must not be found again, and its files take no writes.

A mark is a file with a number, `dynamo-kvbm-disk-cache-<fingerprint, 12 digits>.reset`, beside the directories of the
namespace and in a second place that is no part of the disk. A directory whose `meta.json` has a smaller number holds
blocks from before that reset, and is opened empty. Marks stay: a directory that is away may come back at any time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvbm.runtime_dir import read_private
from kvbm.tiers.disk.directory import DIRECTORY_PREFIX, NEW_SUFFIX
from kvbm.tiers.disk.syscalls import Syscalls, write_fully

MARK_SUFFIX = ".reset"
NUMBER_END = 1 << 63


class ResetMarks:
    """The marks of one namespace. Thread-safe; each call may take as long as a file system likes."""

    def __init__(self, short: str, root: Path, notes_dir: Path | None, syscalls: Syscalls) -> None:
        """`short` is the namespace's name, `notes_dir` the second place: a directory of ours, where there is one."""
        self._name = f"{DIRECTORY_PREFIX}{short}{MARK_SUFFIX}"
        self._root = root
        self._notes_dir = notes_dir
        self._syscalls = syscalls
        self._in_root = threading.Lock()

    def newest(self) -> int:
        """The highest number of all marks, 0 without one. Raises OSError where it cannot be known."""
        return max(self._read(self._root), self._read(self._notes_dir) if self._notes_dir is not None else 0)

    def add(self, above: int, on_written: Callable[[int], None], on_noted: Callable[[], None]) -> None:
        """Write a mark with a number above this one and those that are there. `on_written` is called with its number
        as soon as it lies in one place, `on_noted` when `notes_dir` has answered: until then a second thread would
        hang there too. Raises OSError for a place that takes none.

        The disk itself comes last, and while it keeps another call it is left out: it may never answer.
        """
        try:
            if self._notes_dir is not None:
                with contextlib.suppress(OSError):  # the disk's root may take it
                    above = self._write(self._notes_dir, Syscalls(), above)
                    on_written(above)
        finally:
            on_noted()
        if self._in_root.acquire(blocking=False):
            try:
                on_written(self._write(self._root, self._syscalls, above - 1))
            finally:
                self._in_root.release()

    def _write(self, place: Path, syscalls: Syscalls, above: int) -> int:
        """Returns the mark's number. Raises OSError."""
        number = max(time.time_ns(), above + 1, self._read(place) + 1)
        dir_fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            fd = syscalls.open(self._name + NEW_SUFFIX, flags, dir_fd=dir_fd)
            try:
                write_fully(syscalls, fd, [memoryview(b"%d\n" % number)], 0, alignment=1)
                syscalls.fdatasync(fd)
            finally:
                syscalls.close(fd)
            syscalls.rename(self._name + NEW_SUFFIX, self._name, dir_fd=dir_fd)
            syscalls.fdatasync(dir_fd)
        finally:
            os.close(dir_fd)
        return number

    def _read(self, place: Path) -> int:
        path = place / self._name
        try:
            number = int(read_private(str(path)))
        except (FileNotFoundError, PermissionError):
            return 0  # there is none, or it is another user's
        except ValueError:  # a mark of ours that was damaged
            number = -1
        return number if 0 <= number < NUMBER_END else path.stat().st_mtime_ns
