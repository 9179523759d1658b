"""The kernel calls through which the disk tier touches its medium, and nothing else.

They are methods of an object, and the object is an argument, so that tests can put faults exactly here
(`tests/rigs/faulty_syscalls.py`). `read_fully` and `write_fully` turn the kernel's short transfers into whole ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence

from kvbm.layout import PAGE_BYTES

VECTOR_BUFFERS_MAX = 1024
"""IOV_MAX: more buffers than this in one call are refused by the kernel."""

STALLS_MAX = 16
"""So many calls in a row may end without one page of progress; then the medium counts as failed."""


def _find_fallocate() -> Callable[..., int] | None:
    # os.posix_fallocate will not do: where the filesystem has no fallocate, glibc imitates it by writing to every
    # block, and the choice between zero-filling and a sparse file belongs to the settings.
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):
        return None
    # A ctypes function has this attribute, the Callable that it is typed as has not.
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]  # type: ignore[attr-defined]
    return function


_FALLOCATE = _find_fallocate()


class Syscalls:
    """The real kernel. Every method raises OSError as its namesake does; interrupted calls are repeated by Python."""

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve the range on the medium; EOPNOTSUPP where the filesystem or the C library cannot."""
        if _FALLOCATE is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _FALLOCATE(fd, 0, offset, length) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def touch(self, fd: int) -> None:
        """Set the file's time of modification to now."""
        os.utime(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def filesystem_bytes(self, path: str) -> int:
        """The size of the filesystem that holds `path`."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def free_bytes(self, path: str) -> int:
        """The bytes that an unprivileged process may still write to the filesystem that holds `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


_Transfer = Callable[[int, Sequence[memoryview], int], int]


def read_fully(
    syscalls: Syscalls, fd: int, targets: Sequence[memoryview], offset: int, alignment: int = PAGE_BYTES
) -> None:
    """Fill all targets from `offset` on. Raises OSError; ENODATA when the file ends first."""
    _transfer_fully(syscalls.preadv, fd, targets, offset, alignment)


def write_fully(
    syscalls: Syscalls, fd: int, sources: Sequence[memoryview], offset: int, alignment: int = PAGE_BYTES
) -> None:
    """Write all sources from `offset` on. Raises OSError; ENODATA when the kernel keeps taking nothing."""
    _transfer_fully(syscalls.pwritev, fd, sources, offset, alignment)


def _transfer_fully(
    call: _Transfer, fd: int, buffers: Sequence[memoryview], offset: int, alignment: int
) -> None:
    total = sum(buffer.nbytes for buffer in buffers)
    done = stalls = 0
    while done < total:
        rest = _skip_bytes(buffers, done) if done else buffers
        try:
            moved = call(fd, rest[:VECTOR_BUFFERS_MAX], offset + done)
        except InterruptedError:
            moved = 0
        reached = done + moved
        if reached < total:
            # O_DIRECT goes on only from an aligned place: repeat the page that came over in part.
            reached -= reached % alignment
        stalls = 0 if reached > done else stalls + 1
        if stalls > STALLS_MAX:
            raise OSError(errno.ENODATA, f"stopped after {done} of {total} bytes")
        done = reached


def _skip_bytes(buffers: Sequence[memoryview], skipped: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for buffer in buffers:
        if skipped >= buffer.nbytes:
            skipped -= buffer.nbytes
        else:
            rest.append(buffer[skipped:] if skipped else buffer)
            skipped = 0
    return rest
