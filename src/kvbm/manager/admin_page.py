"""The web page and the admin API of a manager: a child process that listens where the settings say."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

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
    if settings.admin_http is None:
        yield lambda: None
        return
    with contextlib.ExitStack() as ends:
        try:
            listener = ends.enter_context(listening(settings.admin_http, PORTS_MAX if private else 1))
            url = url_of(listener)
            if not url.startswith(UNIX):
                admin_token(settings.admin_token_file, settings.runtime_dir)
        except SettingsError as error:
            if not private:
                raise
            log.warning("no admin page: %s", error)
            yield lambda: None
            return

        def start() -> None:
            words = [str(listener.fileno()), socket_path, msgspec.json.encode(settings).decode()]
            child = subprocess.Popen(
                [sys.executable, "-c", RUN_MODULE, PROGRAM, *words],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            ends.callback(_end, child)
            file = token_path(settings.admin_token_file, settings.runtime_dir)
            log.info("admin page at %s%s", url, "" if url.startswith(UNIX) else f"; its token is in {file}")

        yield start


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child ends with its input."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
