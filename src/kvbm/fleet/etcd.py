"""A directory in etcd: each node keeps an entry there for as long as its lease lives, and reads the others'.

One thread asks etcd, over its JSON gateway (`etcd3gw`, lazily, from the extra `openkvbm[fleet]`): it renews the lease
and reads all entries every `EVERY_S`. While etcd is away the nodes last heard of are kept. When it is back, others need
a moment to register again, so a node that is missing then is kept for the length of a lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.fleet.directory import NAME_LENGTH_MAX, PEERS_MAX, Peer, refuse_name, split_address
from kvbm.settings import variable, without_credentials
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.fleet")

EVERY_S = 2.0
LEASE_S = 10
REQUEST_S = 2.0
END_S = 0.1
"""A request under way is not waited for."""
NOT_REACHED_YET = "not reached yet"
_ROOT = "kvbm/fleets"
_ADDRESS_LENGTH_MAX = 300


class Lease(Protocol):
    """A lease that was granted."""

    def refresh(self) -> int:
        """Keep it alive; the seconds it has, or -1 when it has ended."""

    def revoke(self) -> object:
        """End it now, and the entries with it."""


class Client(Protocol):
    """The part of `etcd3gw.Etcd3Client` that is used. Every call raises an exception of its own kind, or OSError."""

    def lease(self, ttl: int) -> Lease:
        """A new lease of so many seconds."""

    def put(self, key: str, value: str, lease: Lease) -> object:
        """An entry that goes with the lease."""

    def entries(self, prefix: str, limit: int) -> list[bytes]:
        """The values of all keys that begin so, at most so many."""


class _Entry(msgspec.Struct, frozen=True):
    address: str
    node: str


_decoder = msgspec.json.Decoder(_Entry)


class EtcdDirectory:
    """See the module. `me` is our own entry, None for one who only looks. `connect(endpoint)` makes a client."""

    def __init__(
        self,
        endpoints: Sequence[str],
        fleet: str,
        me: Peer | None,
        connect: Callable[[str], Client],
        clock: Clock,
        every_s: float = EVERY_S,
        lease_s: int = LEASE_S,
    ) -> None:
        refuse_name("fleet", fleet)
        self.place = f"etcd at {', '.join(without_credentials(endpoint) for endpoint in endpoints)}"
        self._endpoints, self._connect, self._clock = list(endpoints), connect, clock
        self._prefix, self._me = f"{_ROOT}/{fleet}/nodes/", me
        self._every_s, self._lease_s = every_s, lease_s
        self._client: Client | None = None
        self._lease: Lease | None = None
        self._fault = NOT_REACHED_YET
        self._warned = False
        self._heard: dict[str, Peer] = {}
        self._keep_missing_until_s = 0.0
        self._peers: tuple[Peer, ...] = ()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbm-etcd", daemon=True)
        self._thread.start()

    def peers(self) -> tuple[Peer, ...]:
        return self._peers

    @property
    def fault(self) -> str:
        return self._fault

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(END_S)

    # ---- its thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(self._every_s)
        if self._lease is not None:
            try:
                self._lease.revoke()
            except Exception as error:  # the lease ends by itself
                if not _is_of_etcd(error):
                    record_swallowed(error)
                log.debug("etcd: %s", error)

    def look(self) -> None:
        """One round: our entry is there, and the others' are read. What fails is tried again at the next endpoint."""
        try:
            if self._client is None:
                self._client = self._connect(self._endpoints[0])
            self._register(self._client)
            self._take(self._client.entries(self._prefix, PEERS_MAX))
        except Exception as error:  # its client raises errors of several kinds
            if not _is_of_etcd(error):
                record_swallowed(error)
            self._client = None
            self._endpoints.append(self._endpoints.pop(0))
            level = logging.DEBUG if self._warned else logging.WARNING
            log.log(level, "etcd cannot be reached; the %d nodes known stay: %s", len(self._heard), error)
            self._warned = True
            self._fault = f"etcd cannot be reached: {' '.join(str(error).split())[:300]}"
            self._keep_missing_until_s = self._clock() + self._lease_s
            return
        if self._fault:
            log.info("etcd answers: %d nodes", len(self._peers))
            self._keep_missing_until_s = self._clock() + self._lease_s
            self._fault, self._warned = "", False

    def _register(self, client: Client) -> None:
        if self._me is None:
            return
        if self._lease is not None and self._lease.refresh() <= 0:
            self._lease = None
        if self._lease is None:
            lease = client.lease(self._lease_s)
            value = msgspec.json.encode(_Entry(self._me.address, self._me.node)).decode()
            client.put(self._prefix + self._me.node, value, lease)
            self._lease = lease

    def _take(self, values: Sequence[bytes]) -> None:
        found = {peer.node: peer for value in values if (peer := _peer(value)) is not None}
        if self._fault or self._clock() < self._keep_missing_until_s:
            found = {**self._heard, **found}
        self._heard = dict(sorted(found.items())[:PEERS_MAX])
        self._peers = tuple(self._heard.values())


