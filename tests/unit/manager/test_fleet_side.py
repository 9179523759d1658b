"""What the settings of a fleet become: an entry in the directory, an address to lend at, refusals in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.fleet.directory import Peer
from kvbm.fleet.static import StaticDirectory
from kvbm.manager import fleet_side
from kvbm.manager.fleet_side import FleetSide
from kvbm.settings import Settings
from kvbm.tiers.peers.connecting import connect
from kvbm.tiers.peers.options import PeerOptions
from rigs.certificates import make_node
from rigs.manager_probe import free_port

PEERS = "127.0.0.1:7400,127.0.0.1:7401"


@pytest.fixture
def side() -> Iterator[Callable[..., FleetSide]]:
    made: list[FleetSide] = []

    def make(**settings: Any) -> FleetSide:
        made.append(FleetSide(Settings(**{"fleet": "f", "fleet_node": "n", **settings}), monotonic))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Peer | None]]:
    """What is registered in etcd."""
    seen: list[tuple[list[str], Peer | None]] = []

    def opened(endpoints: list[str], fleet: str, me: Peer | None, clock: object) -> StaticDirectory:
        seen.append((endpoints, me))
        return StaticDirectory(PEERS)

    monkeypatch.setattr(fleet_side, "open_etcd_directory", opened)
    return seen


@pytest.mark.parametrize(
    ("settings", "me"),
    [
        ({"fleet_listen": "10.0.0.7:7400"}, Peer("10.0.0.7:7400", "n")),
        ({"fleet_listen": "0.0.0.0:7400", "fleet_address": "a.b:9"}, Peer("a.b:9", "n")),
        ({}, None),
        ({"fleet_address": "a.b:9"}, None),
    ],
)
def test_a_node_is_registered_where_others_reach_it(
    side: Callable[..., FleetSide],
    entries: list[tuple[list[str], Peer | None]],
    settings: dict[str, str],
    me: Peer | None,
) -> None:
    side(fleet_etcd="http://e1:2379, http://e2:2379", **settings)
    assert entries == [(["http://e1:2379", "http://e2:2379"], me)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one of DYN_KVBM_FLEET_PEERS and DYN_KVBM_FLEET_ETCD"),
        ({"fleet_peers": PEERS, "fleet_etcd": "http://e:2379"}, "one of"),
        ({"fleet_peers": "nowhere"}, "DYN_KVBM_FLEET_PEERS"),
        ({"fleet_peers": PEERS, "fleet": "a b"}, "DYN_KVBM_FLEET="),
        ({"fleet_peers": PEERS, "fleet_node": "a/b"}, "DYN_KVBM_FLEET_NODE"),
        ({"fleet_etcd": "http://e:2379", "fleet_listen": "0.0.0.0:7400"}, "DYN_KVBM_FLEET_ADDRESS"),
        ({"fleet_peers": PEERS, "fleet_certs": "/nowhere"}, "DYN_KVBM_FLEET_CERTS='/nowhere'"),
    ],
)
def test_what_cannot_be_used_is_named(
    side: Callable[..., FleetSide], settings: dict[str, str], words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        side(**settings)
    assert words in str(caught.value)


def test_without_certificates_it_listens_on_private_addresses(side: Callable[..., FleetSide]) -> None:
    anywhere = {"fleet_peers": PEERS, "fleet_listen": f"0.0.0.0:{free_port()}"}
    with pytest.raises(
        SettingsError, match=r"DYN_KVBM_FLEET_LISTEN.*DYN_KVBM_FLEET_CERTS.*DYN_KVBM_FLEET_PLAIN"
    ):
        side(**anywhere).lend((), private=False)
    assert side(fleet_plain=True, **anywhere).lend((), private=False) is not None


@pytest.mark.parametrize(("settings", "certified"), [({}, False), ({"fleet_certs": "certs"}, True)])
def test_it_asks_for_a_mover_by_what_the_settings_say(
    side: Callable[..., FleetSide],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, str],
    certified: bool,
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(fleet_side, "open_mover", lambda *words: asked.append(words))
    if certified:
        make_node(tmp_path, "n", 30, "f")
        settings = {"fleet_certs": str(tmp_path)}
    side(fleet_peers=PEERS, fleet_transport="nixl", **settings)
    assert asked == [("nixl", certified, "DYN_KVBM_FLEET_TRANSPORT")]


def test_an_engines_own_manager_does_without_an_address_that_is_taken(side: Callable[..., FleetSide]) -> None:
    address = {"fleet_peers": PEERS, "fleet_listen": f"127.0.0.1:{free_port()}"}
    assert side(**address).lend((), private=True) is not None
    assert side(**address).lend((), private=True) is None
    with pytest.raises(SettingsError):
        side(**address).lend((), private=False)


def test_an_address_may_stand_in_brackets_whatever_it_is(side: Callable[..., FleetSide]) -> None:
    """As the Helm chart writes it, which does not know whether pods have IPv6."""
    port = free_port()
    assert side(fleet_peers=PEERS, fleet_listen=f"[127.0.0.1]:{port}").lend((), private=False)
    connect(Peer(f"[127.0.0.1]:{port}"), PeerOptions(fleet="f", node="m"), None)[0].close()


def test_who_lends_nothing_only_reads_and_says_so(
    side: Callable[..., FleetSide], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = side(fleet_peers=PEERS)
    assert fleet.lend((), private=False) is None
    assert caplog.messages == ["this manager lends nothing: DYN_KVBM_FLEET_LISTEN is not set"]
    assert fleet.directory.peers() == (Peer("127.0.0.1:7400"), Peer("127.0.0.1:7401"))
