"""The rule of the manager's thread: in a turn of its loop it makes no call to a disk, the network or a name service.
It waits for no lock of a file and for no thread.

`turn()` replaces these calls while a turn lasts: made by the thread that is in it they raise, other threads make them
as ever. What the thread may do all the same is listed here, each with its reason.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvbm.tiers.disk.syscalls import Syscalls

_OS = (
    *("access", "chmod", "close", "copy_file_range", "fdatasync", "fstat", "fstatvfs", "fsync", "ftruncate"),
    *("link", "listdir", "lstat", "mkdir", "open", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev"),
    *("read", "readlink", "remove", "rename", "replace", "rmdir", "scandir", "sendfile", "stat", "statvfs"),
    *("symlink", "truncate", "unlink", "utime", "write"),
)
_SOCKET = ("create_connection", "getaddrinfo", "gethostbyaddr", "gethostbyname", "getnameinfo")
SYSCALLS = tuple(name for name, each in vars(Syscalls).items() if callable(each) and name[0] != "_")

MEMORY = ("/memfd:", "anon_inode:", "pipe:", "socket:", "/dev/")
"""Descriptors of no disk: shared memory, eventfds, pipes, sockets, devices such as `/dev/null`."""
KERNEL_FILES = ("/proc/", "/sys/")
"""The kernel answers from memory: what a process, a limit or a NUMA node is."""
CALLERS = {
    ("/linecache.py", "checkcache"): "a defect is logged with the lines of its source",
    ("/linecache.py", "updatecache"): "the same",
    ("kvbm/strict.py", "record_swallowed"): "the record that a test looks at",
}
"""Functions of ours below which such calls are made knowingly."""


class ForbiddenCall(AssertionError):
    """The manager's thread made a call that may take as long as a disk or a network likes."""


class _Turn(threading.local):
    lasts = False


_turn = _Turn()


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """A turn of the loop, in this thread."""
    with contextlib.ExitStack() as ends:
        for owner, name in _watched():
            inherited = name not in vars(owner)
            call = getattr(owner, name)
            setattr(owner, name, _guarded(name, call))
            ends.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, call)))
        _turn.lasts = True
        ends.callback(setattr, _turn, "lasts", False)
        yield


def _watched() -> Iterator[tuple[Any, str]]:
    yield from ((os, name) for name in _OS)
    yield from ((socket, name) for name in _SOCKET)
    yield from ((Syscalls, name) for name in SYSCALLS)
    yield from ((module, "open") for module in (builtins, io))
    yield from ((socket.socket, "connect"), (fcntl, "flock"), (threading.Thread, "join"))


def _guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _turn.lasts:
            _turn.lasts = False  # the checks may make such calls
            try:
                _check(name, args)
            finally:
                _turn.lasts = True
        return call(*args, **kwargs)

    return guarded


def _check(name: str, args: tuple[Any, ...]) -> None:
    """Raise ForbiddenCall unless the call waits for nothing, is about memory, or is known."""
    match args:
        case (socket.socket() as connection, *_) if connection.gettimeout() == 0.0:
            return
        case (threading.Thread() as thread, *timeout) if timeout == [0.0] or not thread.is_alive():
            return
    subject = next((arg for arg in args if isinstance(arg, int | str | bytes | os.PathLike)), None)
    where = os.fsdecode(subject) if isinstance(subject, str | bytes | os.PathLike) else _target(subject)
    if where.startswith((*MEMORY, *KERNEL_FILES)):
        return
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if any(code.co_filename.endswith(file) and code.co_name == function for file, function in CALLERS):
            return
        frame = frame.f_back
    raise ForbiddenCall(f"the manager's thread called {name} for {where or args!r}")


def _target(descriptor: int | None) -> str:
    """What a descriptor is of."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""
