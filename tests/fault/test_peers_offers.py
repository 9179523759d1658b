"""Offers of memory between ends that differ, and ends that lie about them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import pytest

from kvbm.block import Outcome
from kvbm.hashing import split_keys
from kvbm.tiers.contract import Completion
from kvbm.tiers.peers.wire import (
    WIRE_VERSION,
    Ask,
    Beat,
    Greeting,
    Offer,
    Welcome,
    framed,
    joined_places,
)
from rigs.lying_peer import LyingPeer, block, head
from rigs.movers import ModelNetwork, model_mover, moves
from rigs.peers import (
    FLEET,
    LAYOUT,
    LendingNode,
    Loads,
    Targets,
    content,
    keys_of,
    knows,
    open_tier,
    wait_until,
)

KEYS = keys_of(16)
UNTOUCHED = [b"\xa5" * LAYOUT.slot_bytes] * 2


@pytest.fixture
def network() -> ModelNetwork:
    return ModelNetwork()


def all_hits(completion: Completion, targets: Targets) -> None:
    for index, end in enumerate(completion.blocks):
        assert end.outcome is Outcome.HIT, end
        assert targets.block(index) == content(KEYS[index])


# ---- ends that differ


@pytest.mark.parametrize("has", ["lender", "reader"])
def test_one_end_without_a_mover(network: ModelNetwork, has: str) -> None:
    mover = model_mover(network)
    lender = LendingNode(mover=mover if has == "lender" else None)
    lender.store(KEYS)
    tier = open_tier([lender.peer], mover=mover if has == "reader" else None)
    try:
        wait_until(lambda: knows(tier, KEYS))
        tier.tick()
        all_hits(*Loads(tier).load(KEYS))
        assert tier.describe()["links"] == {"tcp": 1}
        assert network.writes == 0
    finally:
        tier.close()
        lender.close()
        mover.close()


def test_blocks_without_a_place_come_over_the_connection(network: ModelNetwork) -> None:
    lends, reads = model_mover(network), model_mover(network)
    lender = LendingNode(mover=lends)
    lender.store(KEYS)
    five = 5 * LAYOUT.block_bytes
    tier = open_tier([lender.peer], mover=reads, deadline_s=60.0, staging_bytes=five)
    loads = Loads(tier)
    try:
        wait_until(lambda: knows(tier, KEYS))
        wait_until(lambda: moves(lender, tier))
        for _ in range(3):
            all_hits(*loads.load(KEYS))
        assert lender.server.counts["moved"] == 3 * 5
        assert lender.server.counts["blocks"] == 3 * len(KEYS)
        with lender.hold():
            begun = [loads.begin(KEYS) for _ in range(6)]
            (reader,) = lender.server._connections
            wait_until(lambda: reader.describe()["asks"] == 4, "no ask waits for another one's places")
        for job, targets in begun:
            all_hits(loads.wait(job), targets)
        assert lender.server.counts["moved"] >= 4 * 5
        assert lender.server.counts["blocks"] == 9 * len(KEYS)
    finally:
        tier.close()
        lender.close()
        lends.close()
        reads.close()


def test_a_machine_without_a_network_reads_over_tcp(network: ModelNetwork) -> None:
    network.broken = True
    mover = model_mover(network)
    lender = LendingNode(mover=mover)
    lender.store(KEYS)
    tier = open_tier([lender.peer], mover=mover)
    try:
        wait_until(lambda: knows(tier, KEYS))
        all_hits(*Loads(tier).load(KEYS))
        assert tier.describe()["notes"] == ("reads over TCP: NIXL: no network here",)
    finally:
        tier.close()
        lender.close()
        mover.close()


# ---- ends that lie


def moving_welcome() -> bytes:
    return framed(Welcome(version=WIRE_VERSION, fleet=FLEET, node="liar", moves=True))


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda ask: framed(head(ask, 0, moved=True)), "no place named for it"),
        (lambda ask: framed(head(ask, 0, moved=True, size=1 << 40)), "was moved"),
    ],
)
def test_a_lender_that_moved_what_it_could_not(answer: Callable[[Ask], bytes], named: str) -> None:
    """The reader has no mover: it offered nothing."""
    liar = LyingPeer(KEYS, lambda peer, connection, ask: connection.sendall(answer(ask)), moving_welcome())
    tier = open_tier([liar.peer])
    try:
        wait_until(lambda: knows(tier, KEYS))
        completion, targets = Loads(tier).load(KEYS[:1])
        assert completion.outcome is Outcome.RETRY and named in completion.error
        assert targets.block(0) == UNTOUCHED
    finally:
        tier.close()
        liar.close()


def test_a_lender_that_says_moved_and_moves_nothing(network: ModelNetwork) -> None:
    """It knows the right checksum; the bytes never came."""

    def claims(peer: LyingPeer, connection: socket.socket, ask: Ask) -> None:
        if not ask.places:
            connection.sendall(b"".join(block(ask, i) for i in range(len(split_keys(ask.keys)))))
            return
        whole = block(ask, 0)
        connection.sendall(framed(head(ask, 0, moved=True)) + whole[-17:])

    liar = LyingPeer(KEYS, claims, moving_welcome())
    mover = model_mover(network)
    tier = open_tier([liar.peer], mover=mover, deadline_s=60.0)
    loads = Loads(tier)
    try:
        wait_until(lambda: knows(tier, KEYS))
        tier.tick()
        wait_until(lambda: liar.offers)
        completion, _ = loads.load(KEYS[:1])
        assert liar.asks[-1].places, "it named a place"
        assert completion.outcome is Outcome.MISS and completion.corrupt
    finally:
        tier.close()
        liar.close()
        mover.close()


def offer(**changed: object) -> Offer:
    return Offer(
        **{  # type: ignore[arg-type]
            "number": 1,
            "metadata": b'["nobody", [0, 1]]',
            "address": 0,
            "place_bytes": LAYOUT.block_bytes,
            "places": 4,
            **changed,
        }
    )


def ask(places: bytes) -> Ask:
    return Ask(number=1, keys=b"".join(KEYS[:2]), offer=1, places=places)


@pytest.mark.parametrize(
    ("has_mover", "says", "named"),
    [
        (False, [offer()], "there is no mover here"),
        (True, [offer(address=1 << 62, place_bytes=1 << 53, places=4096)], "beyond what an address may be"),
        (True, [offer(), ask(joined_places((0, 4)))], "place 4 of 4"),
        (True, [offer(), ask(joined_places((0,)))], "4 bytes of places for 2 keys"),
    ],
)
def test_a_reader_that_offers_nonsense_is_sent_away(
    network: ModelNetwork, has_mover: bool, says: list, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvbm.manager")
    mover = model_mover(network) if has_mover else None
    lender = LendingNode(mover=mover)
    lender.store(KEYS)
    try:
        with greeted(lender) as reader:
            for message in says:
                reader.sendall(framed(message))
            wait_until(lambda: any(named in record.message for record in caplog.records), named)
        assert network.writes == 0
    finally:
        lender.close()
        if mover is not None:
            mover.close()


@pytest.mark.parametrize("asked_before", [False, True], ids=["after the offer", "before the offer"])
def test_places_of_another_offer_are_not_used(network: ModelNetwork, asked_before: bool) -> None:
    mover = model_mover(network)
    lender = LendingNode(mover=mover)
    lender.store(KEYS)
    try:
        with greeted(lender) as reader:

            def known(number: int) -> bool:
                reader.sendall(framed(Beat()))  # its thread looks at its mover
                (connection,) = lender.server._connections
                moving = connection._sending.moving
                return moving is not None and moving.ready and moving.offer.number == number

            def offers(number: int) -> None:
                reader.sendall(framed(offer(number=number)))
                wait_until(lambda: known(number))

            with lender.hold():
                offers(1)
                if not asked_before:
                    offers(2)
                reader.sendall(framed(ask(joined_places((0, 1)))))
                if asked_before:
                    offers(2)
            wait_until(lambda: lender.server.counts["blocks"] == 2)
            assert lender.server.counts["moved"] == network.writes == 0
    finally:
        lender.close()
        mover.close()


def greeted(lender: LendingNode) -> socket.socket:
    reader = socket.create_connection(("127.0.0.1", lender.server.port))
    greeting = Greeting(
        version=WIRE_VERSION,
        fleet=FLEET,
        node="odd",
        fingerprint=lender.namespace.fingerprint,
        slot_bytes=LAYOUT.slot_bytes,
        shard_count=LAYOUT.shard_count,
        known_max=100,
    )
    reader.sendall(framed(greeting))
    wait_until(lambda: lender.lending.reader_count == 1)
    wait_until(lambda: lender.server.counts["readers"] == 1)
    return reader
