"""Find a manager on another node, over TCP: for a leader, whose engine has ranks there.

The engine's thread never waits for the network: a thread of its own connects, and carries the session's bytes from then
on (`fleet.pump`). What the leader has is a local socket.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading

from kvbm.client.channel import Channel
from kvbm.client.finder import RETRY_S_MAX, RETRY_S_MIN, Finder, ManagerAddress, ManagerFinder
from kvbm.clock import Clock
from kvbm.errors import KvbmError
from kvbm.fleet.directory import is_private, split_address
from kvbm.fleet.named import certificates, fleet_name
from kvbm.fleet.pump import Pump, keep_watch
from kvbm.fleet.tls import certified, reading_context
from kvbm.settings import Settings, variable

log = logging.getLogger("kvbm.client.finder")

SCHEME = "tcp://"
CONNECT_S = 5.0


def find_nodes(settings: Settings, clock: Clock) -> list[Finder]:
    """The ways to the managers of the engine's other nodes, as the settings name them. Raises SettingsError."""
    found: list[Finder] = []
    if not settings.node_managers:
        return found
    files = certificates(settings)
    tls = reading_context(files) if files is not None else None
    for each in map(str.strip, settings.node_managers.split(",")):
        if each.startswith(SCHEME):
            field, fleet = variable("node_managers"), fleet_name(settings)
            found.append(FarFinder(field, each, clock, tls, fleet, settings.fleet_plain))
        elif each:
            found.append(ManagerFinder(ManagerAddress(socket_path=each, private=False), settings, {}, clock))
    return found


class FarFinder:
    """Connects to the manager at `tcp://host:port`. Not shared between threads.

    `attempt` never waits; it keeps its own back-off, which `welcomed` ends. With `tls` both ends show a certificate of
    the `fleet`; without, the address must be a private one, unless `plain`. Raises SettingsError for the address.
    """

    def __init__(
        self,
        field: str,
        address: str,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        fleet: str = "",
        plain: bool = False,
    ) -> None:
        assert address.startswith(SCHEME)
        self.place = address
        self._address = split_address(field, address.removeprefix(SCHEME))
        self._clock = clock
        self._tls, self._fleet, self._plain = tls, fleet, plain
        self._next_try_s = -1.0
        self._backoff_s = RETRY_S_MIN
        self._trouble = ""
        # The thread that connects leaves one of these; it is the only one that does, until it has ended.
        self._made: Channel | None = None
        self._failed = ""
        self._dialling: threading.Thread | None = None

    def attempt(self) -> Channel | None:
        """A fresh connection, or None when there is none yet (or it is too early to try again)."""
        channel, self._made = self._made, None
        if channel is not None:
            self._dialling = None  # from here on that thread only carries bytes
            return channel
        if self._dialling is not None:
            if self._dialling.is_alive() or self._made is not None:
                return None
            self._dialling = None
            self._warn(self._failed)
        now_s = self._clock()
        if now_s < self._next_try_s:
            return None
        self._next_try_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 1.5, RETRY_S_MAX)
        self._dialling = threading.Thread(target=self._dial, name="kvbm-far-manager", daemon=True)
        self._dialling.start()
        return None

    def welcomed(self) -> None:
        """The manager accepted the session: when it goes, the first attempt may be at once again."""
        self._backoff_s, self._next_try_s, self._trouble = RETRY_S_MIN, -1.0, ""

    def _warn(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            self._trouble = trouble
            log.warning("no KV cache for now: %s", trouble)

    def _dial(self) -> None:
        try:
            far = self._connected()
        except (OSError, ssl.SSLError, KvbmError) as error:
            self._failed = f"no manager at {self.place}: {' '.join(str(error).split())}"
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pump = Pump(theirs, far)
        self._made = Channel(ours)
        pump.run()

    def _connected(self) -> socket.socket:
        """Raises OSError, SSLError and KvbmError."""
        far = socket.create_connection(self._address, CONNECT_S)
        try:
            keep_watch(far)
            if self._tls is not None:
                far = self._tls.wrap_socket(far)
                certified(far, self._fleet)
            elif not self._plain and not is_private(far.getpeername()[0]):
                raise KvbmError("without certificates a loopback or private address is accepted")
        except BaseException:
            far.close()
            raise
        return far
