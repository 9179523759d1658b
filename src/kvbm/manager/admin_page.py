"""The web page and the admin API of a manager: a child process that listens where the settings say."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvbm.client.admin_http import PORTS_MAX, UNIX, admin_token, listening, token_path, url_of
from kvbm.client.finder import RUN_MODULE
from kvbm.errors import SettingsError
from kvbm.settings import Settings

log = logging.getLogger("kvbm.manager")

PROGRAM = "kvbm.cli.web.process"
END_S = 5.0
"""A child that has not ended by then is killed."""


@contextlib.contextmanager
def admin_page(settings: Settings, socket_path: str, private: bool) -> Iterator[Callable[[], None]]:
    """Take the address of the page, if one is set; what is yielded starts to answer there, until the end.

    Raises SettingsError. A private manager tries the next ports, and does without rather than not to start.
    """
    with contextlib.ExitStack() as ends:
        try:
            listener = _opened(settings, private, ends)
        except SettingsError as error:
            if not private:
                raise
            log.warning("no admin page: %s", error)
            listener = None
        yield partial(_start, settings, socket_path, listener, ends) if listener else lambda: None


def _opened(settings: Settings, private: bool, ends: contextlib.ExitStack) -> socket.socket | None:
    """The socket of the page, or None without one. Raises SettingsError."""
    if settings.admin_token_file:  # one that cannot be used is told, also while there is no page
        admin_token(settings.admin_token_file, settings.runtime_dir)
    if settings.admin_http is None:
        return None
    listener = ends.enter_context(listening(settings.admin_http, PORTS_MAX if private else 1))
    if not url_of(listener).startswith(UNIX):
        admin_token(settings.admin_token_file, settings.runtime_dir)
    return listener


def _start(settings: Settings, socket_path: str, listener: socket.socket, ends: contextlib.ExitStack) -> None:
    words = [str(listener.fileno()), socket_path, msgspec.json.encode(settings).decode()]
    child = subprocess.Popen(
        [sys.executable, "-c", RUN_MODULE, PROGRAM, *words],
        pass_fds=[listener.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    ends.callback(_end, child)
    url, file = url_of(listener), token_path(settings.admin_token_file, settings.runtime_dir)
    log.info("admin page at %s%s", url, "" if url.startswith(UNIX) else f"; its token is in {file}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child ends with its input."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
