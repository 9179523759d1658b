"""The fleet's directory in a real etcd: nodes come and go, and etcd is killed and comes back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.clock import monotonic
from kvbm.demo.server import HOST, free_port
from kvbm.fleet.directory import Peer
from kvbm.fleet.etcd import EtcdDirectory, _Gateway
from rigs.peers import wait_until
from rigs.system_packages import require

pytestmark = pytest.mark.slow

pytest.importorskip("etcd3gw", reason="the extra `fleet` is not installed")

A, B = Peer("10.0.0.1:7400", "a"), Peer("10.0.0.2:7400", "b")


class Etcd:
    def __init__(self, directory: Path) -> None:
        self.client, peer = free_port(), free_port()
        ours, others = f"http://{HOST}:{self.client}", f"http://{HOST}:{peer}"
        self._words = [
            *(require("etcd"), "--data-dir", str(directory), "--log-level", "error"),
            *("--listen-client-urls", ours, "--advertise-client-urls", ours),
            *("--listen-peer-urls", others, "--initial-advertise-peer-urls", others),
            *("--initial-cluster", f"default={others}"),
        ]
        self.endpoint = ours
        self._directory = directory
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        shutil.rmtree(self._directory)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "etcd")
    yield server
    server.kill()


def opened(etcd: Etcd, me: Peer | None, lease_s: int = 2) -> EtcdDirectory:
    return EtcdDirectory([etcd.endpoint], "f", me, _Gateway, monotonic, every_s=0.1, lease_s=lease_s)


def test_nodes_come_and_go(etcd: Etcd) -> None:
    a, b, watcher = opened(etcd, A), opened(etcd, B), opened(etcd, None)
    try:
        wait_until(lambda: watcher.peers() == (A, B))
        wait_until(lambda: not (a.fault or b.fault))
        a.close()
        wait_until(lambda: watcher.peers() == (B,), "an orderly end is seen at once")
    finally:
        for each in (a, b, watcher):
            each.close()


def test_a_node_that_vanishes_drops_out_with_its_lease(etcd: Etcd) -> None:
    watcher = opened(etcd, None)
    client = _Gateway(etcd.endpoint)
    wait_until(lambda: not watcher.fault)
    try:
        lease = client.lease(2)
        client.put("kvbm/fleets/f/nodes/a", '{"address": "10.0.0.1:7400", "node": "a"}', lease)
        client.put("kvbm/fleets/f/nodes/x", "no entry", lease)
        client.put("kvbm/fleets/f2/nodes/b", '{"address": "10.0.0.2:7400", "node": "b"}', lease)
        wait_until(lambda: watcher.peers() == (A,))
        wait_until(lambda: watcher.peers() == ())  # nobody renews the lease
    finally:
        watcher.close()


@pytest.mark.parametrize("loses_all", [False, True])
def test_etcd_killed_and_started_again(etcd: Etcd, loses_all: bool) -> None:
    a, b = opened(etcd, A), opened(etcd, B)
    try:
        wait_until(lambda: a.peers() == b.peers() == (A, B))
        etcd.kill()
        wait_until(lambda: a.fault and b.fault)
        assert a.peers() == (A, B), "the last known nodes stay"
        if loses_all:
            etcd.forget()
        etcd.start()
        wait_until(lambda: not (a.fault or b.fault))
        assert a.peers() == (A, B)
        # Both register again, and outlive the time in which missing ones are kept.
        watcher = opened(etcd, None)
        try:
            wait_until(lambda: watcher.peers() == (A, B))
        finally:
            watcher.close()
        b.close()
        wait_until(lambda: a.peers() == (A,))
    finally:
        a.close()
        b.close()
