"""Addresses where other nodes connect: without certificates, only those that this node's own networks reach."""

from __future__ import annotations

import errno
import socket
from typing import Any

from kvbm.errors import SettingsError
from kvbm.fleet.directory import is_private, split_address
from kvbm.settings import variable

BACKLOG = 64


def listening(field: str, listen: str, anywhere: bool, harm: str) -> socket.socket:
    """A socket that listens there and never blocks.

    Unless `anywhere`, the address is a loopback or private one; `harm` says what any client could do. Raises
    SettingsError, which names `field`, where that may not or cannot be.
    """
    family, address = _resolve(field, listen, anywhere, harm)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SettingsError(field, listen, f"an address of this machine with a free port ({error})") from None
    return listener


def refuse_listen_address(field: str, listen: str, anywhere: bool, harm: str) -> None:
    """Raise SettingsError as `listening` does, but not for a port that is in use now."""
    family, address = _resolve(field, listen, anywhere, harm)
    if error := bind_error(family, address):
        raise SettingsError(field, listen, f"an address of this machine ({error})")


def bind_error(family: int, address: Any) -> str:
    """Why an address cannot be bound; empty where it can, and for a port that is in use.

    The port is not taken from a process that binds it at the same time with SO_REUSEADDR.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        except OSError as error:
            return "" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return ""


def _resolve(field: str, listen: str, anywhere: bool, harm: str) -> tuple[int, Any]:
    host, port = split_address(field, listen)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(field, listen, f"an address of this machine ({error})") from None
    family, _, _, _, address = found[0]
    if not anywhere and not is_private(str(address[0])):
        raise SettingsError(
            field,
            listen,
            f"without TLS a loopback or private address, because any client that can connect can {harm}; "
            f"give it certificates ({variable('fleet_certs')}), or allow plain connections from anywhere "
            f"({variable('fleet_plain')}=1)",
        )
    return family, address
