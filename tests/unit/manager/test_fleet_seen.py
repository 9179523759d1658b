"""What an operator is told of a fleet: the nodes that are reached, why others are not, and whether any list answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.admin_protocol import Describe, Description
from kvbm.cli.status import TROUBLES_SHOWN, faults_of, remote_lines
from kvbm.fleet.directory import Peer
from kvbm.manager.gauges import publish_gauges
from kvbm.remote_report import RemoteReport
from kvbm.tiers.peers.tier import PeerTier
from rigs.manager import LAYOUT, NAMESPACE, ManagerBench, connect_operator
from rigs.manager_probe import free_port
from rigs.peers import FLEET, LendingNode, ListedPeers, keys_of, knows, open_tier, wait_until


class Seen:
    """A manager whose blocks can come from the nodes that a test lists."""

    def __init__(self, directory: Path) -> None:
        self.listed = ListedPeers()
        self.tiers: list[PeerTier] = []
        self.manager = ManagerBench(directory, peers=self._open)
        self.manager.engine()
        self._admin = connect_operator(self.manager)

    def _open(self, *_: object) -> PeerTier:
        self.tiers.append(open_tier(self.listed, LAYOUT, NAMESPACE))
        return self.tiers[-1]

    def list(self, *peers: Peer, fault: str = "") -> None:
        self.listed.listed, self.listed.fault = peers, fault
        self.manager.space().remotes[0].tick()

    def described(self) -> Description:
        self._admin.send(Describe())
        return self._admin.expect(Description)

    def report(self) -> RemoteReport:
        ((report,),) = (space.remotes for space in self.described().spaces)
        return report

    def gauges(self) -> tuple[float, float, float]:
        """Nodes that are reached and those that are not, and whether the directory is away."""
        metrics = self.manager.metrics
        publish_gauges([("n", self.manager.space())], metrics)
        nodes = (metrics.value("kvbm_peer_nodes", reached=reached) for reached in ("yes", "no"))
        return (*nodes, metrics.value("kvbm_peer_directory_away"))  # type: ignore[return-value]


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    seen = Seen(tmp_path)
    yield seen
    seen.manager.close()


@pytest.fixture
def lender() -> Iterator[LendingNode]:
    node = LendingNode(layout=LAYOUT, namespace=NAMESPACE)
    yield node
    node.close()


def test_nodes_that_are_reached_and_one_that_is_not(seen: Seen, lender: LendingNode) -> None:
    keys = keys_of(3)
    lender.store(keys)
    away = Peer(f"127.0.0.1:{free_port()}", "away")
    seen.list(lender.peer, away)
    wait_until(lambda: knows(seen.tiers[0], keys), "it hears of the blocks")
    wait_until(lambda: "refused" in "".join(seen.report().troubles), "the other one is tried")
    assert (seen.report().nodes, seen.report().nodes_reached, seen.gauges()) == (2, 1, (1, 1, 0))
    description = seen.described()
    assert faults_of(description) == [], "one node that is away costs its hits"
    (line,) = remote_lines(description.spaces)
    said = line.partition(f"peers of the fleet {FLEET!r}, from a test: ")[2].split("; ")
    assert said == [
        "1 of 2 nodes reached (1 over TCP)",
        "3 blocks known",
        "certificates off",
        f"{away.address}: [Errno 111] Connection refused",
    ]


def test_a_fleet_of_which_nobody_is_reached_is_a_fault(seen: Seen) -> None:
    away = [Peer(f"127.0.0.1:{free_port()}", f"n{number}") for number in range(TROUBLES_SHOWN + 2)]
    seen.list(*away)
    assert seen.gauges() == (0, len(away), 0)
    wait_until(lambda: all("refused" in trouble for trouble in seen.report().troubles), "all are tried")
    (fault,) = faults_of(seen.described())
    assert f"the fleet {FLEET!r}: none of {len(away)} nodes is reached: {away[0].address}: " in fault
    (line,) = remote_lines(seen.described().spaces)
    assert line.endswith("; 2 more nodes are not reached")


def test_a_directory_that_does_not_answer_is_a_fault(seen: Seen, lender: LendingNode) -> None:
    seen.list(lender.peer)
    wait_until(lambda: seen.report().nodes_reached == 1, "it is reached")
    assert faults_of(seen.described()) == []
    seen.list(lender.peer, fault="etcd cannot be reached: refused")
    assert seen.gauges() == (1, 0, 1)
    (fault,) = faults_of(seen.described())
    assert fault.endswith(f"the fleet {FLEET!r}: etcd cannot be reached: refused")


def test_a_node_that_is_ourselves_is_none_of_the_others(seen: Seen) -> None:
    ourselves = LendingNode("reader", layout=LAYOUT, namespace=NAMESPACE)
    try:
        seen.list(Peer(ourselves.address))
        wait_until(lambda: seen.report().nodes == 0, "it knows itself")
        assert faults_of(seen.described()) == [] and seen.gauges() == (0, 0, 0)
    finally:
        ourselves.close()


def test_nodes_beyond_the_bound_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    listed = ListedPeers(Peer(f"127.0.0.1:{free_port()}", f"n{number}") for number in range(5))
    tier = open_tier(listed, peers_max=3)
    try:
        for _ in range(2):
            tier.tick()
        said = (
            f"the fleet {FLEET} has 5 nodes and at most 3 are read from: the last 2 of the list are left out"
        )
        assert [line for line in caplog.messages if "at most" in line] == [said]
        assert tier.describe()["notes"] == ("reads from 3 nodes at most, and leaves 2 out",)
        listed.listed = listed.listed[:3]
        tier.tick()
        assert tier.describe()["notes"] == ()
    finally:
        tier.close()
