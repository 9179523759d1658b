"""Where the door for other nodes opens, and how many it lets in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.fleet.directory import is_private
from kvbm.manager.lending import Lending
from kvbm.manager.peer_server import PeerServer
from rigs.peers import wait_until


@pytest.fixture
def lending() -> Iterator[Lending]:
    lend = Lending([], monotonic)
    yield lend
    lend.close()


@pytest.mark.parametrize(
    ("host", "private"),
    [
        *[("127.0.0.1", True), ("10.1.2.3", True), ("192.168.0.9", True), ("fd00::1", True), ("::1", True)],
        *[("0.0.0.0", False), ("::", False), ("8.8.8.8", False), ("2a00::1", False), ("name", False)],
    ],
)
def test_private_addresses(host: str, private: bool) -> None:
    assert is_private(host) is private


@pytest.mark.parametrize("listen", ["0.0.0.0:0"])
def test_without_tls_not_to_the_world_unless_told_so(lending: Lending, listen: str) -> None:
    with pytest.raises(SettingsError, match=r"peer_listen='.*' cannot be used: without TLS a loopback"):
        PeerServer(listen, None, "f", "n", lending)
    server = PeerServer(listen, None, "f", "n", lending, allow_plain=True)
    assert server.port
    server.close()


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:99999", ":7400", "1.2.3.4:70", "::1:7400"])
def test_an_address_that_is_none_of_ours(lending: Lending, listen: str) -> None:
    with pytest.raises(SettingsError, match="peer_listen"):
        PeerServer(listen, None, "f", "n", lending, allow_plain=True)


def test_a_full_house_refuses(lending: Lending) -> None:
    server = PeerServer("127.0.0.1:0", None, "f", "n", lending, readers_max=2)
    try:
        inside = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        wait_until(lambda: len(server.describe()["readers"]) == 2)  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", server.port)) as third:
            third.settimeout(10.0)
            assert third.recv(1) == b""
        for each in inside:
            each.close()
        wait_until(lambda: not server.describe()["readers"])
    finally:
        server.close()
