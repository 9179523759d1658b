"""Leases for readers: bounded, given back, ended at their deadline, and a turn that stays short."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest

from kvbm.block import BlockKey
from kvbm.layout import Namespace
from kvbm.manager.lending import Lending, LendOptions
from kvbm.manager.peer_messages import Admitted, AskFor, Enter, GiveBack, Leave, Part, Refused, TellMore
from kvbm.manager.space import Space
from kvbm.tiers.peers.known import unpacked
from kvbm.tiers.peers.wire import Held
from rigs.space import KEYS, LAYOUT, OTHER, Bench

NAMESPACE = Namespace(model="m", fields=(("a", "b"),))


class Reader:
    """What a thread would get."""

    def __init__(self) -> None:
        self.got: list[Admitted | Refused | Part | Held] = []

    def post(self, message: Admitted | Refused | Part | Held) -> None:
        self.got.append(message)

    def parts(self) -> list[Part]:
        return [each for each in self.got if isinstance(each, Part)]

    @property
    def refusal(self) -> str:
        return next((each.line for each in self.got if isinstance(each, Refused)), "")


class Shop:
    def __init__(self, **options: float) -> None:
        self.bench = Bench(host_slots=32, disk=False)
        self.spaces: list[tuple[Namespace, Space]] = [(NAMESPACE, self.bench.space)]
        chosen = LendOptions(**{"share": 0.25, "part_bytes": 4 * LAYOUT.block_bytes, **options})  # type: ignore[arg-type]
        self.lending = Lending(self.spaces, self.bench.clock, chosen)
        self.numbers = count(1)

    def enter(self, **changed: object) -> Reader:
        reader = Reader()
        enter = Enter(reader, NAMESPACE.fingerprint, LAYOUT.slot_bytes, 1, 1000)._replace(**changed)
        self.lending.request(enter)
        self.turns()
        return reader

    def ask(self, reader: Reader, keys: list[BlockKey]) -> int:
        number = next(self.numbers)
        self.lending.request(AskFor(reader, number, keys))
        self.turns()
        return number

    def turns(self) -> None:
        """As the loop does: while there is something to do."""
        for _ in range(1000):
            self.lending.turn()
            try:
                os.eventfd_read(self.lending.fileno())
            except BlockingIOError:
                return
        raise AssertionError("it never comes to rest")

    @property
    def leased(self) -> int:
        self.bench.space.check()
        return self.bench.space.host_pool.counts().leased


@pytest.fixture
def shop() -> Iterator[Shop]:
    opened = Shop()
    opened.bench.store(KEYS[:16])
    yield opened
    opened.lending.close()
    assert opened.leased == 0
    opened.bench.close()


def test_blocks_are_leased_in_parts_until_they_are_given_back(shop: Shop) -> None:
    reader = shop.enter()
    shop.ask(reader, KEYS[:12])
    first, second = reader.parts()
    assert (first.first, len(first.blocks), first.last) == (0, 4, False)
    assert (second.first, len(second.blocks), second.last) == (4, 4, False)
    assert shop.leased == 8, "two parts of one reader"
    assert all(block is not None and block.intact() for block in first.blocks)
    shop.lending.request(GiveBack(reader, first.lease))
    shop.turns()
    third = reader.parts()[2]
    assert (third.first, len(third.blocks), third.last) == (8, 4, True)
    assert shop.leased == 8
    for part in (second, third):
        shop.lending.request(GiveBack(reader, part.lease))
    shop.turns()
    assert shop.leased == 0


def test_the_bytes_are_those_of_the_block(shop: Shop) -> None:
    reader = shop.enter()
    shop.ask(reader, [KEYS[3]])
    (block,) = reader.parts()[0].blocks
    assert block is not None
    slot = shop.bench.space.host_pool.find(KEYS[3])
    assert slot is not None
    assert b"".join(map(bytes, block.views)) == shop.bench.content(slot)
    assert block.engine_hash == KEYS[3]


def test_what_is_not_held_is_said_and_leases_nothing(shop: Shop) -> None:
    reader = shop.enter()
    shop.ask(reader, [OTHER[0], KEYS[2], OTHER[1]])
    (part,) = reader.parts()
    assert [block is None for block in part.blocks] == [True, False, True]
    assert shop.leased == 1
    shop.ask(reader, OTHER[:3])
    assert reader.parts()[1].lease == 0
    assert shop.leased == 1


def test_all_readers_together_have_a_share_and_take_turns(shop: Shop) -> None:
    readers = [shop.enter() for _ in range(3)]
    for reader in readers:
        shop.ask(reader, KEYS[:16])
    assert shop.leased == 8, "a quarter of 32 slots"
    for _ in range(20):
        for reader in readers:
            for part in reader.parts():
                shop.lending.request(GiveBack(reader, part.lease))
        shop.turns()
        assert shop.leased <= 8
    assert [sum(len(part.blocks) for part in reader.parts()) for reader in readers] == [16, 16, 16]
    assert [reader.parts()[-1].last for reader in readers] == [True] * 3


def test_a_lease_ends_at_its_deadline_and_its_slot_may_go(shop: Shop) -> None:
    reader = shop.enter()
    shop.ask(reader, KEYS[:4])
    (part,) = reader.parts()
    assert shop.bench.space.clear("host")[1] == 4, "leased blocks stay"
    shop.bench.clock.advance(5.1)
    shop.turns()
    assert shop.leased == 0 and shop.lending.counts["expired"] == 1
    shop.bench.space.clear("host")
    assert not any(block.intact() for block in part.blocks if block is not None)
    shop.lending.request(GiveBack(reader, part.lease))  # too late, and no error
    shop.turns()


def test_the_spaces_own_deadlines_end_it_too(shop: Shop) -> None:
    reader = shop.enter()
    shop.ask(reader, KEYS[:4])
    shop.bench.clock.advance(5.1)
    shop.bench.space.expire_leases()
    assert shop.leased == 0
    shop.turns()
    assert shop.lending.leased_count == 0


def test_a_reader_that_leaves_has_nothing(shop: Shop) -> None:
    reader, other = shop.enter(), shop.enter()
    shop.ask(reader, KEYS[:16])
    shop.ask(other, KEYS[:4])
    assert other.parts() == []
    shop.lending.request(Leave(reader))
    shop.turns()
    assert shop.leased == 4 and len(other.parts()) == 1
    assert shop.lending.reader_count == 1


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"fingerprint": bytes(32)}, "namespace 000000000000 is not served here"),
        ({"slot_bytes": 8192}, "1 parts of 4096 bytes here, and 1 of 8192 there"),
        ({"shard_count": 2}, "and 2 of 4096 there"),
    ],
)
def test_who_cannot_be_served_is_told_why(shop: Shop, changed: dict[str, object], line: str) -> None:
    reader = shop.enter(**changed)
    assert line in reader.refusal
    assert shop.lending.reader_count == 0


def test_staging_memory_and_failed_spaces_are_not_lent(shop: Shop) -> None:
    space = shop.bench.space
    space.options = msgspec.structs.replace(space.options, staging=True)
    assert "keeps no blocks in host memory" in shop.enter().refusal
    space.options = msgspec.structs.replace(space.options, staging=False)
    reader = shop.enter()
    shop.ask(reader, KEYS[:4])
    space.failure = "broken"
    shop.turns()
    assert "not served here any more" in reader.refusal
    assert shop.lending.reader_count == shop.lending.leased_count == 0
    space.failure = ""


def test_a_space_that_is_dropped_sends_its_readers_away(shop: Shop) -> None:
    reader = shop.enter()
    shop.spaces.clear()
    shop.turns()
    assert reader.refusal and shop.lending.reader_count == 0


def test_news_come_when_the_last_ones_are_sent(shop: Shop) -> None:
    reader = shop.enter()
    told = [each for each in reader.got if isinstance(each, Held)]
    assert len(told) == 1 and told[0].again
    shop.bench.store(KEYS[20:22])
    shop.turns()
    assert sum(isinstance(each, Held) for each in reader.got) == 1, "its thread has not asked for more"
    seen: list[int] = []
    for _ in range(10):
        shop.lending.request(TellMore(reader))
        shop.turns()
    for each in reader.got:
        if isinstance(each, Held):
            seen += [*unpacked(each.came)]
    expected = [int.from_bytes(key[:8], "little") for key in [*KEYS[:16], *KEYS[20:22]]]
    assert sorted(set(seen)) == sorted(expected)
    # Now it is told all, and waits: the next block wakes the loop by itself.
    shop.bench.store(KEYS[30:31])
    assert os.eventfd_read(shop.lending.fileno())


def late_clock() -> Callable[[], float]:
    """A clock that moves with each look at it: all work takes long."""
    now = count(start=100.0, step=0.002)
    return lambda: next(now)


def test_a_turn_takes_few_requests_when_they_take_long(shop: Shop) -> None:
    readers = [shop.enter() for _ in range(4)]
    shop.lending._clock = late_clock()
    for reader in readers:
        shop.lending.request(AskFor(reader, 1, KEYS[:1]))
    os.eventfd_read(shop.lending.fileno())
    shop.lending.turn()
    assert sum(len(reader.parts()) for reader in readers) == 1, "one, for it has to go on"
    assert os.eventfd_read(shop.lending.fileno()), "the rest is for the next turn"
    shop.turns()
    assert [len(reader.parts()) for reader in readers] == [1, 1, 1, 1]


def test_a_turn_leases_few_parts_when_that_takes_long(shop: Shop) -> None:
    first, *others = [shop.enter() for _ in range(4)]
    shop.ask(first, KEYS[:8])
    for reader in others:
        shop.ask(reader, KEYS[:1])
    assert shop.leased == 8 and not any(reader.parts() for reader in others), "they wait for room"
    shop.lending._clock = late_clock()
    shop.lending.request(GiveBack(first, first.parts()[0].lease))
    shop.lending.turn()
    assert sum(len(reader.parts()) for reader in others) == 1
    shop.turns()
    assert [len(reader.parts()) for reader in others] == [1, 1, 1]
