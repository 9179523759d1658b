"""Who is in the fleet: the contract of a directory of nodes.

A directory is hearsay. A node that it names may be gone, and one that it does not name may be there; whoever connects
finds out. `peers` answers from memory: what has to be asked for, a directory's own thread asks for.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple, Protocol

from kvbm.errors import SettingsError

NAME_LENGTH_MAX = 64
_NAME_MARKS = frozenset("-_.")


class Peer(NamedTuple):
    """A node's address, `host:port`, and its id; the id is empty where only its own answer will tell."""

    address: str
    node: str = ""


class Directory(Protocol):
    """The nodes of one fleet. The module's text has its contract. All methods may be called by any thread."""

    place: str
    """What it is, for people, without credentials."""

    def peers(self) -> tuple[Peer, ...]:
        """The nodes last heard of, ourselves perhaps among them; from memory. At most `PEERS_MAX`."""

    @property
    def fault(self) -> str:
        """Empty while the directory can be reached; otherwise one line. What was heard of before is kept."""

    def close(self) -> None:
        """Take our own entry away, and end; waits for a second or two at most."""


PEERS_MAX = 256
"""A directory names no more than so many nodes."""


def split_address(field: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port`, of `[host]:port` for IPv6. Raises SettingsError, which names `field`."""
    host, colon, port = address.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise SettingsError(field, address, "host:port, e.g. 10.0.0.7:7400, or [fd00::7]:7400")
    return host, int(port)


def refuse_name(field: str, name: str) -> None:
    """Raise SettingsError unless this can be the name of a fleet or a node."""
    plain = name.isascii() and all(letter.isalnum() or letter in _NAME_MARKS for letter in name)
    if not (plain and 0 < len(name) <= NAME_LENGTH_MAX and name[0] not in _NAME_MARKS):
        accepted = (
            f"1 to {NAME_LENGTH_MAX} of a-z, A-Z, 0-9, '-', '_' and '.', beginning with a letter or a digit"
        )
        raise SettingsError(field, name, accepted)


def is_private(host: str) -> bool:
    """Whether an IP address can be reached from this machine, or from networks of one owner, only."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    # "Any address" counts as private to Python, and listens to the world.
    return not address.is_unspecified and (address.is_loopback or address.is_private or address.is_link_local)
