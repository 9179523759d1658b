"""Where the managers of this user listen: sockets in the runtime directory, and others that left a record in it.

A manager with a socket in another directory writes a small file with the socket's path, so that commands find it
without an argument. A record is believed only where the directory and the file are ours, and only while somebody
listens there; who that is, the kernel says at the connection.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvbm.errors import SettingsError
from kvbm.runtime_dir import check_runtime_dir, make_runtime_dir, read_private, replace_private

log = logging.getLogger("kvbm.client.whereabouts")

SOCKET_SUFFIX = ".sock"
RECORD_SUFFIX = ".at"
MANAGERS_MAX = 64
"""Managers of one runtime directory that are told of."""
_LOOKED_AT_MAX = 4096
"""Sockets, and records, of one runtime directory that are looked at."""
_RECORDS_SWEPT_MAX = 256
_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket."""


def listening_sockets(runtime_dir: str) -> list[str]:
    """The sockets at which somebody listens, by path. One that a killed manager left is not among them.

    Raises SettingsError for a directory that others could have put a socket into.
    """
    return list(islice((path for path in _candidates(runtime_dir) if _connects(path) == 0), MANAGERS_MAX))


def known_sockets(runtime_dir: str) -> list[str]:
    """The sockets in the directory, also those that nobody listens at, and those of records at which somebody does."""
    # Living ones first: those that killed managers left must not hide them.
    paths = _candidates(runtime_dir)
    living = [path for path in paths if _connects(path) == 0]
    inside = str(Path(runtime_dir))
    dead = [path for path in paths if path not in set(living) and os.path.dirname(path) == inside]
    return sorted(living[:MANAGERS_MAX] + dead[: max(0, MANAGERS_MAX - len(living))])


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
    inside = os.path.realpath(os.path.dirname(socket_path)) == os.path.realpath(runtime_dir)
    if inside and socket_path.endswith(SOCKET_SUFFIX):
        yield
        return
    name = hashlib.sha256(os.fsencode(socket_path)).hexdigest()[:16]
    record = os.path.join(runtime_dir, name + RECORD_SUFFIX)
    try:
        make_runtime_dir(runtime_dir)
        _sweep(runtime_dir)
        replace_private(record, os.fsencode(socket_path))
    except (OSError, SettingsError) as error:
        log.warning("commands must be told --manager %s: %s", socket_path, error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(record)


def _records(runtime_dir: str) -> Iterator[str]:
    return iter(sorted(map(str, Path(runtime_dir).glob("*" + RECORD_SUFFIX))))


def _socket_of(record: str) -> str:
    """The path in a record; empty for one that is not ours or holds no path."""
    try:
        content = read_private(record)
    except OSError:
        return ""
    if not content.startswith(b"/") or b"\0" in content or len(content) > _PATH_BYTES_MAX:
        return ""
    return os.fsdecode(content)


def _sweep(runtime_dir: str) -> None:
    """Remove the records of managers that were killed: their sockets are there, and refuse."""
    for record in islice(_records(runtime_dir), _RECORDS_SWEPT_MAX):
        path = _socket_of(record)
        # A path that is not there at all may be one of another container.
        if path and _connects(path) == errno.ECONNREFUSED:
            with contextlib.suppress(OSError):
                os.unlink(record)


def _connects(path: str) -> int:
    """0 where somebody listens, else the error's number. A connection that is closed at once costs them nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return 0  # its queue is full: it is there, and slow
        except OSError as error:
            return error.errno or errno.EIO
        return 0
