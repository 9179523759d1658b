"""Where the door for other nodes opens, and how many it lets in."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from kvbm.clock import ManualClock, monotonic
from kvbm.errors import SettingsError
from kvbm.fleet.directory import is_private
from kvbm.manager import peer_server
from kvbm.manager.lending import Lending
from kvbm.manager.peer_server import PeerServer
from kvbm.tiers.peers.tier import PeerTier
from rigs.peers import LendingNode, open_tier, wait_until


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


def test_a_full_house_says_so_at_both_ends_and_lets_in_when_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    lender = LendingNode(readers_max=1)
    bound = "1 readers are let in here at most, one for each node and namespace"
    first, second = (open_tier([lender.peer], node=name) for name in ("first", "second"))
    tiers = [first, second]
    try:
        wait_until(lambda: any(bound in trouble_of(tier) for tier in tiers), "one is refused")
        refused = next(tier for tier in tiers if bound in trouble_of(tier))
        again = lender.server.counts["refused"] + 2
        wait_until(lambda: lender.server.counts["refused"] >= again, "it tries again")
        said = [each.getMessage() for each in caplog.records if bound in each.getMessage()]
        assert sorted(said) == [
            f"peer {lender.address} (lender): it refuses us: {bound}",
            f"reader 127.0.0.1 and those after it are refused: {bound}",
        ], "once each, however often it tries"
        tiers[tiers.index(refused) - 1].close()
        wait_until(lambda: trouble_of(refused) == "", "there is room now")
    finally:
        for tier in tiers:
            tier.close()
        lender.close()


def trouble_of(tier: PeerTier) -> str:
    (peer,) = tier.describe()["peers"]  # type: ignore[misc]
    return str(peer["trouble"])


def test_those_who_are_told_that_it_is_full_are_bounded_too(
    lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "TURNED_AWAY_MAX", 1)
    # Its clock stands still, so that it waits for ever for the greeting of the third.
    server = PeerServer("127.0.0.1:0", None, "f", "n", lending, readers_max=2, clock=ManualClock())
    try:
        inside = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        wait_until(lambda: len(server.describe()["readers"]) == 2)  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", server.port)):
            with socket.create_connection(("127.0.0.1", server.port)) as fourth:
                fourth.settimeout(20.0)
                assert fourth.recv(1) == b""
        for each in inside:
            each.close()
        wait_until(lambda: not server.describe()["readers"])
    finally:
        server.close()
