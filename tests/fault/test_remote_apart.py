"""A store in a network of its own, which is cut off, or slow: nobody waits longer than a read may take, and it comes
back by itself. Root only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from fault.remote_node import CHAIN_BLOCKS, Engine, Node, chain, ended
from rigs.blob_services import redis_server
from rigs.manager_probe import wait_for
from rigs.namespaces import Apart, namespace, remove_leftovers

CHAINS = 24


class Away(NamedTuple):
    """A node, and a store in another network that has `CHAINS` chains."""

    apart: Apart
    node: Node
    reads: Engine
    beside: Engine


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    pytest.importorskip("valkey")
    with ExitStack() as stack:
        apart = stack.enter_context(namespace())
        service = redis_server(tmp_path, inside=apart.inside, host=apart.there)
        url = f"redis://{apart.there}:{stack.enter_context(service).port}/0"
        with ended([Node(tmp_path, url, host_blocks=CHAINS * CHAIN_BLOCKS)]) as writers:
            engine = writers[0].engine()
            for number in range(CHAINS):
                assert engine.store(chain(number)) == CHAIN_BLOCKS
            writers[0].wait_until_written(CHAINS * CHAIN_BLOCKS)
        nodes = stack.enter_context(ended([Node(tmp_path, url, host_blocks=256)]))
        reads, beside = nodes[0].engine(), nodes[0].engine()
        nodes[0].wait_until_knows(CHAINS)
        yield Away(apart, nodes[0], reads, beside)


def endure(away: Away, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Look up blocks of the store until it is given up; then it is well again, and they are found again."""
    at_home = chain(1000)
    assert away.beside.store(at_home) == CHAIN_BLOCKS
    begin()
    try:
        for turn in itertools.count():
            keys = chain(turn % 2)
            begun = away.reads.begin(keys)
            assert away.beside.look(at_home).ready == CHAIN_BLOCKS
            assert away.reads.end(begun, keys).ready < CHAIN_BLOCKS
            if away.node.describe()["openings"]:
                break
            assert turn < 40, f"the breaker stays closed: {away.node.describe()}"
    finally:
        end()
    away.node.wait_until(lambda tier: tier["reading"] == "closed", "the store is well, and not used")
    for number in range(CHAINS):
        keys = chain(number)
        wait_for(lambda: away.reads.look(keys).ready == CHAIN_BLOCKS, 30.0, f"chain {number} stays away")  # noqa: B023
    assert "remote tier is off (slow)" in away.node.log()
    away.node.assert_nothing_held()


def test_a_store_that_is_cut_off(away: Away) -> None:
    endure(away, away.apart.cut, away.apart.join)


def test_a_store_behind_a_slow_line(away: Away) -> None:
    """A chain takes three seconds there, and may take half of one."""
    endure(away, lambda: away.apart.slow(128), away.apart.fast)


def test_what_a_killed_test_left_is_removed() -> None:
    import subprocess

    with namespace():
        pass
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"kvbm-{gone.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    remove_leftovers()
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
