"""A store on bad days, below real managers: no block has wrong bytes, nobody waits longer than the deadline of a read,
and when the store is well again its blocks are found again, by themselves.

The engines are clients that know the bytes of every block (`remote_node.Engine.end` compares all that is said to be
ready, and fails where a lookup does not end in time).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fault.remote_node import CHAIN_BLOCKS, Engine, Node, chain, ended
from kvbm.block import BlockKey
from rigs.bad_proxy import KINDS, BadProxy, Fault
from rigs.blob_services import ACCESS_KEY, REGION, SECRET_KEY, moto, redis_server
from rigs.manager_probe import wait_for

SHARED_CHAINS = 256
READ_IN_ANY_ORDER = range(164, SHARED_CHAINS)
"""Chains of a test that reads them more than once; the others are read once."""
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
        number = next(self.chains)
        assert number < READ_IN_ANY_ORDER.start
        return chain(number)

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
    proxy = stack.enter_context(BadProxy(port, seed=1, raw=raw))
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
    reader.wait_until(lambda tier: tier["complete"], "it has not listed all packs")
    return Pair(proxy, nodes[0], reader, itertools.count(), writes, reads, beside)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("obstore")
    directory = tmp_path_factory.mktemp("s3")
    with ExitStack() as stack:
        service = stack.enter_context(moto(directory))
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


def endure(pair: Pair, fault: Fault, trouble: str) -> None:
    """Look up what lies in a store with this fault, at least four times and until it was met (with a `trouble`: until
    the tier is off). Then heal the store."""
    at_home = chain(1000 + next(pair.chains))
    fresh = [pair.written() for _ in range(4)]
    assert pair.beside.store(at_home) == CHAIN_BLOCKS
    before = pair.reader.describe()
    befell, said = pair.proxy.befell[fault.kind], len(pair.reader.log())

    def was_met() -> bool:
        now = pair.reader.describe()
        if trouble:
            return bool(now["openings"] != before["openings"])
        if fault.kind in ("flip", "short"):
            return bool(now["corrupt_blocks"] > before["corrupt_blocks"])
        return pair.proxy.befell[fault.kind] > befell

    pair.proxy.set(fault)
    try:
        for turn in itertools.count():
            keys = fresh[turn % 2] if trouble else pair.written()
            begun = pair.reads.begin(keys)
            # Meanwhile another client is served from host memory.
            assert pair.beside.look(at_home).ready == CHAIN_BLOCKS
            pair.reads.end(begun, keys)
            if turn >= 3 and was_met():
                break
            assert turn < 40, f"the fault is not met: {pair.reader.describe()}"
        if fault.kind != "refuse":
            assert pair.proxy.befell[fault.kind] > befell
    finally:
        pair.proxy.heal()
    pair.well()
    for keys in fresh[2:]:
        pair.comes_back(keys)
    assert f"({trouble})" in pair.reader.log()[said:] or not trouble
    pair.reader.assert_nothing_held()


S3_FAULTS = {
    "late": (Fault("delay", delay_s=1.5), "slow"),
    "stalled": (Fault("stall"), "slow"),
    "starved": (Fault("starve"), "slow"),
    "cut": (Fault("cut"), "unreachable"),
    "refused": (Fault("refuse"), "unreachable"),
    "black hole": (Fault("black hole"), "slow"),
    "500": (Fault("status", status=500), "failed"),
    "403": (Fault("status", status=403), "refused"),
    "503": (Fault("status", status=503), "throttled"),
    "short": (Fault("short", path=b"/packs/"), ""),
    "flipped": (Fault("flip", path=b"/packs/"), ""),
    "swapped": (Fault("swap", path=b"/packs/"), ""),
    "half of all flipped": (Fault("flip", share=0.5), ""),
    "half of all cut": (Fault("cut", share=0.5), ""),
}
"""And what is said when such a store is not asked any more: nothing, where that may be or not."""


@pytest.mark.slow
@pytest.mark.parametrize("name", S3_FAULTS)
def test_an_object_store_on_a_bad_day(s3: Pair, name: str) -> None:
    endure(s3, *S3_FAULTS[name])


REDIS_FAULTS = {
    "stalled": (Fault("stall"), "slow"),
    "cut": (Fault("cut"), "unreachable"),
    "refused": (Fault("refuse"), "unreachable"),
    "flipped": (Fault("flip", share=0.7), ""),
}


@pytest.mark.parametrize("name", REDIS_FAULTS)
def test_a_redis_on_a_bad_day(redis: Pair, name: str) -> None:
    endure(redis, *REDIS_FAULTS[name])


def any_fault(chance: random.Random) -> Fault:
    """One of all kinds, for all replies or for a part of them."""
    kind = chance.choice([kind for kind in KINDS if kind != "hold uploads"])
    delay_s, status = chance.choice((0.05, 0.2, 0.8)), chance.choice((403, 500, 503))
    path = chance.choice((b"", b"", b"/packs/", b"/log/"))
    return Fault(kind, delay_s, status, chance.choice((0.1, 0.5, 1.0)), path)  # type: ignore[arg-type]  # KINDS are the literals


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 9))])
def test_faults_in_any_order(s3: Pair, seed: int) -> None:
    chance, told = random.Random(seed), list[str]()
    try:
        for _ in range(40):
            if chance.random() < 0.4:
                fault = any_fault(chance)
                told.append(str(fault))
                s3.proxy.set(fault)
            keys = chain(chance.choice(READ_IN_ANY_ORDER))
            begun = s3.reads.begin(keys)
            if chance.random() < 0.5:
                other = chain(chance.randrange(9000 + 100 * seed, 9100 + 100 * seed))
                s3.beside.store(other)
                assert s3.beside.look(other).ready == CHAIN_BLOCKS
            s3.reads.end(begun, keys)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, after {told}") from error
    finally:
        s3.proxy.heal()
    s3.well()
    fresh = chain(20_000 + seed)
    s3.writes.store(fresh)
    s3.comes_back(fresh)
    s3.reader.assert_nothing_held()


def test_bits_that_flip_once_cost_one_read(s3: Pair) -> None:
    """The next read of the same blocks finds them: the store has them as they were."""
    corrupt = s3.reader.describe()["corrupt_blocks"]
    keys = s3.written()
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


def test_wrong_bytes_would_be_noticed(redis: Pair, tmp_path: Path) -> None:
    """Control: a node that verifies nothing hands out what the store answers, and the engine sees it."""
    url = redis.reader.settings.remote
    assert url is not None
    with ended([Node(tmp_path, url, {"blind": True})]) as nodes:
        engine = nodes[0].engine()
        nodes[0].wait_until_knows(SHARED_CHAINS)
        redis.proxy.set(Fault("flip"))
        try:
            with pytest.raises(AssertionError, match="wrong bytes"):
                _look_at_all(engine)
        finally:
            redis.proxy.heal()


def _look_at_all(engine: Engine) -> None:
    for number in range(SHARED_CHAINS):
        engine.look(chain(number))


def test_nobody_waits_for_a_store_but_those_who_want_its_blocks(redis: Pair, tmp_path: Path) -> None:
    """While one lookup waits for a silent store, and may do so for long, another is answered from host memory."""
    at_home, away, url = chain(7000), redis.written(), redis.reader.settings.remote
    assert url is not None
    with ended([Node(tmp_path, url, remote_deadline_ms=60_000)]) as nodes:
        waits, other = nodes[0].engine(), nodes[0].engine()
        nodes[0].wait_until_knows(SHARED_CHAINS)
        assert other.store(at_home) == CHAIN_BLOCKS
        redis.proxy.set(Fault("stall"))
        begun = waits.begin(away)
        redis.proxy.wait_for("stall", redis.proxy.befell["stall"] + 1)
        for _ in range(20):
            assert other.look(at_home).ready == CHAIN_BLOCKS
        assert not waits.has_ended(begun)
        redis.proxy.heal()
        waits.end(begun, away, limit_s=60.0)


@pytest.mark.slow
def test_a_node_that_is_killed_half_way_through_an_upload(s3: Pair, tmp_path: Path) -> None:
    """What it had written before is found; what it was writing is not there, and the next one writes it."""
    whole, half = chain(8000), chain(8001)
    url = s3.writer.settings.remote
    assert url is not None
    target = int(url.rpartition(":")[2])
    with BadProxy(target) as way:
        victim = Node(tmp_path, url.replace(f":{target}", f":{way.port}"), **S3_KEYS)
        engine = victim.engine()
        assert engine.store(whole) == CHAIN_BLOCKS
        s3.comes_back(whole)
        way.set(Fault("hold uploads", path=b"/packs/"))
        assert engine.store(half) == CHAIN_BLOCKS
        way.wait_for("hold uploads")
        victim.kill()
    assert s3.reads.look(half).ready == 0
    with ended([Node(tmp_path, url, **S3_KEYS)]) as nodes:
        assert nodes[0].engine().store(half) == CHAIN_BLOCKS
        nodes[0].wait_until_written(CHAIN_BLOCKS)
        s3.comes_back(half)
