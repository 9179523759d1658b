"""The leader's account of what was announced, against a router that keeps its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import KEY_BYTES, Tier
from kvbm.clock import ManualClock
from kvbm.leader import announced
from kvbm.leader.announced import ABSENT_S_MAX, Announced
from kvbm.protocol import Announce, RemovedBlocks, StoredRun, TierEvents

HOST, DISK = int(Tier.HOST), int(Tier.DISK)
TOKENS = 8


def name(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def names(*numbers: int) -> bytes:
    return b"".join(map(name, numbers))


def run(*numbers: int, tier: int = HOST, before: int = 0) -> StoredRun:
    tokens = b"".join(number.to_bytes(TOKENS, "big") for number in numbers)
    return StoredRun(tier, names(*numbers), name(before) if before else b"", tokens)


class Bench:
    def __init__(self, on: bool = True) -> None:
        self.clock = ManualClock(10.0)
        self.sent: list[object] = []
        self.link: Any = SimpleNamespace(ready=object(), send=self.sent.append)
        self.announced = Announced(self.link, self.clock, on)
        self.router: set[tuple[int, bytes]] = set()

    def publish(self, cleared: bool = False) -> None:
        """A router takes in what there is. Told twice or out of nothing, it complains."""
        if cleared:
            self.router.clear()
        for event in self.announced.take():
            blocks = {
                (event.tier, event.hashes[i : i + KEY_BYTES]) for i in range(0, len(event.hashes), KEY_BYTES)
            }
            if isinstance(event, StoredRun):
                assert not blocks & self.router
                assert len(event.tokens) == TOKENS * len(blocks)
                self.router |= blocks
            else:
                assert blocks <= self.router
                self.router -= blocks


def test_a_block_is_announced_once_in_each_tier_and_removed_once() -> None:
    bench = Bench()
    bench.announced.begin()
    assert bench.sent == [Announce()]
    bench.announced.take_in(TierEvents(stored=(run(1, 2), run(1, 2, tier=DISK)), complete=True))
    bench.publish()
    bench.announced.take_in(TierEvents(stored=(run(1, 2, 3),)))
    bench.publish()
    assert bench.router == {(HOST, name(n)) for n in (1, 2, 3)} | {(DISK, name(n)) for n in (1, 2)}
    bench.announced.take_in(TierEvents(removed=(RemovedBlocks(HOST, names(2, 9)),)))
    bench.publish()
    assert bench.router == {(HOST, name(n)) for n in (1, 3)} | {(DISK, name(n)) for n in (1, 2)}


def test_the_part_of_a_run_that_is_new_keeps_its_tokens_and_the_block_before() -> None:
    bench = Bench()
    bench.announced.take_in(TierEvents(stored=(run(2, before=1),)))
    bench.announced.take()
    bench.announced.take_in(TierEvents(stored=(run(2, 3, 4, before=1),)))
    assert bench.announced.take() == [run(3, 4, before=2)]


def test_a_manager_that_comes_back_announces_nothing_twice_and_what_it_lost_goes() -> None:
    bench = Bench()
    bench.announced.take_in(TierEvents(stored=(run(1, 2, 3),), complete=True))
    bench.publish()
    bench.announced.begin()  # it was restarted
    bench.announced.take_in(TierEvents(stored=(run(2, 3, 4),)))
    bench.publish()
    assert bench.router == {(HOST, name(n)) for n in (1, 2, 3, 4)}, "the first may still come"
    bench.announced.take_in(TierEvents(complete=True))
    bench.publish()
    assert bench.router == {(HOST, name(n)) for n in (2, 3, 4)}


def test_after_an_emptied_cache_everything_is_announced_again() -> None:
    """Some routers take it for all tiers, some for the device's alone: the account is right for both in the end."""
    bench = Bench()
    bench.announced.take_in(TierEvents(stored=(run(1, 2, 3),), complete=True))
    bench.publish()
    bench.announced.take_in(TierEvents(removed=(RemovedBlocks(HOST, names(3)),), stored=(run(4),)))
    bench.announced.again()
    assert bench.sent == [Announce()]
    bench.announced.take_in(TierEvents(stored=(run(2),)))
    bench.announced.take_in(TierEvents(complete=True))
    events = bench.announced.take()
    assert events[:2] == [RemovedBlocks(HOST, names(3)), run(2)], "what went before is not forgotten"
    assert events[2:] == [RemovedBlocks(HOST, names(1))], "the fourth was never announced"


def test_a_manager_that_stays_away_has_no_blocks() -> None:
    bench = Bench()
    bench.announced.take_in(TierEvents(stored=(run(1),), complete=True))
    bench.publish()
    bench.link.ready = None
    bench.clock.advance(ABSENT_S_MAX - 1.0)
    bench.publish()
    assert bench.router
    bench.clock.advance(2.0)
    bench.publish()
    assert not bench.router
    bench.publish()


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "UNTAKEN_MAX", 3)
    bench = Bench()
    for number in range(1, 20, 2):
        bench.announced.take_in(TierEvents(stored=(run(number),)))
    assert len(bench.announced.take()) <= 3
    assert Announce() in bench.sent, "it asks for everything again"


def test_nothing_is_asked_where_no_events_are_wanted() -> None:
    bench = Bench(on=False)
    bench.announced.begin()
    bench.announced.again()
    assert bench.sent == []


@given(st.data())
def test_the_router_believes_what_the_manager_holds(data: st.DataObject) -> None:
    bench, held = Bench(), set[int]()
    bench.announced.begin()
    bench.announced.take_in(TierEvents(complete=True))
    for _ in range(data.draw(st.integers(1, 20))):
        what = data.draw(st.sampled_from(["store", "remove", "restart", "publish"]))
        blocks = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True))
        if what == "store":
            new = [block for block in blocks if block not in held]
            held.update(new)
            if new:
                bench.announced.take_in(TierEvents(stored=(run(*new),)))
        elif what == "remove":
            gone = [block for block in blocks if block in held]
            held.difference_update(gone)
            bench.announced.take_in(TierEvents(removed=(RemovedBlocks(HOST, names(*gone)),)))
        elif what == "restart":
            held.intersection_update(blocks)
            bench.announced.begin()
            kept = tuple(run(block) for block in sorted(held))
            bench.announced.take_in(TierEvents(stored=kept, complete=True))
        else:
            bench.publish()
    bench.publish()
    assert bench.router == {(HOST, name(block)) for block in held}