def _is_of_etcd(error: Exception) -> bool:
    """Whether the network, etcd or its client raised the error."""
    return isinstance(error, OSError) or type(error).__module__.startswith("etcd3gw")


def _peer(value: bytes) -> Peer | None:
    """An entry that somebody wrote; None where it is none."""
    try:
        entry = _decoder.decode(value)
        if len(entry.address) > _ADDRESS_LENGTH_MAX or len(entry.node) > NAME_LENGTH_MAX:
            return None
        refuse_name("node", entry.node)
        split_address("address", entry.address)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, SettingsError):
        return None
    return Peer(entry.address, entry.node)


def open_etcd_directory(endpoints: Sequence[str], fleet: str, me: Peer | None, clock: Clock) -> EtcdDirectory:
    """The fleet's nodes in etcd, at `http://host:port` or `https://host:port` each.

    With https its certificate is of a public authority, or of one that `REQUESTS_CA_BUNDLE` names; we show none, and no
    user. Raises SettingsError as `refuse_endpoints` does. etcd need not be up.
    """
    refuse_endpoints(endpoints)
    return EtcdDirectory(endpoints, fleet, me, _Gateway, clock)


def refuse_endpoints(endpoints: Sequence[str]) -> None:
    """Raise SettingsError for endpoints that are none, and where the package is missing."""
    field = variable("fleet_etcd")
    for endpoint in endpoints:
        parts = urlsplit(endpoint)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
        except ValueError:
            usable = False
        if not usable or parts.username is not None:
            raise SettingsError(
                field, without_credentials(endpoint), "http://host:port or https://host:port, without a user"
            )
    if not endpoints:
        raise SettingsError(field, "", "at least one endpoint, http://host:port")
    try:
        import etcd3gw  # noqa: F401
    except ImportError:
        raise SettingsError(
            field, endpoints[0], "etcd needs a package: pip install 'openkvbm[fleet]'"
        ) from None


class _Gateway:
    """`etcd3gw` as a `Client`: every request has a deadline."""

    def __init__(self, endpoint: str) -> None:
        import etcd3gw

        parts = urlsplit(endpoint)
        self._client = etcd3gw.Etcd3Client(
            host=parts.hostname or "",
            port=parts.port or 0,
            protocol=parts.scheme,
            timeout=REQUEST_S,
        )

    def lease(self, ttl: int) -> Lease:
        lease: Lease = self._client.lease(ttl)
        return lease

    def put(self, key: str, value: str, lease: Lease) -> object:
        return self._client.put(key, value, lease)

    def entries(self, prefix: str, limit: int) -> list[bytes]:
        # From the prefix to before the first name that does not begin with it.
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        values: list[bytes] = self._client.get(prefix, range_end=end, limit=limit)
        return values
