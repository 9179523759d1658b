"""The lender's side of an offer, with agents of the test's own: which blocks are brought, and which have failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvbm.clock import ManualClock
from kvbm.manager.peer_messages import LentBlock
from kvbm.manager.peer_moving import ANSWER_S, STAGING_BYTES, Moving
from kvbm.tiers.host import HostArena
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.mover_wire import Mapped
from kvbm.tiers.peers.staging import Staging
from kvbm.tiers.peers.wire import BROKEN, WHOLE, Offer
from rigs.movers import ModelNetwork, model_mover
from rigs.peers import LAYOUT, content, keys_of, wait_until

KEYS = keys_of(8)
SIZE = LAYOUT.block_bytes


class Bench:
    """Memory that a reader offered, an arena with KEYS in its slots, and what becomes of the offer."""

    def __init__(self) -> None:
        self.network, self.clock = ModelNetwork(), ManualClock(50.0)
        self.mover: Mover = model_mover(self.network)
        self.there = Staging(SIZE, 8)
        self.reader = self.mover.open(self.there, lands=True)
        answers: list[object] = []
        wait_until(lambda: answers.append(self.reader.receive()) or answers[-1])
        mapped = answers[-1]
        assert isinstance(mapped, Mapped)
        self.offer = Offer(
            number=1, metadata=mapped.metadata, address=mapped.address, place_bytes=SIZE, places=8
        )
        self.arena = HostArena(LAYOUT, 8, touch_threads=0)
        for slot, key in enumerate(KEYS):
            for view, shard in zip(self.arena.slot_views(slot), content(key), strict=True):
                view[:] = shard
        self.moving = self.moves(self.offer)

    def moves(self, offer: Offer, block_bytes: int = SIZE) -> Moving:
        moving = Moving(self.mover, offer, block_bytes, self.clock)

        def turned() -> bool:
            moving.turn()
            return moving.ready or moving.spent

        wait_until(turned)
        return moving

    def block(self, slot: int) -> LentBlock:
        views = self.arena.slot_views(slot)
        return LentBlock(KEYS[slot], views, self.arena, slot, self.arena.generation(slot), b"", 0, b"")

    def landed(self, place: int) -> bytes:
        return bytes(self.there.view(place, SIZE))

    def close(self) -> None:
        self.moving.close()
        self.reader.close()
        self.mover.close()
        self.arena.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def until_ended(moving: Moving, put: object) -> None:
    def ended() -> bool:
        moving.turn()
        return put.ended  # type: ignore[attr-defined, no-any-return]

    wait_until(ended)


def test_a_block_lands_in_its_place(bench: Bench) -> None:
    puts = [bench.moving.put(bench.block(slot), b"f" * 32, 7 - slot) for slot in range(3)]
    bench.moving.flush()
    for put in puts:
        until_ended(bench.moving, put)
        assert not put.failed and put.seal[0] == WHOLE
    for slot in range(3):
        assert bench.landed(7 - slot) == b"".join(content(KEYS[slot]))
    assert bench.network.writes == 1, "small blocks go together"


def test_a_block_that_changed_hands_is_not_sent(bench: Bench) -> None:
    block = bench.block(0)
    bench.arena.invalidate(0)
    put = bench.moving.put(block, b"f" * 32, 0)
    assert put.ended and put.seal[0] == BROKEN
    bench.moving.flush()
    assert bench.network.writes == 0


def test_what_was_put_fails_with_its_mover(bench: Bench) -> None:
    put = bench.moving.put(bench.block(0), b"f" * 32, 0)
    assert not put.ended, "it waits for others"
    bench.mover.close()
    until_ended(bench.moving, put)
    assert put.failed and not bench.moving.ready and not bench.moving.spent


def test_room_is_as_large_as_its_memory(bench: Bench) -> None:
    bench.network.hang = True
    large = STAGING_BYTES // 2
    moving = bench.moves(replace(bench.offer, place_bytes=large), large)
    for slot in range(2):
        assert moving.room
        moving.put(bench.block(slot), b"f" * 32, 0)
    assert not moving.room
    moving.close()


@pytest.mark.parametrize(
    ("place_bytes", "block_bytes"),
    [(SIZE - 1, SIZE), (1 << 30, STAGING_BYTES + 1)],
    ids=["places too small", "blocks too large"],
)
def test_an_offer_of_no_use(bench: Bench, place_bytes: int, block_bytes: int) -> None:
    offer = replace(bench.offer, place_bytes=place_bytes)
    assert Moving(bench.mover, offer, block_bytes, bench.clock).spent


def test_metadata_of_nobody(bench: Bench) -> None:
    offer = replace(bench.offer, metadata=b"nobody")
    assert bench.moves(offer).spent


def test_a_mover_that_does_not_answer_is_given_up(bench: Bench) -> None:
    """Not before its own limit is over."""
    bench.network.hang = True
    put = bench.moving.put(bench.block(0), b"f" * 32, 0)
    bench.moving.flush()
    due_s = bench.moving.due_s()
    assert due_s == bench.clock() + bench.mover.write_limit_s + ANSWER_S
    bench.clock.advance(bench.mover.write_limit_s + ANSWER_S - 0.1)
    bench.moving.turn()
    assert not put.ended
    bench.clock.advance(0.2)
    bench.moving.turn()
    assert put.failed and bench.moving.spent and bench.moving.due_s() is None
