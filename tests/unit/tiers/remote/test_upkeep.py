"""What nodes learn of one another, and how they keep a store in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbm.block import Outcome
from kvbm.testing.remote_contract import (
    chain,
    keys_of,
    load_each,
    store,
)
from kvbm.testing.stored_runs import LAYOUT
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.remote.contract import NOWHERE
from kvbm.tiers.remote.prefixed import PrefixedBlobs
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs
from rigs.remote_nodes import WAIT_S, Nodes


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for node in nodes.made:
        node.close()


def test_nodes_learn_by_the_log_and_not_by_lookups(nodes: Nodes) -> None:
    here, there = nodes.make(), nodes.make()
    for first in range(0, 40, 4):
        store(here, LAYOUT, chain(first, 4))
    nodes.pass_on(here, seconds=1.0)
    before = nodes.blobs.requests()
    nodes.pass_on(there)
    keys = keys_of(chain(0, 40))
    assert NOWHERE not in there.places(keys)
    after = nodes.blobs.requests()
    assert {kind: after[kind] - before[kind] for kind in after} == {
        "put": 0,
        "get": 1,
        "list": 1,
        "delete": 0,
    }


def test_a_torn_segment_is_skipped_and_a_gap_is_made_good_by_a_listing(nodes: Nodes) -> None:
    here, there = nodes.make(), nodes.make()
    for number in range(3):
        store(here, LAYOUT, chain(10 * number, 2))
        nodes.pass_on(here, seconds=1.0)
        segments = sorted(name for name in nodes.blobs.blobs if "/log/" in name)
        if number == 0:
            nodes.blobs.blobs[segments[0]] = b"torn"
        elif number == 1:
            nodes.blobs.delete(segments[-1:])
    nodes.pass_on(there)
    nodes.pass_on(there)
    assert there.describe()["log"] == {**there.describe()["log"], "gaps": 1, "skipped": 1}  # type: ignore[dict-item]
    for number in range(3):
        assert NOWHERE not in there.places(keys_of(chain(10 * number, 2)))


def test_packs_of_a_segment_that_stays_torn_are_found_by_a_listing(nodes: Nodes) -> None:
    here, there = nodes.make(), nodes.make()
    nodes.pass_on(there)
    store(here, LAYOUT, chain(0, 2))
    nodes.pass_on(here, seconds=1.0)
    (segment,) = (name for name in nodes.blobs.blobs if "/log/" in name)
    nodes.blobs.blobs[segment] = b"torn"
    for _ in range(2):
        nodes.pass_on(there)
    assert there.describe()["log"] == {**there.describe()["log"], "gaps": 0, "skipped": 1}  # type: ignore[dict-item]
    assert NOWHERE not in there.places(keys_of(chain(0, 2)))


def test_a_new_node_reads_the_ends_of_the_newest_packs_first(nodes: Nodes) -> None:
    here = nodes.make()
    for first in range(0, 60, 2):
        store(here, LAYOUT, chain(first, 2))
        nodes.clock.advance(1.0)
    nodes.blobs.delete([name for name in nodes.blobs.blobs if "/log/" in name])
    there = nodes.make(catalogue_blocks=20)
    nodes.pass_on(there)
    known = [first for first in range(0, 60, 2) if there.places(keys_of(chain(first, 2)))[0] != NOWHERE]
    assert known == list(range(40, 60, 2))
    assert load_each(there, LAYOUT, keys_of(chain(40, 20))) == [Outcome.HIT] * 20


def untold(nodes: Nodes, *blocks: list[BlockHead]) -> None:
    """Another node writes these packs, and nothing of what it notes in its log ever arrives."""
    rule = BlobRule(fault=BlobFault.LOST, operation="put", name="/log/")
    node = nodes.make(FaultyBlobs(nodes.blobs, rule))
    for each in blocks:
        store(node, LAYOUT, each)
    nodes.pass_on(node, seconds=1.0)


def test_a_pack_that_was_left_untold_goes_like_every_other(nodes: Nodes) -> None:
    """It is collected when nobody used it for long, also where no node ever found it."""
    untold(nodes, chain(0, 2))
    node = nodes.make(ttl_s=5000.0, collect_period_s=1000.0, collect=True)
    nodes.clock.advance(4000.0)
    node.collector.run(in_turn=False)
    assert len(nodes.packs()) == 1
    nodes.clock.advance(1100.0)
    node.collector.run(in_turn=False)
    assert nodes.packs() == []
    assert load_each(node, LAYOUT, keys_of(chain(0, 2))) == [Outcome.MISS] * 2


def test_who_finds_its_own_pack_there_tells_of_it(nodes: Nodes) -> None:
    """Whoever wrote it may have been killed before it told."""
    here, there = nodes.make(), nodes.make()
    untold(nodes, chain(0, 2))
    nodes.pass_on(here, there)
    assert there.places(keys_of(chain(0, 2)))[0] == NOWHERE
    store(here, LAYOUT, chain(0, 2))
    assert here.describe()["existed"] == 1
    nodes.pass_on(here, there)
    nodes.pass_on(there)
    assert NOWHERE not in there.places(keys_of(chain(0, 2)))


def test_a_quiet_node_looks_less_often(nodes: Nodes) -> None:
    node = nodes.make(poll_s=5.0, poll_max_s=40.0)
    looks = []
    for _ in range(300):
        before = nodes.blobs.requests()["list"]
        nodes.pass_on(node, seconds=1.0)
        looks.append(nodes.blobs.requests()["list"] - before)
    assert sum(looks[200:]) <= 3
    store(node, LAYOUT, chain(0, 1))
    before = nodes.blobs.requests()["list"]
    nodes.pass_on(node, seconds=5.0)
    assert nodes.blobs.requests()["list"] > before


def test_used_packs_are_touched_now_and_then(nodes: Nodes) -> None:
    node = nodes.make(ttl_s=1000.0)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    (name,) = nodes.packs()
    written_s = nodes.blobs.modified_s[name]
    for passed_s, touched in ((249.0, False), (2.0, True), (100.0, False)):
        nodes.clock.advance(passed_s)
        before_s = nodes.blobs.modified_s[name]
        load_each(node, LAYOUT, keys_of(blocks))
        nodes.pass_on(node, seconds=2.0)
        assert (nodes.blobs.modified_s[name] != before_s) is touched
    assert nodes.blobs.modified_s[name] > written_s


def test_touches_that_fail_are_counted(nodes: Nodes) -> None:
    """A store that lets nobody touch what it has can be read and written to all the same."""
    store_refuses = FaultyBlobs(nodes.blobs, BlobRule(fault=BlobFault.REFUSED, operation="touch"))
    node = nodes.make(store_refuses, ttl_s=1000.0)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    nodes.clock.advance(251.0)
    load_each(node, LAYOUT, keys_of(blocks))
    nodes.pass_on(node, seconds=2.0)
    described = node.describe()
    assert (described["touched"], described["touch_errors"]) == (0, 1)
    assert (described["reading"], described["writing"]) == ("closed", "closed")


def test_a_touch_that_fails_is_no_reason_to_forget_the_others(nodes: Nodes) -> None:
    node = nodes.make(
        FaultyBlobs(nodes.blobs, BlobRule(fault=BlobFault.FAILED, operation="touch", times=1)), ttl_s=1000.0
    )
    told = [chain(10 * number, 1) for number in range(5)]
    for blocks in told:
        store(node, LAYOUT, blocks)
    nodes.clock.advance(251.0)
    began_s = nodes.clock()
    for blocks in told:
        load_each(node, LAYOUT, keys_of(blocks))
    nodes.pass_on(node, seconds=2.0)
    nodes.pass_on(node, seconds=2.0)
    assert sum(nodes.blobs.modified_s[name] > began_s for name in nodes.packs()) == 4


def test_nodes_collect_in_turn(nodes: Nodes) -> None:
    here, there = (nodes.make(collect=True, ttl_s=5000.0, collect_period_s=1000.0) for _ in range(2))
    store(here, LAYOUT, chain(0, 2))
    for _ in range(20):
        nodes.pass_on(here, there, seconds=200.0)
    assert nodes.packs()
    for _ in range(20):
        nodes.pass_on(here, there, seconds=200.0)
    assert nodes.packs() == []
    done = [node.describe()["collected"] for node in (here, there)]
    assert None not in done


def test_what_is_drained_is_in_the_log(nodes: Nodes) -> None:
    node = nodes.make()
    store(node, LAYOUT, chain(0, 1))
    assert not [name for name in nodes.blobs.blobs if "/log/" in name]
    assert node.drain(WAIT_S)
    assert [name for name in nodes.blobs.blobs if "/log/" in name]


def test_a_prefix_hides_everything_else(nodes: Nodes) -> None:
    part = PrefixedBlobs(nodes.blobs, "a/")
    nodes.blobs.put("b/x", [b"1"])
    part.put("x", [b"12"])
    assert [info.name for info in part.listing("")] == ["x"]
    assert part.read("x", 0, 9) == b"12" and part.read_end("x", 1) == (b"2", 2)
    part.delete(["x"])
    assert list(nodes.blobs.blobs) == ["b/x"]
    assert part.place == "memory://a/"
