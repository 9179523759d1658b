"""The web page and the admin API of a manager: a child process that listens where the settings say."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvbm.client.admin_http import PORTS_MAX, UNIX, admin_token, listening, token_path, url_of
from kvbm.client.finder import RUN_MODULE
from kvbm.clock import Clock, monotonic
from kvbm.errors import SettingsError
from kvbm.settings import Settings

log = logging.getLogger("kvbm.manager")

PROGRAM = "kvbm.cli.web.process"
STARTS_MAX, STARTS_S = 4, 600.0
"""So many ends of the child within so many seconds, and it is not started again."""
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


class _Page:
    """The process that answers at the listener. A thread waits for its end, and starts it again, a few times.

    The thread touches nothing of the manager's; the manager's loop does not wait for it.
    """

    def __init__(self, settings: Settings, socket_path: str, listener: socket.socket, clock: Clock) -> None:
        self._listener = listener
        self._words = [str(listener.fileno()), socket_path, msgspec.json.encode(settings).decode()]
        self._clock = clock
        self._lock = threading.Lock()
        self._ending = False
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, name="kvbm-page", daemon=True)

    def start(self) -> None:
        """Begin to answer. Raises OSError where no process is to be had."""
        self._spawn()
        self._watcher.start()

    def end(self) -> None:
        """The child ends with its input, or is killed. Nothing is started any more."""
        with self._lock:
            self._ending, child = True, self._child
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if self._watcher.is_alive():
            self._watcher.join(END_S)

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """A new child; None at the end."""
        with self._lock:
            if self._ending:
                return None
            self._child = subprocess.Popen(
                [sys.executable, "-c", RUN_MODULE, PROGRAM, *self._words],
                pass_fds=[self._listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            return self._child

    def _watch(self) -> None:
        ends_s: deque[float] = deque(maxlen=STARTS_MAX)
        child = self._child
        while child is not None:
            how = _ended(child.wait())
            ends_s.append(self._clock())
            assert child.stdin is not None
            child.stdin.close()
            if self._ending:
                return
            if len(ends_s) == STARTS_MAX and ends_s[-1] - ends_s[0] < STARTS_S:
                self._give_up(
                    f"it ended {STARTS_MAX} times within {STARTS_S / 60:g} min, the last time {how}"
                )
                return
            log.warning("the process of the admin page ended, %s; it is started again", how)
            try:
                child = self._spawn()
            except OSError as error:
                self._give_up(f"its process ended {how}, and there is no other to be had: {error.strerror}")
                return

    def _give_up(self, why: str) -> None:
        """Whoever connects from now on is refused, and whoever waits in the queue is hung up on."""
        log.error("the admin page is off until the manager starts again: %s", why)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _ended(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"with status {status}"


def _start(settings: Settings, socket_path: str, listener: socket.socket, ends: contextlib.ExitStack) -> None:
    page = _Page(settings, socket_path, listener, monotonic)
    ends.callback(page.end)
    page.start()
    url, file = url_of(listener), token_path(settings.admin_token_file, settings.runtime_dir)
    log.info("admin page at %s%s", url, "" if url.startswith(UNIX) else f"; its token is in {file}")
