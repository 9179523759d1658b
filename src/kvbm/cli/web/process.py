"""The page and the admin API as a process: the command's own, or the child of a manager.

It is a client of the manager, and no thread of it, so that nothing that a browser asks for takes the time of the
manager's loop.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading

import msgspec

from kvbm.cli.managers import settings_for
from kvbm.cli.web.access import Token
from kvbm.cli.web.listener import Listener
from kvbm.cli.web.operations import ManagerGate
from kvbm.cli.web.site import Site
from kvbm.client.admin import Admin, choose_manager
from kvbm.client.admin_http import (
    DEFAULT_ADDRESS,
    PORTS_MAX,
    UNIX,
    admin_token,
    listening,
    token_path,
    url_of,
)
from kvbm.clock import monotonic
from kvbm.errors import KvbmError
from kvbm.observe.log import configure
from kvbm.settings import Settings
from kvbm.settings.parse import parse_listen_address

log = logging.getLogger("kvbm.web")


def make_listener(settings: Settings, listener: socket.socket) -> Listener:
    """The server behind a socket that listens already. Raises SettingsError for a token that cannot be had."""
    secret = "" if listener.family == socket.AF_UNIX else _token(settings)
    file = token_path(settings.runtime_dir)
    site = Site(ManagerGate(settings, monotonic), Token(secret), file, monotonic)
    return Listener(listener, site.answer)


def serve_alone(manager: str, listen: str) -> None:
    """Serve until SIGINT or SIGTERM, and print the address first. Raises SettingsError, ManagerUnavailable."""
    address = parse_listen_address("--listen", listen) if listen else DEFAULT_ADDRESS
    settings = settings_for(manager)
    # Chosen once: the page of one manager never becomes that of another one.
    settings = _of_manager(settings, choose_manager(settings))
    Admin(choose_manager(settings), settings).close()  # it is there
    configure(settings.log_level)
    with listening(address, 1 if listen else PORTS_MAX) as listener:
        server = make_listener(settings, listener)
        url = url_of(listener)
        # What follows `#` is for the page's script alone: a browser does not send it.
        entry = url if url.startswith(UNIX) else f"{url}#token={_token(settings)}"
        # Whoever ends us must not wait for a browser; `stop` is for another thread than that of `run`.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: threading.Thread(target=server.stop, daemon=True).start())
        print(entry, flush=True)
        server.run()


def main(listener_fd: int, socket_path: str, settings_json: str) -> int:
    """Entry point of a manager's child: `python -m kvbm.cli.web.process FD SOCKET SETTINGS`.

    It serves at the descriptor until its standard input ends: that is when the manager ends, however it does.
    """
    settings = _of_manager(msgspec.json.decode(settings_json, type=Settings), socket_path)
    configure(settings.log_level)
    with socket.socket(fileno=listener_fd) as listener:
        try:
            server = make_listener(settings, listener)
        except KvbmError as error:
            log.error("no admin page: %s", error)  # noqa: TRY400 - one line, not a traceback
            return 2
        threading.Thread(target=_stop_at_end_of_input, args=(server,), daemon=True).start()
        server.run()
    return 0


def _of_manager(settings: Settings, path: str) -> Settings:
    """The settings with this manager alone. Other users are trusted only at a socket that the operator named."""
    return msgspec.structs.replace(settings, manager=path, peer_uids=settings.trusted_peer_uids)


def _token(settings: Settings) -> str:
    return admin_token(settings.runtime_dir)


def _stop_at_end_of_input(server: Listener) -> None:
    sys.stdin.buffer.read()
    server.stop()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
