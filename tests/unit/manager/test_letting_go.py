"""Sessions whose blocks may go down: those of the session alone give their slots in host memory back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.block import BlockKey
from kvbm.groups import Group, GroupKind
from kvbm.layout import BlockLayout
from kvbm.manager.letting_go import EVERY_S, WAITED_S_MAX
from kvbm.policy import DiskFilter
from rigs.foresight import hears, metric, on_host, turn
from rigs.space import KEYS, ME, OTHER, Bench


@pytest.fixture
def roomy(make: Callable[..., Bench]) -> Bench:
    return make(host_slots=64, disk_slots=128, pending_limit=64)


def test_blocks_of_the_session_alone_give_their_slots_back(roomy: Bench) -> None:
    roomy.store(KEYS[:2])
    hears(roomy, KEYS[:6], session="a", demote=True)
    roomy.store(KEYS[2:8], parent=KEYS[1])
    roomy.space.finished(KEYS[5], 8)
    roomy.space.pump()
    assert on_host(roomy, KEYS[:8]) == 8, "they are not on disk yet"
    roomy.finish_all()
    roomy.clock.advance(EVERY_S)
    roomy.space.pump()
    assert on_host(roomy, KEYS[:8]) == 2, "what was there before is others'"
    assert roomy.space.host_pool.evicted["demoted"] == 6
    lease = roomy.space.lookup(ME, 900, KEYS[:8], 0)
    assert lease is not None
    assert len(lease.keys) == 8


def test_what_others_ask_for_stays(roomy: Bench) -> None:
    hears(roomy, KEYS[:6], session="a", demote=True)
    roomy.store(KEYS[:6])
    roomy.finish_all()
    hears(roomy, [*KEYS[:4], *OTHER[:2]])
    roomy.space.finished(KEYS[5], 1)
    roomy.space.pump()
    assert on_host(roomy, KEYS[:6]) == 4


def test_leased_blocks_and_those_before_them_stay(roomy: Bench) -> None:
    hears(roomy, KEYS[:6], session="a", demote=True)
    roomy.store(KEYS[:6])
    roomy.finish_all()
    leases = roomy.space.leases
    session = roomy.space.foresight.sessions.get("", "a")
    assert session is not None
    roomy.space.lookup(ME, 900, KEYS[:4], 0)
    roomy.space.finished(KEYS[5], 1)
    roomy.space.pump()
    assert (on_host(roomy, KEYS[:6]), len(leases)) == (4, 1)
    roomy.space.release(ME, 900)
    roomy.clock.advance(EVERY_S)
    roomy.space.pump()
    assert on_host(roomy, KEYS[:6]) == 0


def test_without_a_copy_on_disk_nothing_is_dropped(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, admission=DiskFilter())
    turn(bench, KEYS[:4], [], session="a", demote=True)
    bench.clock.advance(WAITED_S_MAX + 1)
    bench.space.pump()
    assert on_host(bench, KEYS[:4]) == 4
    assert not bench.space.foresight._letting_go.advance(bench.space.host_pool, bench.space.disk)


def test_a_session_that_comes_back_keeps_what_has_not_gone(roomy: Bench) -> None:
    hears(roomy, KEYS[:4], session="a", demote=True)
    roomy.store(KEYS[:4])
    roomy.space.finished(KEYS[3], 1)
    roomy.space.pump()
    hears(roomy, KEYS[:4], session="a")
    roomy.finish_all()
    roomy.clock.advance(EVERY_S)
    roomy.space.pump()
    assert on_host(roomy, KEYS[:4]) == 4


def test_down_during_a_pause_and_up_again_before_its_end(roomy: Bench) -> None:
    turn(roomy, KEYS[:4], KEYS[4:6], session="a", demote=True, expect_s=30.0)
    roomy.clock.advance(EVERY_S)
    roomy.space.pump()
    assert on_host(roomy, KEYS[:6]) == 0
    roomy.clock.advance(15.0)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:6]) == 6


# ---- several groups


@pytest.mark.parametrize("full", [0, 1])
def test_with_several_groups_the_tail_comes_up_and_goes_down_too(
    make: Callable[..., Bench], full: int
) -> None:
    window = Group(kind=GroupKind.WINDOW, reach=2)
    groups = (Group(), window) if full == 0 else (window, Group())
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, groups=groups)
    bench = make(host_slots=64, disk_slots=128, pending_limit=64, layout=layout)
    grouping = bench.space.lookups._grouping
    assert grouping is not None

    def put(boundary: int) -> list[BlockKey]:
        chain, tail = grouping.chain_keys(KEYS, 0, boundary), grouping.keys(KEYS, grouping.tail(boundary))
        for parent, keys, group in ((None, chain, full), (chain[-1], tail, 1 - full)):
            number = next(bench.numbers)
            slots = bench.space.reserve(ME, number, parent, keys, b"", bytes([group]) * len(keys))
            for key, slot in zip(keys, slots, strict=True):
                if slot >= 0:
                    bench.fill(slot, key)
            bench.space.commit(ME, number)
        return chain + tail

    hears(bench, KEYS[:4], session="a", demote=True, expect_s=30.0)
    blocks = put(6)
    bench.space.finished(KEYS[3], 8)
    session = bench.space.foresight.sessions.get("", "a")
    assert session is not None
    assert session.keys() == KEYS[:6], "what was generated, by the keys of the prompt"
    bench.finish_all()
    bench.clock.advance(EVERY_S)
    bench.space.pump()
    assert on_host(bench, blocks) == 0
    bench.clock.advance(15.0)
    bench.finish_all()
    assert on_host(bench, blocks) == len(blocks)
    assert metric(bench, "prefetched_blocks", cause="expected") == len(blocks)
