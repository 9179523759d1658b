"""A fleet's nodes in a list, and in an etcd that fails as a test says."""

from __future__ import annotations

import logging
import sys

import pytest

from kvbm.clock import ManualClock
from kvbm.errors import SettingsError
from kvbm.fleet.directory import Peer, split_address
from kvbm.fleet.etcd import EtcdDirectory, open_etcd_directory
from kvbm.fleet.static import StaticDirectory
from rigs.manager_probe import wait_for

A, B = Peer("10.0.0.1:7400", "a"), Peer("10.0.0.2:7400", "b")


def test_a_list() -> None:
    directory = StaticDirectory(" 10.0.0.1:7400,[fd00::1]:7400, 10.0.0.1:7400 ,")
    assert directory.peers() == (Peer("10.0.0.1:7400"), Peer("[fd00::1]:7400"))
    assert split_address("peers", "[fd00::1]:7400") == ("fd00::1", 7400)


@pytest.mark.parametrize("text", ["", "host", "host:port", ":1", "a:1,b", "fd00::1:7400"])
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(SettingsError, match="peers="):
        StaticDirectory(text)


class FakeEtcd:
    """A client and its server: entries by key, and a lease that ends when the test says so."""

    def __init__(self) -> None:
        self.down = False
        self.values: dict[str, bytes] = {}
        self.leases = 0
        self.ended = False
        self.connected: list[str] = []

    def connect(self, endpoint: str) -> FakeEtcd:
        self.connected.append(endpoint)
        self._answer()
        return self

    def _answer(self) -> None:
        if self.down:
            raise ConnectionRefusedError("refused")

    def lease(self, ttl: int) -> FakeEtcd:
        self._answer()
        self.leases += 1
        self.ended = False
        return self

    def refresh(self) -> int:
        self._answer()
        return -1 if self.ended else 10

    def revoke(self) -> None:
        self._answer()
        self.values.clear()

    def put(self, key: str, value: str, lease: object) -> None:
        self._answer()
        self.values[key] = value.encode()

    def entries(self, prefix: str, limit: int) -> list[bytes]:
        self._answer()
        return [value for key, value in self.values.items() if key.startswith(prefix)]


class Watched:
    """A directory whose rounds a test makes: its own thread looks once at the start, and then sleeps."""

    def __init__(self, me: Peer | None = A) -> None:
        self.etcd = FakeEtcd()
        self.etcd.values["kvbm/fleets/f/nodes/b"] = b'{"address": "10.0.0.2:7400", "node": "b"}'
        self.clock = ManualClock(50.0)
        self.etcd.down = True
        endpoints = ["http://u:secret@one:1", "http://two:2"]
        self.directory = EtcdDirectory(endpoints, "f", me, self.etcd.connect, self.clock, every_s=1e6)
        self.directory._stopping.wait(0)
        self.directory._thread.join(0.0)
        wait_for(lambda: self.directory.fault != "not reached yet", 20.0, "it does not look")
        self.etcd.down = False

    def look(self) -> tuple[Peer, ...]:
        self.directory.look()
        return self.directory.peers()


def test_the_last_known_stay_while_it_is_down_and_missing_ones_for_a_lease() -> None:
    watched = Watched()
    etcd, directory = watched.etcd, watched.directory
    assert watched.look() == (A, B) and directory.fault == ""
    etcd.down = True
    assert watched.look() == (A, B)
    assert "refused" in directory.fault
    etcd.down = False
    etcd.values.clear()  # it lost all, and our lease
    etcd.ended = True
    assert watched.look() == (A, B)
    assert directory.fault == "" and etcd.leases == 2 and list(etcd.values) == ["kvbm/fleets/f/nodes/a"]
    watched.clock.advance(9.9)
    assert watched.look() == (A, B)
    watched.clock.advance(0.2)
    assert watched.look() == (A,), "it did not come back"
    directory.close()


def test_the_next_endpoint_is_tried() -> None:
    watched = Watched(me=None)
    watched.etcd.down = True
    before = len(watched.etcd.connected)
    for _ in range(3):
        watched.look()
    tried = watched.etcd.connected[before:]
    assert len(set(tried)) == 2 and tried[0] != tried[1] != tried[2]
    assert "secret" not in watched.directory.place
    watched.directory.close()


def test_entries_that_are_none_are_left_out() -> None:
    watched = Watched(me=None)
    for number, value in enumerate(
        [
            b"",
            b"{}",
            b"\xff",
            b'{"address": "x", "node": "c"}',
            b'{"address": "h:1", "node": "c/d"}',
            b"[" * 2000,
        ]
    ):
        watched.etcd.values[f"kvbm/fleets/f/nodes/bad{number}"] = value
    watched.etcd.values["kvbm/fleets/f2/nodes/a"] = b'{"address": "10.0.0.1:7400", "node": "a"}'
    assert watched.look() == (B,)
    watched.directory.close()


@pytest.mark.parametrize(
    "endpoint", ["one:2379", "ftp://one:1", "http://one", "http://u:secret@one:1", "ftp://u:secret@a:b"]
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_FLEET_ETCD=") as caught:
        open_etcd_directory([endpoint], "f", A, ManualClock())
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(SettingsError, match=r"pip install 'openkvbm\[fleet\]'"):
        open_etcd_directory(["http://one:1"], "f", A, ManualClock())


@pytest.mark.parametrize("reached_before", [False, True])
def test_that_it_cannot_be_reached_is_said_once_until_it_answers(
    caplog: pytest.LogCaptureFixture, reached_before: bool
) -> None:
    with caplog.at_level(logging.INFO, "kvbm.fleet"):
        watched = Watched()
        if reached_before:
            watched.look()
            caplog.clear()
        watched.etcd.down = True
        for _ in range(3):
            watched.look()

        def said() -> list[tuple[str, str]]:
            return [(each.levelname, each.getMessage().partition(";")[0]) for each in caplog.records]

        assert said() == [("WARNING", "etcd cannot be reached")]
        caplog.clear()
        watched.etcd.down = False
        watched.look()
        watched.etcd.down = True
        watched.look()
        assert said() == [("INFO", "etcd answers: 2 nodes"), ("WARNING", "etcd cannot be reached")]
    watched.directory.close()
