"""The door for other nodes: a listening socket, and a thread for each reader that connects (`peer_connection`).

Without TLS anybody who can connect can read, so the door opens on loopback and private addresses only, unless it is
told so explicitly.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import Counter

from kvbm.clock import Clock, monotonic
from kvbm.fleet.directory import refuse_name
from kvbm.fleet.listening import listening
from kvbm.manager.lending import Lending
from kvbm.manager.peer_connection import House, PeerConnection
from kvbm.tiers.peers.mover import Mover

log = logging.getLogger("kvbm.manager")

READERS_MAX = 64
"""Readers that are let in: a connection for each node and namespace."""
TURNED_AWAY_MAX = 16
"""Connections beyond those that are told why they are not let in, at a time; others are closed."""
HARM = "read blocks"
"""What a client without a certificate could do."""
END_S = 0.4
"""The door and all connections have so long to end, together."""


class PeerServer:
    """Serves readers of the fleet from its own threads until `close`; `lend` is the loop's.

    `listen` is `host:port`; port 0 takes a free one, which `port` tells. Raises SettingsError.
    """

    def __init__(
        self,
        listen: str,
        tls: ssl.SSLContext | None,
        fleet: str,
        node: str,
        lend: Lending,
        allow_plain: bool = False,
        readers_max: int = READERS_MAX,
        clock: Clock = monotonic,
        field: str = "peer_listen",
        mover: Mover | None = None,
    ) -> None:
        refuse_name("fleet", fleet)
        refuse_name("node", node)
        self._house = House(tls, fleet, node, lend, clock, self._gone, mover)
        self._readers_max = readers_max
        self._listener = listening(field, listen, allow_plain or tls is not None, HARM)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: set[PeerConnection] = set()
        self._turned_away: set[PeerConnection] = set()
        self._full = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-door", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """`readers` that were let in, `refused` ones, and of blocks sent `blocks`, `broken` and `bytes`; `moved` are
        those of `blocks` that went by the mover."""
        return self._house.counts

    def describe(self) -> dict[str, object]:
        """For operators."""
        with self._lock:
            readers = [connection.describe() for connection in self._connections]
        return {"port": self.port, "tls": self._house.tls is not None, **self.counts, "readers": readers}

    def close(self) -> None:
        """Let nobody in any more and end all connections. The loop takes no part: `Lending.close` comes after it."""
        os.eventfd_write(self._event, 1)
        end_s = time.monotonic() + END_S
        self._thread.join(END_S)
        with self._lock:
            connections = [*self._connections, *self._turned_away]
        for connection in connections:
            connection.stop()
        for connection in connections:
            connection.join(max(0.0, end_s - time.monotonic()))
        self._listener.close()
        os.close(self._event)

    def _gone(self, connection: PeerConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._turned_away.discard(connection)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._event, select.POLLIN)
        while self._event not in dict(poller.poll()):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as error:  # no descriptor is free: the connection stays in the backlog
                log.warning("no reader can be let in: %s", error)
                _pause(self._event)
                continue
            self._let_in(accepted, address[0])

    def _let_in(self, accepted: socket.socket, host: str) -> None:
        bound = self._readers_max
        with self._lock:
            full = len(self._connections) >= bound
            refusal = (
                f"{bound} readers are let in here at most, one for each node and namespace" if full else ""
            )
            guests = self._turned_away if full else self._connections
            connection: PeerConnection | None = None
            if not full or len(guests) < TURNED_AWAY_MAX:
                connection = PeerConnection(self._house, accepted, host, refusal)
                guests.add(connection)
        if full and not self._full:
            log.warning("reader %s and those after it are refused: %s", host, refusal)
        self._full = full
        if connection is None:
            self._house.count("refused")
            accepted.close()
            return
        try:
            connection.start()
        except RuntimeError as error:  # no thread is to be had
            log.warning("no reader can be let in: %s", error)
            self._gone(connection)
            accepted.close()


def _pause(event: int, seconds: float = 0.5) -> None:
    """Wait a moment, or until the event."""
    poller = select.poll()
    poller.register(event, select.POLLIN)
    poller.poll(seconds * 1000)
