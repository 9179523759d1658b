"""The first words between a reader and a lender, as the reader says and checks them."""

from __future__ import annotations

import socket
import ssl

from kvbm.errors import KvbmError
from kvbm.fleet.directory import Peer, split_address
from kvbm.fleet.tls import certified
from kvbm.layout import BlockLayout
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.wire import WIRE_VERSION, Greeting, Stream, Welcome, tune


class PeerRefused(KvbmError):
    """The peer is of another fleet or version, or has no use for us: one line."""


def connect(peer: Peer, options: PeerOptions, tls: ssl.SSLContext | None) -> tuple[Stream, str]:
    """A connection, and with TLS the node that its certificate is of. Raises OSError, ValueError and KvbmError."""
    connection = socket.create_connection(split_address("peers", peer.address), options.connect_timeout_s)
    node = ""
    try:
        tune(connection)
        if tls is not None:
            connection = tls.wrap_socket(connection)
            node = certified(connection, options.fleet).node
            if peer.node and node != peer.node:
                raise PeerRefused(f"it is {node}, and {peer.node} is expected at this address")
        return Stream(connection), node
    except BaseException:
        connection.close()
        raise


def greeting(options: PeerOptions, fingerprint: bytes, layout: BlockLayout, known_max: int) -> Greeting:
    """Who we are, and for which blocks we come."""
    return Greeting(
        version=WIRE_VERSION,
        fleet=options.fleet,
        node=options.node,
        fingerprint=fingerprint,
        slot_bytes=layout.slot_bytes,
        shard_count=layout.shard_count,
        known_max=known_max,
    )


def refuse_welcome(welcome: Welcome, options: PeerOptions, certified_node: str | None) -> None:
    """Raise PeerRefused for a lender that is not of us; `certified_node` is None without TLS."""
    if welcome.version != WIRE_VERSION:
        raise PeerRefused(f"it speaks version {welcome.version} of the wire; accepted is {WIRE_VERSION}")
    if welcome.fleet != options.fleet:
        raise PeerRefused(f"it is of the fleet {welcome.fleet!r}, and we are of {options.fleet!r}")
    if certified_node is not None and welcome.node != certified_node:
        raise PeerRefused(f"it calls itself {welcome.node!r}, and its certificate says {certified_node!r}")
