"""Where the managers of this user listen: sockets in the runtime directory, and others that left a record in it.

A manager with a socket in another directory writes a small file with the socket's path, so that commands find it
without an argument. A record is believed only where the directory and the file are ours, and only while somebody
listens there; who that is, the kernel says at the connection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvbm.client.finder import ERROR_SUFFIX
from kvbm.errors import SettingsError
from kvbm.peers import is_ourselves
from kvbm.runtime_dir import check_runtime_dir, make_runtime_dir, read_private, replace_private
from kvbm.settings import SOCKET_PATH_BYTES_MAX
from kvbm.unix_sockets import connect_error

log = logging.getLogger("kvbm.client.whereabouts")

SOCKET_SUFFIX = ".sock"
RECORD_SUFFIX = ".at"
MANAGERS_MAX = 64
"""Managers of one runtime directory that are told of."""
_LOOKED_AT_MAX = 4096
"""Sockets, and records, of one runtime directory that are looked at."""
_SWEPT_MAX = 256
"""Records, and sockets, that one sweep looks at."""
_NAME = "[0-9a-f]" * 16
_PRIVATE_LOCKS = f"private-{_NAME}{SOCKET_SUFFIX}.lock"
"""Names that nobody but us gives. A shared manager's socket has the name that its operator chose."""


class Sockets(NamedTuple):
    """Where somebody listens, and the sockets in the directory at which nobody does; each by path."""

    living: list[str]
    dead: list[str]


def listening_sockets(runtime_dir: str) -> list[str]:
    """The sockets at which somebody listens, by path. One that a killed manager left is not among them.

    Raises SettingsError for a directory that others could have put a socket into.
    """
    return list(islice((path for path in _candidates(runtime_dir) if connect_error(path) == 0), MANAGERS_MAX))


def known_sockets(runtime_dir: str) -> Sockets:
    """The sockets that managers of this user made. However many are dead, they hide no living one.

    Raises SettingsError as `listening_sockets` does.
    """
    living, dead = [], []
    inside = str(Path(runtime_dir))
    for path in _candidates(runtime_dir):
        if connect_error(path) == 0:
            living.append(path)
        elif os.path.dirname(path) == inside and _is_own_socket(path):
            dead.append(path)
    return Sockets(living[:MANAGERS_MAX], dead)


def _candidates(runtime_dir: str) -> list[str]:
    """The sockets in the directory, and those of its records."""
    if not check_runtime_dir(runtime_dir):
        return []
    there = sorted(map(str, islice(Path(runtime_dir).glob(f"*{SOCKET_SUFFIX}"), _LOOKED_AT_MAX)))
    recorded = set(filter(None, map(_socket_of, islice(_records(runtime_dir), _LOOKED_AT_MAX))))
    return there + sorted(recorded - set(there))


@contextlib.contextmanager
def announced(socket_path: str, runtime_dir: str) -> Iterator[None]:
    """Leave a record of a socket that is listened at and lies elsewhere, until the end. Without one, all else works."""
    with contextlib.suppress(OSError, SettingsError):  # what killed managers left stays
        sweep(runtime_dir)
    inside = os.path.realpath(os.path.dirname(socket_path)) == os.path.realpath(runtime_dir)
    if inside and socket_path.endswith(SOCKET_SUFFIX):
        yield
        return
    name = hashlib.sha256(os.fsencode(socket_path)).hexdigest()[:16]
    record = os.path.join(runtime_dir, name + RECORD_SUFFIX)
    try:
        make_runtime_dir(runtime_dir)
        replace_private(record, os.fsencode(socket_path))
    except (OSError, SettingsError) as error:
        log.warning("commands must be told --manager %s: %s", socket_path, error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # removed already
            os.unlink(record)


def _records(runtime_dir: str) -> Iterator[str]:
    return iter(sorted(map(str, Path(runtime_dir).glob("*" + RECORD_SUFFIX))))


def _socket_of(record: str) -> str:
    """The path in a record; empty for one that is not ours or holds no path."""
    try:
        content = read_private(record)
    except OSError:
        return ""
    if not content.startswith(b"/") or b"\0" in content or len(content) > SOCKET_PATH_BYTES_MAX:
        return ""
    return os.fsdecode(content)


def sweep(runtime_dir: str) -> None:
    """Remove what killed managers left: records whose sockets refuse, and private sockets whose locks are free.

    Only files that are ours, by their names too. Raises SettingsError for a directory that is not ours alone.
    """
    if not check_runtime_dir(runtime_dir):
        return
    for record in islice(Path(runtime_dir).glob(_NAME + RECORD_SUFFIX), _SWEPT_MAX):
        path = _socket_of(str(record))
        # A path that is not there at all may be one of another container.
        if path and connect_error(path) == errno.ECONNREFUSED:
            with contextlib.suppress(OSError):  # another process sweeps too
                os.unlink(record)
    for lock in islice(Path(runtime_dir).glob(_PRIVATE_LOCKS), _SWEPT_MAX):
        with contextlib.suppress(OSError):  # the manager lives, or another process sweeps too
            _sweep_private(str(lock))


def _sweep_private(lock_path: str) -> None:
    """Remove a private manager's files unless it lives. Raises OSError where it does.

    Its lock says so, not its socket: a manager that starts has bound a socket, and refuses until it listens.
    """
    fd = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_ourselves(os.fstat(fd).st_uid):
            return
        base = lock_path.removesuffix(".lock")
        # The lock goes last, while it is held: opening its path from then on makes a new file.
        for path in (base, base + ERROR_SUFFIX, lock_path):
            with contextlib.suppress(FileNotFoundError):  # a manager leaves some of them
                os.unlink(path)
    finally:
        os.close(fd)


def _is_own_socket(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and is_ourselves(status.st_uid)
