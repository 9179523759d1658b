"""What readers are told of host memory: whatever comes and goes, a reader that keeps up knows what is held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import BlockKey, Tier
from kvbm.manager import lent_news
from kvbm.manager.held_keys import HeldKeys
from kvbm.manager.lent_news import NewsCursor, SlotNews
from kvbm.manager.pool import SlotPool
from kvbm.policy import make_policy
from kvbm.tiers.peers.known import Known, unpacked

SLOTS = 12


class Bench:
    """A pool, and who tells of it."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.held = HeldKeys(Tier.HOST, slots)
        pool: SlotPool[BlockKey] = SlotPool(
            Tier.HOST, slots, make_policy("lru", slots), lambda slots, keys, was: self.held.emptied(slots)
        )
        pool.on_committed = self.held.committed
        self.pool = self.held.pool = pool
        self.rung = 0

    def news(self) -> SlotNews:
        return SlotNews(self.held, self.ring)

    def ring(self) -> None:
        self.rung += 1

    def store(self, number: int, tail: bool = False) -> None:
        if not self.pool.holds(key(number)):
            self.pool.commit_all(self.pool.reserve_chain([key(number)], None, 0.0, tail=tail))

    def evict(self, number: int) -> None:
        slot = self.pool.find(key(number))
        if slot is not None:
            self.pool.evict(slot)

    def held_numbers(self) -> set[int]:
        return {int.from_bytes(k[:8], "little") for _, k in self.pool.resident()}


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


class Told:
    """A reader: what it knows after each message."""

    def __init__(self, news: SlotNews, known_max: int = 1000) -> None:
        self.cursor = NewsCursor(news, known_max)
        self.numbers: set[int] = set()
        self.tails: set[int] = set()
        self.complete = False

    def take(self) -> None:
        message = self.cursor.take()
        if message.again:
            self.numbers, self.tails, self.complete = set(), set(), False
        self.numbers -= set(unpacked(message.gone))
        self.numbers |= set(unpacked(message.came)) | set(unpacked(message.tails))
        self.tails |= set(unpacked(message.tails))
        assert not (self.complete and message.complete), "once is enough"
        self.complete = self.complete or message.complete

    def catch_up(self) -> None:
        while self.cursor.something:
            self.take()


actions = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "take", "look", "new"]), st.integers(1, 30)), max_size=80
)


@pytest.mark.parametrize(("ring", "at_once"), [(1 << 16, 4096), (3, 2), (8, 1)])
def test_a_reader_that_catches_up_knows_what_is_held(
    ring: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_news, "RING_MAX", ring)
    monkeypatch.setattr(lent_news, "PRINTS_AT_ONCE", at_once)
    monkeypatch.setattr(lent_news, "LOOKED_AT_ONCE", 5)

    @given(actions)
    def check(actions: list[tuple[str, int]]) -> None:
        bench = Bench()
        for number in range(40, 46):
            bench.store(number)
        news = bench.news()
        readers = [Told(news)]
        for verb, number in actions:
            if verb == "store":
                bench.store(number)
            elif verb == "evict":
                bench.evict(number)
            elif verb == "look":
                news.look()
            elif verb == "new":
                readers.append(Told(news))
            elif readers[number % len(readers)].cursor.something:
                readers[number % len(readers)].take()
        while news.look():
            pass
        for reader in readers:
            reader.catch_up()
            assert reader.numbers == bench.held_numbers()
            assert reader.complete

    check()


def test_a_reader_of_few_is_told_the_newest() -> None:
    bench = Bench()
    news = bench.news()
    for number in range(1, 11):
        bench.store(number)
    while news.look():
        pass
    reader = Told(news, known_max=4)
    reader.catch_up()
    assert reader.numbers == {7, 8, 9, 10}


def test_tails_are_told_apart() -> None:
    bench = Bench()
    bench.store(1)
    bench.store(2, tail=True)
    news = bench.news()
    while news.look():
        pass
    bench.store(3, tail=True)
    reader = Told(news)
    reader.catch_up()
    assert (reader.numbers, reader.tails) == ({1, 2, 3}, {2, 3})


def test_an_event_rings_and_silence_does_not() -> None:
    bench = Bench()
    news = bench.news()
    bench.store(1)
    assert bench.rung == 1
    news.close()
    bench.store(2)
    assert bench.rung == 1


def test_known_takes_what_is_told() -> None:
    bench = Bench()
    news = bench.news()
    bench.store(5)
    message = NewsCursor(news, 10).take()
    link = Known().add_link(10)
    link.came(unpacked(message.came))
