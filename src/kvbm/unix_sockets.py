"""Unix sockets at paths that users name: of what lies there, only a socket that no process listens at is removed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from kvbm.errors import SettingsError
from kvbm.runtime_dir import check_own_dir, make_own_dir

_ACCEPTED = "a path where there is nothing, or a socket that no process listens at"


@contextlib.contextmanager
def listening_at(path: str, field: str, mode: int, backlog: int) -> Iterator[socket.socket]:
    """A socket that listens at `path`, in a directory that only this user can write to; removed at the end.

    Raises SettingsError, which names `field`, as `clear_socket_path` does, and where a socket cannot be made.
    """
    make_own_dir(os.path.dirname(os.path.abspath(path)), field)
    clear_socket_path(path, field)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
        except OSError as error:
            raise SettingsError(field, path, f"a socket path under 108 bytes ({error})") from None
        try:
            # No client can connect before `listen`.
            os.chmod(path, mode)
            listener.listen(backlog)
            yield listener
        finally:
            with contextlib.suppress(OSError):  # removed already
                if _is_socket(path):
                    os.unlink(path)


def clear_socket_path(path: str, field: str) -> None:
    """Remove the socket of a process that ended without removing it.

    Raises SettingsError, which names `field`, for any other file, and for a socket that a process listens at.
    """
    refuse_other_file(path, field)
    code = connect_error(path)
    if code == errno.ECONNREFUSED:
        with contextlib.suppress(FileNotFoundError):  # removed already
            os.unlink(path)
    elif code != errno.ENOENT:
        raise SettingsError(field, path, f"{_ACCEPTED}; {os.strerror(code or errno.EADDRINUSE)}")


def refuse_socket_path(path: str, field: str) -> None:
    """Raise SettingsError, which names `field`, where no socket can be made, whatever runs."""
    refuse_other_file(path, field)
    check_own_dir(os.path.dirname(os.path.abspath(path)), field)


def refuse_other_file(path: str, field: str) -> None:
    """Raise SettingsError, which names `field`, where there is a file, a directory or a link instead of a socket."""
    try:
        if _is_socket(path):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise SettingsError(field, path, f"{_ACCEPTED} ({error.strerror})") from None
    raise SettingsError(field, path, f"{_ACCEPTED}; this is a {_describe(os.lstat(path).st_mode)}")


def connect_error(path: str) -> int:
    """0 where a process listens, else the error's number. The connection is closed at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return 0  # its queue is full: it is there, and slow
        except OSError as error:
            return error.errno or errno.EIO
        return 0


def _is_socket(path: str) -> bool:
    return stat.S_ISSOCK(os.lstat(path).st_mode)


def _describe(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "file"
