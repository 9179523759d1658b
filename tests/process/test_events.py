"""`kvbm manager --events` and `kvbm inspect events`, with engines that publish nothing themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvbm.events.wire import name_of
from rigs.admin import Engine, Node
from rigs.indexer import Held, Indexer, replayed
from rigs.manager import KEYS, NAMESPACE, OTHER

TOPIC = NAMESPACE.short
TOKENS = range(20)
"""Of the first five blocks."""
FIVE = KEYS[:5]


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket must be short
        yield f"ipc://{directory}"


@pytest.fixture
def node(make_node: Callable[..., Node], tmp_path: Path, sockets: str) -> Node:
    """With a disk tier, and events."""
    return make_node(
        disk_blocks=40,
        disk_dir=tmp_path / "disk",
        disk_admission="all",
        events_endpoint=f"{sockets}/e",
        events_replay_endpoint=f"{sockets}/r",
    )


@pytest.fixture
def subscribe(sockets: str) -> Iterator[Callable[[], Indexer]]:
    made: list[Indexer] = []

    def subscribe() -> Indexer:
        made.append(Indexer(f"{sockets}/e"))
        return made[-1]

    yield subscribe
    for each in made:
        each.close()


def where(medium: str) -> Held:
    return {(medium, name_of(key)) for key in FIVE}


def until(indexer: Indexer, held: Held) -> None:
    """Messages come until it believes this."""
    while indexer.of(TOPIC) != held:
        assert indexer.hear() is not None, indexer.held


def leave(node: Node, engine: Engine) -> None:
    """The engine ends, and with it its leases."""
    engine.close()
    while node.json("inspect", "leases")["leases"]:
        pass


@pytest.mark.slow
def test_a_router_follows_blocks_from_host_to_disk_and_over_a_restart(
    node: Node, subscribe: Callable[[], Indexer], sockets: str
) -> None:
    early = subscribe()
    engine = node.engine(node.manage())
    engine.store(FIVE, TOKENS)
    until(early, where("CPU") | where("STORAGE"))
    assert [early.blocks[name_of(key)] for key in FIVE[:2]] == [
        (None, (0, 1, 2, 3)),
        (name_of(FIVE[0]), (4, 5, 6, 7)),
    ]
    late = subscribe()
    until(late, where("CPU") | where("STORAGE"))
    leave(node, engine)
    node.json("reset", "--tier", "G2")
    for each in (early, late):
        until(each, where("STORAGE"))
    again = Indexer("inproc://nowhere")
    for message in replayed(f"{sockets}/r", 0):
        again.take_in(message)
    assert again.of(TOPIC) == where("STORAGE"), "who missed it asks for it"
    again.close()

    node.managers[0].terminate()
    assert node.managers[0].wait(30) == 0
    early.held.clear()
    late.held[TOPIC.encode()] = {("CPU", 1)}
    engine = node.engine(node.manage())
    for each in (early, late):
        until(each, where("STORAGE"))
    engine.lookup(FIVE)
    until(early, where("CPU") | where("STORAGE"))


@contextmanager
def printed(node: Node, *words: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What `kvbm inspect events --json` prints, line by line, until the test has seen enough."""
    command = [
        sys.executable,
        "-m",
        "kvbm.cli.main",
        "inspect",
        "events",
        "--seconds",
        "60",
        "--json",
        *words,
    ]
    with subprocess.Popen(command, env=node.environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield map(json.loads, child.stdout)
        child.terminate()


def hashed(key: bytes) -> str:
    return f"{name_of(key):016x}"


@pytest.mark.slow
def test_the_command_prints_what_the_manager_holds_and_what_changes(node: Node, sockets: str) -> None:
    engine = node.engine(node.manage("manager.sock", "--namespaces", "2"))
    engine.store(FIVE, TOKENS)
    other = node.engine(str(node.runtime_dir / "manager.sock"), "other", OTHER)
    other.store(KEYS[:2], range(8))
    other.store(KEYS[100:103])
    other.close()
    leave(node, engine)
    expected = {
        (space.short, tier, hashed(key))
        for space, keys in ((NAMESPACE, FIVE), (OTHER, KEYS[:2]))
        for tier in ("host", "disk")
        for key in keys
    }
    with printed(node, "--endpoint", f"{sockets}/e") as rows:
        seen = dict[tuple[str, str, str], dict[str, Any]]()
        while not seen.keys() >= expected:
            row = next(rows)
            assert not row.get("error")
            if row["event"] == "stored":
                seen[row["namespace"], row["tier"], row["block"]] = row
        assert seen.keys() == expected, "of blocks without tokens nothing is announced"
        first, second = (seen[TOPIC, "host", hashed(key)] for key in FIVE[:2])
        assert ("before" in first, first["tokens"], second["before"]) == (False, 4, hashed(FIVE[0]))
        node.json("reset", "--tier", "G2")
        removals = (row for row in rows if row["event"] == "removed")
        gone = {(row["namespace"], row["tier"], row["block"]) for row in islice(removals, 7)}
        assert gone == {each for each in expected if each[1] == "host"}


@pytest.mark.slow
def test_what_cannot_be_read_is_refused_in_one_line(make_node: Callable[..., Node], tmp_path: Path) -> None:
    node = make_node()
    node.manage()
    assert "publishes no KV events: start it with --events" in node.refused("inspect", "events")
    for words, told in (
        (("--endpoint", "5557"), "--endpoint='5557' cannot be used: tcp://"),
        (("--endpoint", f"ipc://{tmp_path}/none"), "no KV events are published at ipc://"),
        (("--seconds", "601"), "--seconds='601' cannot be used: a number from 1 to 600"),
    ):
        assert told in node.refused("inspect", "events", *words)
