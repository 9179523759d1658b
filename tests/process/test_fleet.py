"""Two managers of one fleet in one process, stepped by hand: what one holds in host memory, the other brings up; with
certificates, over NIXL, through etcd (`test_fleet_commands` has the commands)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import Tier
from kvbm.clock import monotonic
from kvbm.manager.fleet_side import FleetSide
from kvbm.manager.gauges import publish_gauges
from kvbm.manager.remote_side import report_remote
from kvbm.settings import Settings
from rigs.certificates import make_node
from rigs.manager import KEYS, Client, ManagerBench, store
from rigs.manager_probe import free_port, wait_for
from rigs.movers import needs_nixl
from rigs.system_packages import require


class Node:
    """A manager with its part in a fleet, stepped by hand, and an engine of its own."""

    def __init__(self, directory: Path, **settings: object) -> None:
        directory.mkdir()
        everything = {"runtime_dir": str(directory), "host_blocks": 64, **settings}
        self.fleet = FleetSide(Settings(**everything), monotonic)  # type: ignore[arg-type]
        self.manager = ManagerBench(directory, clock=monotonic, peers=self.fleet.reads, **everything)
        lending = self.fleet.lend(self.manager.server.spaces, private=False)
        if lending is not None:
            self.manager.server.lend(lending)
        self.leader, self.worker = self.manager.engine()

    def close(self) -> None:
        self.manager.server.stop_lending()
        self.fleet.close()
        self.manager.close()


def hits(node: Node, others: list[Node], count: int) -> tuple[int, ...]:
    """Ask until so many blocks are found; their slots, once they are all here."""
    numbers = iter(range(100, 10_000))
    found: list[object] = []

    def ask() -> bool:
        for other in others:
            other.manager.step(1)
        reply = node.leader.lookup(next(numbers), KEYS[:count])
        found[:] = [reply]
        return len(reply.slots) == count

    wait_for(ask, 20.0, lambda: f"found: {found}")
    reply = found[0]
    assert bytes(reply.sources) == bytes((Tier.REMOTE,)) * count  # type: ignore[attr-defined]
    space = node.manager.space()
    lease = next(iter(space.leases))

    def arrived() -> bool:
        for each in (node, *others):
            each.manager.step(1)
        return lease.final

    wait_for(arrived, 20.0, "the blocks do not come")
    assert lease.ready == count
    return tuple(lease.slots)


def right(node: Node, slots: tuple[int, ...], lender: Node) -> bool:
    """Whether the bytes are those that the lender has."""
    theirs = lender.manager.space()
    return all(
        node.worker.read(slot) == bytes(theirs.arena.slot_views(theirs.host_pool.find(key) or 0)[0])
        for slot, key in zip(slots, KEYS, strict=False)
    )


def moves(lender: Node, reader: Node) -> bool:
    """Whether the lender knows memory of the reader's."""
    for each in (lender, reader):
        each.manager.step(1)
    for side in reader.manager.space().remotes:
        side.tick()
    assert lender.fleet.server is not None
    readers = lender.fleet.server.describe()["readers"]
    return any(each["transport"] == "nixl" for each in readers)  # type: ignore[attr-defined]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.close()


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=needs_nixl)])
@pytest.mark.parametrize("certified", [False, True], ids=["plain", "certificates"])
def test_one_node_reads_what_another_computed(
    tmp_path: Path, nodes: list[Node], certified: bool, transport: str
) -> None:
    listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    common: dict[str, object] = {
        "fleet": "test",
        "fleet_peers": ",".join(listen),
        "fleet_transport": transport,
    }
    if certified:
        for name in ("a", "b"):
            make_node(tmp_path / "certs", name, 30, "test")
        common["fleet_certs"] = str(tmp_path / "certs")
    for name, address in zip(("a", "b"), listen, strict=True):
        nodes.append(Node(tmp_path / name, fleet_node=name, fleet_listen=address, **common))
    a, b = nodes
    by_nixl = transport == "nixl"
    assert (a.fleet.mover is not None) is by_nixl
    store(a.leader, a.worker, 1, KEYS[:12])
    if by_nixl:
        wait_for(lambda: moves(a, b), 60.0, "the lender knows the reader's memory")
    slots = hits(b, [a], 12)
    assert right(b, slots, a)
    assert a.fleet.server is not None and a.fleet.server.counts["moved"] == (12 if by_nixl else 0)
    metrics = b.manager.metrics
    publish_gauges([("b", b.manager.space())], metrics)
    links = {name: metrics.value("kvbm_peer_links", transport=name) for name in ("tcp", "nixl")}
    assert links == {"tcp": not by_nixl, "nixl": by_nixl}
    (side,) = b.manager.space().remotes
    notes = ("reads from 1 of 1 nodes by NIXL",) if by_nixl else ()
    assert report_remote(side).notes == notes, "which `kvbm status` shows"
    assert b.manager.metrics.value("kvbm_hit_blocks_total", tier="remote") >= 12


def test_nodes_find_each_other_through_etcd(tmp_path: Path, nodes: list[Node]) -> None:
    pytest.importorskip("etcd3gw")
    client, peer = free_port(), free_port()
    words = [
        *(
            require("etcd"),
            "--data-dir",
            str(tmp_path / "etcd"),
            "--initial-cluster",
            f"default=http://127.0.0.1:{peer}",
        ),
        *("--listen-client-urls", f"http://127.0.0.1:{client}"),
        *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
        *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
        *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
    ]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as etcd:
        try:
            for name in ("a", "b"):
                nodes.append(
                    Node(
                        tmp_path / name,
                        fleet="test",
                        fleet_node=name,
                        fleet_listen=f"127.0.0.1:{free_port()}",
                        fleet_etcd=f"http://127.0.0.1:{client}",
                    )
                )
            a, b = nodes
            store(a.leader, a.worker, 1, KEYS[:4])
            assert right(b, hits(b, [a], 4), a)
        finally:
            etcd.kill()


def lookup_count(client: Client, number: int) -> int:
    client.take()  # what is still said of earlier ones
    return len(client.lookup(number, KEYS[:4]).slots)


def test_a_node_that_vanishes_costs_its_hits_alone(tmp_path: Path, nodes: list[Node]) -> None:
    listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    for name, address in zip(("a", "b"), listen, strict=True):
        nodes.append(
            Node(
                tmp_path / name,
                fleet="test",
                fleet_node=name,
                fleet_listen=address,
                fleet_peers=",".join(listen),
            )
        )
    a, b = nodes
    store(a.leader, a.worker, 1, KEYS[:4])
    hits(b, [a], 4)
    nodes.remove(a)
    a.close()
    b.manager.space().clear("host")
    for lease in list(b.manager.space().leases):
        b.manager.space().release(lease.owner, lease.number)
    b.manager.space().clear("host")
    numbers = iter(range(20_000, 30_000))
    wait_for(
        lambda: lookup_count(b.leader, next(numbers)) == 0, 20.0, "blocks of a node that is gone are promised"
    )
    store(b.leader, b.worker, 2, KEYS[100:104])
