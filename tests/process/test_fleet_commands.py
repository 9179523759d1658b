"""The first two commands of the fleet's page, as processes: what one manager holds in host memory, the other brings up.

Addresses, sizes and sockets are those of this machine; all else is as it stands there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.block import Tier
from kvbm.settings import variable
from kvbm.testing.oracle import block_bytes
from rigs.admin import Node
from rigs.checkout import ROOT
from rigs.manager import KEYS
from rigs.manager_probe import free_port, wait_for

PAGE = ROOT / "docs" / "operating" / "fleet.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no docs"),
]
END_S = 60.0


def commands() -> list[list[str]]:
    """The words of the page's first block of commands, behind `kvbm manager`, for two nodes on this machine."""
    block = re.search(r"^```\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    text = block[1].replace("200GB", "1MB")
    for address in dict.fromkeys(re.findall(r"10\.\d+\.\d+\.\d+:\d+", text)):
        text = text.replace(address, f"127.0.0.1:{free_port()}")
    lines = [shlex.split(line) for line in text.splitlines()]
    assert [line[:2] for line in lines] == [["kvbm", "manager"]] * 2
    return [line[2:] for line in lines]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(Node(tmp_path / name))
        del made[-1].environment[variable("host_blocks")]  # the command's size counts
    yield made[0], made[1]
    for node in made:
        node.close()


def fleet_of(node: Node) -> tuple[int, dict[str, Any], str]:
    """What `kvbm status` ends with, and says of the fleet to a script and to a person."""
    code, out, _ = node.kvbm("status", "--json")
    (space,) = json.loads(out)["managers"][0]["description"]["spaces"]
    (fleet,) = space["remotes"]
    return code, fleet, node.kvbm("status")[1]


def test_one_manager_loads_what_another_holds(nodes: tuple[Node, Node]) -> None:
    lender, reader = (
        node.engine(node.manage("manager.sock", *words))
        for node, words in zip(nodes, commands(), strict=True)
    )
    keys = KEYS[:5]
    lender.store(keys)
    seen: list[tuple[int, dict[str, Any], str]] = []

    def heard() -> bool:
        seen.append(fleet_of(nodes[1]))
        return seen[-1][1]["blocks"] == len(keys)

    wait_for(heard, END_S, lambda: f"the blocks are not known: {seen[-1:]}")
    code, fleet, shown = seen[-1]
    assert (code, fleet["fleet"], fleet["nodes"], fleet["nodes_reached"]) == (0, "llama", 1, 1)
    assert "1 of 1 nodes reached (1 over TCP); 5 blocks known; certificates off" in shown
    reply = reader.lookup(keys)
    assert bytes(reply.sources) == bytes((Tier.REMOTE,)) * len(keys)
    # Those that have arrived before the answer are told of by it.
    assert reply.ready == len(keys) or reader.arrived().ready == len(keys)
    size = reader.welcome.slot_bytes
    for slot, key in zip(reply.slots, keys, strict=True):
        assert reader.memory[slot * size : (slot + 1) * size] == block_bytes(key, 0, size)
