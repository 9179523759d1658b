"""`kvbm manager --events` and `kvbm inspect events`, with engines that publish nothing themselves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.mark.slow
def test_what_an_operator_sees_of_it(node: Node, tmp_path: Path, sockets: str) -> None:
    engine = node.engine(node.manage("manager.sock", "--namespaces", "2"))
    engine.store(FIVE, TOKENS)
    other = node.engine(str(node.runtime_dir / "manager.sock"), "other", OTHER)
    other.store(KEYS[:2], range(8))
    other.store(KEYS[100:103])
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*TOKENS, 7, 7, 7, 7, 7]))
    while any(space["offload_blocks"] for space in node.json("inspect", "queues")["queues"]):
        pass
    told = node.json("inspect", "events", "--tokens", str(prompt))
    assert (told["endpoint"], told["ended"]) == (f"{sockets}/e", "quiet")
    assert {told[each] for each in ("missing", "restarts", "told_twice", "unknown_removals")} == {0}
    rows = {(row["namespace"], row["tier"]): row for row in told["tiers"]}
    assert set(rows) == {(space.short, tier) for space in (NAMESPACE, OTHER) for tier in ("host", "disk")}
    assert rows[TOPIC, "host"] == {
        "namespace": TOPIC,
        "tier": "host",
        "blocks": 5,
        "held": 5,
        "roots": 1,
        "chains": 1,
        "orphans": 0,
    }
    assert (rows[OTHER.short, "disk"]["blocks"], rows[OTHER.short, "disk"]["held"]) == (2, 5)
    cached = {each["namespace"]: (each["blocks"], each["prompt_blocks"]) for each in told["prompt"]}
    assert cached == {TOPIC: (5, 6), OTHER.short: (2, 6)}
    code, out, err = node.kvbm("inspect", "events", "--tokens", str(prompt))
    assert (code, err) == (0, "")
    assert f"{OTHER.short} G2 host: 3 blocks are not announced, no engine said what they are" in out
    assert f"prompt in {TOPIC}: 5 of 6 blocks (G2 host 5, G3 disk 5)" in out
    code, out, err = node.kvbm("inspect", "events", "--endpoint", f"{sockets}/e")
    assert (code, err) == (0, "")
    assert "nothing is odd" in out
    assert "held" not in out


def test_where_all_is_told_the_command_does_not_wait(node: Node) -> None:
    node.engine(node.manage()).store(FIVE, TOKENS)
    while any(space["offload_blocks"] for space in node.json("inspect", "queues")["queues"]):
        pass
    assert node.json("inspect", "events")["ended"] == "complete"


@pytest.mark.slow
def test_what_cannot_be_read_is_refused_in_one_line(make_node: Callable[..., Node], tmp_path: Path) -> None:
    node = make_node()
    node.manage()
    assert "publishes no KV events: start it with --events" in node.refused("inspect", "events")
    for words, told in (
        (("--endpoint", "5557"), "--endpoint='5557' cannot be used: tcp://"),
        (("--endpoint", f"ipc://{tmp_path}/none"), "nobody publishes at ipc://"),
        (("--seconds", "601"), "--seconds='601' cannot be used: a number from 1 to 600"),
        (("--tokens", str(tmp_path)), "a regular file"),
    ):
        assert told in node.refused("inspect", "events", *words)
    odd = tmp_path / "odd.json"
    odd.write_text('{"prompt": [1]}')
    assert "a JSON list of token ids" in node.refused("inspect", "events", "--tokens", str(odd))
