"""A manager's part in a fleet: it reads blocks out of other nodes' host memory, and lends its own."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.fleet.directory import Directory, Peer, split_address
from kvbm.fleet.etcd import open_etcd_directory, refuse_endpoints
from kvbm.fleet.named import certificates, fleet_name, node_name
from kvbm.fleet.static import StaticDirectory
from kvbm.fleet.tls import lending_context, reading_context
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.lending import Lending
from kvbm.manager.peer_server import PeerServer
from kvbm.manager.space import Space
from kvbm.settings import Settings, variable
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.tier import PeerTier, open_peer_tier
from kvbm.tiers.peers.transport import open_mover

log = logging.getLogger("kvbm.manager")

READS_MAX = 8
"""What is submitted has a deadline, and so shall not wait for others in the tier; it waits in the queue before it."""
_ANYWHERE = ("0.0.0.0", "::")


class FleetParts:
    """The node, its certificates and the directory that the settings of a fleet name, checked; nothing is opened.

    Raises SettingsError. No other node need be there.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.fleet
        fleet_name(settings)
        self.node = node_name(settings)
        self.files = certificates(settings)
        self.reading: ssl.SSLContext | None = reading_context(self.files) if self.files else None
        self.lending: ssl.SSLContext | None = lending_context(self.files) if self.files else None
        if bool(settings.fleet_peers) == bool(settings.fleet_etcd):
            accepted = f"one of {variable('fleet_peers')} and {variable('fleet_etcd')} beside it"
            raise SettingsError(variable("fleet"), settings.fleet, accepted)
        self.peers: StaticDirectory | None = None
        self.endpoints: list[str] = []
        if settings.fleet_peers:
            self.peers = StaticDirectory(settings.fleet_peers, variable("fleet_peers"))
        else:
            self.endpoints = [part.strip() for part in (settings.fleet_etcd or "").split(",") if part.strip()]
            refuse_endpoints(self.endpoints)
        self.entry = _entry(settings, self.node) if self.peers is None else None


def _entry(settings: Settings, node: str) -> Peer | None:
    """This node's entry in a directory; None where it lends nothing. Raises SettingsError."""
    address = settings.fleet_address or settings.fleet_listen
    if not settings.fleet_listen or address is None:
        return None
    field = variable("fleet_address" if settings.fleet_address else "fleet_listen")
    host, _ = split_address(field, address)
    if host in _ANYWHERE:
        accepted = f"an address that others can reach, or {variable('fleet_address')} beside it"
        raise SettingsError(field, address, accepted)
    return Peer(address, node)


class FleetSide:
    """Owned by the manager's thread. `close` comes before the spaces are closed."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Raises SettingsError as `FleetParts` does."""
        self._settings, self._clock = settings, clock
        parts = FleetParts(settings)
        self.node, self._reading, self._lending_tls = parts.node, parts.reading, parts.lending
        self.directory: Directory = parts.peers or open_etcd_directory(
            parts.endpoints, settings.fleet or "", parts.entry, clock
        )
        self.mover = open_mover(
            settings.fleet_transport, parts.files is not None, variable("fleet_transport")
        )
        self.lending: Lending | None = None
        self.server: PeerServer | None = None

    def reads(self, namespace: Namespace, layout: BlockLayout) -> PeerTier:
        """The tier of this namespace's blocks in other nodes' memory."""
        settings = self._settings
        assert settings.fleet
        options = PeerOptions(
            fleet=settings.fleet,
            node=self.node,
            deadline_s=settings.remote_deadline_ms / 1000,
            pending_limit=READS_MAX,
        )
        return open_peer_tier(
            self.directory, layout, namespace, options, self._clock, self._reading, mover=self.mover
        )

    def lend(self, spaces: Iterable[tuple[Namespace, Space]], private: bool) -> Lending | None:
        """Let other nodes read these spaces' blocks, where the settings say so.

        Raises SettingsError where the address cannot be had. A private manager does without: engines beside one another
        mostly name the same one.
        """
        settings = self._settings
        if not settings.fleet_listen or not settings.fleet:
            log.warning("this manager lends nothing: %s is not set", variable("fleet_listen"))
            return None
        lending = Lending(spaces, self._clock)
        try:
            self.server = PeerServer(
                settings.fleet_listen,
                self._lending_tls,
                settings.fleet,
                self.node,
                lending,
                settings.fleet_plain,
                clock=self._clock,
                field=variable("fleet_listen"),
                mover=self.mover,
            )
        except SettingsError as error:
            lending.close()
            if not private:
                raise
            log.warning("this manager lends nothing: %s", error)
            return None
        self.lending = lending
        return lending

    def stop_lending(self) -> None:
        """Every reader is sent away."""
        if self.server is not None:
            self.server.close()
        if self.lending is not None:
            self.lending.close()
        self.server = self.lending = None

    def close(self) -> None:
        """Leave the fleet."""
        self.stop_lending()
        self.directory.close()
        if self.mover is not None:
            self.mover.close()
