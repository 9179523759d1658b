"""A store on bad days, below real managers: no block has wrong bytes, nobody waits longer than the deadline of a read,
and when the store is well again its blocks are found again, by themselves.

The engines are clients that know the bytes of every block (`remote_node.Engine.end` compares all that is said to be
ready, and fails where a lookup does not end in time).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fault.remote_node import CHAIN_BLOCKS, LAYOUT, Engine, Node, chain, ended
from kvbm.block import BlockKey
from rigs.bad_proxy import BadProxy, Fault
from rigs.blob_services import ACCESS_KEY, REGION, SECRET_KEY, redis_server, seaweedfs
from rigs.manager_probe import wait_for

SHARED_CHAINS = 96
S3_KEYS = {"object_access_key": ACCESS_KEY, "object_secret_key": SECRET_KEY}


class Pair(NamedTuple):
    """Two nodes at one store: the blocks of `written` were computed by one, and the other reads them past the proxy."""

    proxy: BadProxy
    writer: Node
    reader: Node
    chains: Iterator[int]
    writes: Engine
    reads: Engine
    beside: Engine
    """Another client of the reading node."""

    def written(self) -> list[BlockKey]:
        """A chain that lies in the store, that the reader knows of, and that it has never read."""
        return chain(next(self.chains))

    def comes_back(self, keys: list[BlockKey]) -> None:
        """Wait until a whole chain comes from the store."""
        wait_for(
            lambda: self.reads.look(keys).ready == len(keys),
            30.0,
            lambda: f"a chain does not come back: {self.reader.describe()}\n{self.reader.log()}",
        )

    def well(self) -> None:
        """Wait until both breakers are closed."""
        self.reader.wait_until(
            lambda tier: tier["reading"] == tier["writing"] == "closed", "the store is well, and not used"
        )


def _pair(stack: ExitStack, directory: Path, url: str, port: int, raw: bool, **keys: Any) -> Pair:
    """`url` with `{port}` for the store's."""
    proxy = stack.enter_context(BadProxy(port, seed=port, raw=raw))
    nodes = stack.enter_context(ended([]))
    nodes.append(Node(directory, url.format(port=port), host_blocks=SHARED_CHAINS * CHAIN_BLOCKS, **keys))
    writes = nodes[0].engine()
    for number in range(SHARED_CHAINS):
        assert writes.store(chain(number)) == CHAIN_BLOCKS
    nodes[0].wait_until_written(SHARED_CHAINS * CHAIN_BLOCKS)
    nodes.append(Node(directory, url.format(port=proxy.port), host_blocks=256, **keys))
    reader = nodes[1]
    reads, beside = reader.engine(), reader.engine()
    reader.wait_until_knows(SHARED_CHAINS)
    return Pair(proxy, nodes[0], reader, itertools.count(), writes, reads, beside)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("obstore")
    directory = tmp_path_factory.mktemp("s3")
    with ExitStack() as stack:
        service = stack.enter_context(seaweedfs(directory))
        service.make_bucket("chaos")
        port = int(service.endpoint.rpartition(":")[2])
        url = f"s3://chaos/kv?region={REGION}&endpoint=http://127.0.0.1:{{port}}"
        yield _pair(stack, directory, url, port, raw=False, **S3_KEYS)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("valkey")
    directory = tmp_path_factory.mktemp("redis")
    with ExitStack() as stack:
        port = stack.enter_context(redis_server(directory)).port
        yield _pair(stack, directory, "redis://127.0.0.1:{port}/0", port, raw=True)


def endure(pair: Pair, fault: Fault, opens: bool) -> None:
    """Look up what lies in a store that is unwell until the breaker opens; then the store is well again."""
    at_home, fresh = chain(1000 + next(pair.chains)), [pair.written() for _ in range(4)]
    assert pair.beside.store(at_home) == CHAIN_BLOCKS
    openings = pair.reader.describe()["openings"]
    pair.proxy.set(fault)
    try:
        for turn in range(40):
            begun = pair.reads.begin(fresh[turn % 2])
            # Meanwhile another client is served from host memory.
            assert pair.beside.look(at_home).ready == CHAIN_BLOCKS
            pair.reads.end(begun, fresh[turn % 2])
            if turn >= 3 and not (opens and pair.reader.describe()["openings"] == openings):
                break
        described = pair.reader.describe()
        assert not opens or described["openings"] > openings, described
        # What is off costs no time at all: nothing is promised from there, unless a probe has closed it just now.
        if described["reading"] == "open":
            assert pair.beside.look(at_home).ready == CHAIN_BLOCKS
    finally:
        pair.proxy.heal()
    pair.well()
    for keys in fresh[2:]:
        pair.comes_back(keys)
    pair.reader.assert_nothing_held()


S3_FAULTS = {
    "late": (Fault("delay", delay_s=1.5), True),
    "stalled": (Fault("stall"), True),
    "starved": (Fault("starve"), True),
    "cut": (Fault("cut"), True),
    "refused": (Fault("refuse"), True),
    "black hole": (Fault("black hole"), True),
    "500": (Fault("status", status=500), True),
    "403": (Fault("status", status=403), True),
    "503": (Fault("status", status=503), True),
    "short": (Fault("short"), False),
    "flipped": (Fault("flip"), False),
    "swapped": (Fault("swap"), False),
    "half of all flipped": (Fault("flip", share=0.5), False),
    "half of all cut": (Fault("cut", share=0.5), False),
}


@pytest.mark.parametrize("name", S3_FAULTS)
def test_an_object_store_on_a_bad_day(s3: Pair, name: str) -> None:
    endure(s3, *S3_FAULTS[name])


REDIS_FAULTS = {
    "stalled": (Fault("stall"), True),
    "cut": (Fault("cut"), True),
    "refused": (Fault("refuse"), True),
    "flipped": (Fault("flip"), False),
}


@pytest.mark.parametrize("name", REDIS_FAULTS)
def test_a_redis_on_a_bad_day(redis: Pair, name: str) -> None:
    endure(redis, *REDIS_FAULTS[name])


def test_bits_that_flip_once_cost_one_read(s3: Pair) -> None:
    """The next read of the same blocks finds them: the store has them as they were."""
    keys, corrupt = s3.written(), s3.reader.describe()["corrupt_blocks"]
    s3.proxy.set(Fault("flip", path=b"/packs/", times=1))
    assert s3.reads.look(keys).ready < CHAIN_BLOCKS
    assert s3.reader.describe()["corrupt_blocks"] > corrupt
    s3.comes_back(keys)


def test_a_note_of_new_blocks_that_is_torn_once_is_read_again(s3: Pair) -> None:
    keys = chain(5000)
    s3.proxy.set(Fault("flip", path=b"/log/", times=1))
    befell = s3.proxy.befell["flip"]
    s3.writes.store(keys)
    s3.proxy.wait_for("flip", befell + 1)
    s3.comes_back(keys)
