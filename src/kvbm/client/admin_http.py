"""Where the web page and the admin API listen, and the token that whoever asks there must know."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator
from fcntl import LOCK_EX, flock

from kvbm.errors import SettingsError
from kvbm.runtime_dir import make_runtime_dir, open_lock, read_private, replace_private
from kvbm.settings import variable
from kvbm.unix_sockets import listening_at, refuse_socket_path

DEFAULT_ADDRESS = "127.0.0.1:6881"
FIELD, TOKEN_FIELD = variable("admin_http"), "admin token"
TOKEN_NAME = "admin.token"
UNIX = "unix:"
PORTS_MAX = 16
"""Ports that are tried where any free one will do."""
_BACKLOG = 64
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,256}")
_PORT_END = 1 << 16


@contextlib.contextmanager
def listening(address: str, tries: int = 1) -> Iterator[socket.socket]:
    """A socket that listens at an address of the setting, or, with `tries`, at one of the ports after it.

    That of `unix:PATH` is removed at the end. Raises SettingsError where it cannot listen.
    """
    if address.startswith(UNIX):
        with listening_at(address.removeprefix(UNIX), FIELD, 0o600, _BACKLOG) as listener:
            yield listener
        return
    host, _, first = address.rpartition(":")
    ports = range(int(first), min(int(first) + tries, _PORT_END))
    for port in ports:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        name = {"localhost": "127.0.0.1"}.get(host, host.strip("[]"))
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((name, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and port + 1 in ports:
                continue
            raise SettingsError(
                FIELD, address, f"an address at which nobody listens yet ({error.strerror})"
            ) from None
        with listener:
            yield listener
        return


def refuse_address(address: str, runtime_dir: str) -> None:
    """Raise SettingsError where `listening` cannot listen, but not for a port in use, or the token is unusable."""
    if address.startswith(UNIX):
        refuse_socket_path(address.removeprefix(UNIX), FIELD)
        return
    if os.path.lexists(token_path(runtime_dir)):
        _read_token(token_path(runtime_dir))


def url_of(listener: socket.socket) -> str:
    """What to open in a browser; of a Unix socket, its address in the form of the setting."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{name}"
    return (
        f"http://[{name[0]}]:{name[1]}/"
        if listener.family == socket.AF_INET6
        else f"http://{name[0]}:{name[1]}/"
    )


def token_path(runtime_dir: str) -> str:
    """The file of the token."""
    return os.path.join(runtime_dir, TOKEN_NAME)


def admin_token(runtime_dir: str) -> str:
    """The token. It is made when it is first asked for, and kept in its file, 0600, so that it is the same for all
    managers and after a restart. One that an operator wrote there is used.

    Raises SettingsError in one line.
    """
    path = token_path(runtime_dir)
    make_runtime_dir(runtime_dir)
    try:
        lock_fd = open_lock(path + ".lock")
    except OSError as error:
        raise SettingsError(TOKEN_FIELD, path, f"a file that can be written ({error.strerror})") from None
    try:
        flock(lock_fd, LOCK_EX)
        if not os.path.lexists(path):
            replace_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    except OSError as error:
        raise SettingsError(TOKEN_FIELD, path, f"a file that can be written ({error.strerror})") from None
    finally:
        os.close(lock_fd)
    return _read_token(path)


def _read_token(path: str) -> str:
    accepted = "a file of yours that nobody else can read (chmod 600), with a token: 16 to 256 letters, digits and ._~-"
    try:
        text = read_private(path, secret=True).decode("ascii", "replace").strip()
    except OSError as error:
        raise SettingsError(TOKEN_FIELD, path, f"{accepted} ({error.strerror})") from None
    if not _TOKEN.fullmatch(text):
        raise SettingsError(TOKEN_FIELD, path, accepted)
    return text
