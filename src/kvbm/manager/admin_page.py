"""The web page and the admin API of a manager: a child process that listens where the settings say."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvbm.client.admin_http import PORTS_MAX, UNIX, admin_token, listening, token_path, url_of
from kvbm.client.kept_process import KeptProcess
from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.settings import Settings

log = logging.getLogger("kvbm.manager")

PROGRAM = "kvbm.cli.web.process"


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
    if settings.admin_http is None:
        return None
    listener = ends.enter_context(listening(settings.admin_http, PORTS_MAX if private else 1))
    if not url_of(listener).startswith(UNIX):
        admin_token(settings.runtime_dir)
    return listener


def _give_up(listener: socket.socket, why: str) -> None:
    """Whoever connects from now on is refused, and whoever waits in the queue is hung up on."""
    log.error("the admin page is off until the manager starts again: %s", why)
    with contextlib.suppress(OSError):  # it is shut down already
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _start(settings: Settings, socket_path: str, listener: socket.socket, ends: contextlib.ExitStack) -> None:
    words = [PROGRAM, str(listener.fileno()), socket_path, msgspec.json.encode(settings).decode()]
    page = KeptProcess(
        "the admin page", lambda _: words, partial(_give_up, listener), monotonic, log, [listener.fileno()]
    )
    ends.callback(page.end)
    page.start()
    url, file = url_of(listener), token_path(settings.runtime_dir)
    log.info("admin page at %s%s", url, "" if url.startswith(UNIX) else f"; its token is in {file}")
