"""Lets clients in at the manager's socket: who is served, and how many at once."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from itertools import count

from kvbm.manager.session import Session
from kvbm.peers import is_trusted
from kvbm.protocol import Refused
from kvbm.settings import variable

log = logging.getLogger("kvbm.manager")

SESSIONS_MAX = 1024


class Door:
    """The listening socket. Whoever is let in has a session in `sessions`, by number, and is selected for reading.

    Besides our own user and root, `peer_uids` are served. Owned by the manager's thread.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        sessions: dict[int, Session],
        peer_uids: frozenset[int],
        retry_s: float,
    ) -> None:
        """`open_again` is called every `retry_s` seconds, as the log says."""
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selector
        self._sessions = sessions
        self._peer_uids = peer_uids
        self._retry_s = retry_s
        self._numbers = count(1)
        self._failed = False
        self._open = False
        self.open_again()

    def open_again(self) -> None:
        """Let clients in, also after descriptors had run out."""
        if not self._open:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._open = True

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        self._failed = False
        session = Session(connection, next(self._numbers))
        if refusal := self._refusal(session):
            session.send(Refused(reason=refusal))
            session.close()
            return
        self._sessions[session.number] = session
        self._selector.register(connection, selectors.EVENT_READ, session)

    def _refusal(self, session: Session) -> str:
        """Why this client is not served; empty for one that is."""
        if not is_trusted(session.peer_uid(), self._peer_uids):
            return (
                f"user {session.peer_uid()} cannot be served: this manager is user {os.geteuid()}'s "
                f"({variable('peer_uids')} lists others, for a socket that was named)"
            )
        if len(self._sessions) >= SESSIONS_MAX:
            return f"{len(self._sessions)} sessions are open: accepted are {SESSIONS_MAX}"
        return ""

    def _pause(self, error: OSError) -> None:
        """Descriptors or memory ran out. Waiting clients keep the listener readable: stop selecting it for a while."""
        self._selector.unregister(self._listener)
        self._open = False
        if not self._failed:
            log.warning(
                "sessions cannot be accepted: %s; %d are open, tried again every %g s",
                error.strerror,
                len(self._sessions),
                self._retry_s,
            )
        self._failed = True
