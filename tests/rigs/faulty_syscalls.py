"""Seeded faults at the system-call boundary of the disk tier.

Faults that can be injected into any call of `kvbm.tiers.disk.syscalls.Syscalls`:

- the errors a medium gives: EIO, ENOSPC, EROFS, ENODEV, EINVAL, EOPNOTSUPP;
- an interrupted call (EINTR) and a short transfer, down to none at all;
- a flipped bit, in written or in read bytes;
- a write that is reported and never happens;
- a power cut or a SIGKILL in the middle of the n-th write, after which nothing reaches the medium any more.

The same seed and the same calls give the same faults.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence

import msgspec

from kvbm.layout import PAGE_BYTES
from kvbm.tiers.disk.syscalls import Syscalls

_Call = Callable[[int, Sequence[memoryview], int], int]


class Fault(enum.Enum):
    """The kinds of faults."""

    EIO = "EIO"
    ENOSPC = "ENOSPC"
    EROFS = "EROFS"
    ENODEV = "ENODEV"
    EINVAL = "EINVAL"
    EINTR = "EINTR"
    EOPNOTSUPP = "EOPNOTSUPP"
    SHORT = "short"
    FLIP = "flip"
    LOST = "lost"


class FaultRule(msgspec.Struct, frozen=True, kw_only=True):
    """The calls in which it goes wrong: those of `operation` on files whose name contains `file`.

    The first `skip` such calls are spared, then each is struck with `chance`, at most `times` in all. `offset`: only
    reads and writes that touch this byte of the file.
    """

    operation: str
    fault: Fault
    file: str = ""
    skip: int = 0
    times: int | None = None
    chance: float = 1.0
    offset: int | None = None


class FaultySyscalls(Syscalls):
    """The kernel with faults. Thread-safe; `struck` counts what was injected, by rule."""

    def __init__(self, seed: int, *rules: FaultRule) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._rules: list[FaultRule] = []
        self._seen: dict[FaultRule, int] = {}
        self.struck: dict[FaultRule, int] = {}
        self.calls: dict[str, int] = {}
        self._writes_left: int | None = None
        self._kill = False
        self.power_off = False
        for rule in rules:
            self.arm(rule)

    def arm(self, rule: FaultRule) -> None:
        """Put a rule into force."""
        with self._lock:
            self._rules.append(rule)
            self._seen.setdefault(rule, 0)
            self.struck.setdefault(rule, 0)

    def disarm(self) -> None:
        """Drop all rules: the medium works again."""
        with self._lock:
            self._rules.clear()

    def cut_power(self, after_writes: int, kill: bool = False) -> None:
        """The write after the next `after_writes` ones reaches the medium in part, and nothing after it does.

        With `kill` the process dies by SIGKILL there; otherwise every later call fails with EIO.
        """
        with self._lock:
            self._writes_left = after_writes
            self._kill = kill

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._strike("open", path)
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        with self._lock:
            self._names[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._strike("preadv", self._names.get(fd, ""), _extent(buffers, offset))
        if fault is Fault.SHORT:
            return self._in_part(super().preadv, fd, buffers, offset)
        moved = super().preadv(fd, buffers, offset)
        if fault is Fault.FLIP and moved:
            self._flip(buffers)
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._strike("pwritev", self._names.get(fd, ""), _extent(buffers, offset))
        self._maybe_cut(fd, buffers, offset)
        if fault is Fault.SHORT:
            return self._in_part(super().pwritev, fd, buffers, offset)
        if fault is Fault.LOST:
            return sum(buffer.nbytes for buffer in buffers)
        if fault is Fault.FLIP:
            copies = _aligned_copies(buffers)
            self._flip(copies)
            return super().pwritev(fd, copies, offset)
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._strike("fallocate", self._names.get(fd, ""))
        super().fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        self._strike("ftruncate", self._names.get(fd, ""))
        super().ftruncate(fd, length)

    def fstat(self, fd: int) -> os.stat_result:
        self._strike("fstat", self._names.get(fd, ""))
        return super().fstat(fd)

    def mkdir(self, path: str, mode: int) -> None:
        self._strike("mkdir", path)
        super().mkdir(path, mode)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._strike("rename", source)
        super().rename(source, target, dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._strike("unlink", path)
        super().unlink(path, dir_fd=dir_fd)

    def free_bytes(self, path: str) -> int:
        return 0 if self._strike("free_bytes", path) is Fault.SHORT else super().free_bytes(path)

    def _strike(self, operation: str, name: str, extent: range = range(0)) -> Fault | None:
        """Raise the error that is due, or return the other fault that is due."""
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            dark = self.power_off
            rule = None
            if not dark:
                due = (rule for rule in self._rules if self._is_due(rule, operation, name, extent))
                rule = next(due, None)
            if rule is not None:
                self.struck[rule] += 1
        if dark and self._kill:
            threading.Event().wait()  # the process is about to die: nobody may see anything of it before
        if dark:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if rule is None:
            return None
        code = getattr(errno, rule.fault.value, None)
        if code is not None:
            raise OSError(code, os.strerror(code))
        return rule.fault

    def _is_due(self, rule: FaultRule, operation: str, name: str, extent: range) -> bool:
        if rule.operation != operation or rule.file not in name:
            return False
        if rule.offset is not None and rule.offset not in extent:
            return False
        self._seen[rule] += 1
        if self._seen[rule] <= rule.skip or (rule.times is not None and self.struck[rule] >= rule.times):
            return False
        return rule.chance >= 1.0 or self._random.random() < rule.chance

    def _maybe_cut(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._lock:
            if self._writes_left is None:
                return
            self._writes_left -= 1
            if self._writes_left >= 0:
                return
            self.power_off = True
            kept = self._some(sum(buffer.nbytes for buffer in buffers))
        head = _head(buffers, kept)
        if head:
            super().pwritev(fd, head, offset)
        if self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _in_part(self, call: _Call, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Move whole pages, as O_DIRECT must, and report fewer bytes."""
        with self._lock:
            moved = self._some(sum(buffer.nbytes for buffer in buffers))
            hidden = self._random.randrange(PAGE_BYTES) if moved >= PAGE_BYTES else 0
        head = _head(buffers, moved)
        return max(0, call(fd, head, offset) - hidden) if head else 0

    def _some(self, total_bytes: int) -> int:
        """A number of bytes below `total_bytes`; whole pages when there are any."""
        count = self._random.randrange(total_bytes)
        return count - count % PAGE_BYTES if total_bytes >= PAGE_BYTES else count

    def _flip(self, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            buffer = self._random.choice(buffers)
            place, bit = self._random.randrange(buffer.nbytes), self._random.randrange(8)
        buffer[place] ^= 1 << bit


def _extent(buffers: Sequence[memoryview], offset: int) -> range:
    """The bytes of the file that a call is about."""
    return range(offset, offset + sum(buffer.nbytes for buffer in buffers))


def _head(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    head: list[memoryview] = []
    for buffer in buffers:
        taken = min(count, buffer.nbytes)
        if taken:
            head.append(buffer[:taken])
            count -= taken
    return head


def _aligned_copies(buffers: Sequence[memoryview]) -> list[memoryview]:
    copies = [memoryview(mmap.mmap(-1, buffer.nbytes))[: buffer.nbytes] for buffer in buffers]
    for copy, buffer in zip(copies, buffers, strict=True):
        copy[:] = buffer
    return copies
