"""Offers of memory that do harm or no good: they are withdrawn, and made again after a pause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.tiers.peers import landings, offer_pause
from rigs.movers import ModelNetwork, model_mover
from rigs.moving_pair import KEYS, Pair, right
from rigs.peers import keys_of, knows, wait_until


@pytest.fixture
def network() -> ModelNetwork:
    return ModelNetwork()


def test_wrong_bytes_of_a_whole_ask_do_not_end_the_link(
    network: ModelNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were asked for before the first wrong one are lost; the others come, over TCP, on later connections
    too, until a pause is over; the next one is longer."""
    monkeypatch.setattr(offer_pause, "FIRST_S", 6.0)  # no connection is over by that
    clock = ManualClock(100.0)
    pair = Pair(lambda: model_mover(network), clock=clock)
    others = [keys_of(16, seed) for seed in range(3, 6)]
    lend = pair.lender
    try:
        for keys in others:
            lend.store(keys)
        wait_until(lambda: all(knows(pair.tier, keys) for keys in others))
        network.spoil = True
        completion, _ = pair.loads.load(KEYS)
        assert [end.corrupt for end in completion.blocks] == [True] * 16
        right(*pair.loads.load(others[0]), must_hit=True, keys=others[0])
        assert lend.server.counts["readers"] == 1, "the same connection"
        assert pair.moved == 16

        def loaded_over_tcp_alone(keys: Sequence[BlockKey]) -> None:
            pair.tier.tick()
            moved = pair.moved
            right(*pair.loads.load(keys), must_hit=True, keys=keys)
            assert pair.moved == moved

        (connection,) = lend.server._connections
        connection.stop()

        def on_another_connection() -> bool:
            if pair.peer()["trouble"]:
                clock.advance(0.05)  # it waits before it connects again
            return lend.server.counts["readers"] == 2 and knows(pair.tier, others[1])

        wait_until(on_another_connection)
        loaded_over_tcp_alone(others[1])
        clock.advance(6.0)
        pair.connected()
        completion, _ = pair.loads.load(others[2])
        assert [end.corrupt for end in completion.blocks] == [True] * 16
        clock.advance(11.0)
        loaded_over_tcp_alone(others[1])
    finally:
        pair.close()


def test_an_offer_that_is_not_used_is_withdrawn_and_another_one_made_later(
    network: ModelNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lender does not say that it has given up; its blocks come over the connection."""
    monkeypatch.setattr(offer_pause, "FIRST_S", 6.0)
    clock = ManualClock(100.0)
    pair = Pair(lambda: model_mover(network), clock=clock)
    try:
        reading = network.agents[-1]
        network.refuse = True
        for _ in range(landings.UNUSED_MAX // len(KEYS)):
            pair.all_hits()
        assert not reading.closed, "it may be a lender's mover that starts"
        clock.advance(landings.UNUSED_S)
        pair.all_hits()
        wait_until(lambda: reading.closed, "the reader's memory is let go")
        network.refuse = False
        pair.tier.tick()
        pair.all_hits()
        assert pair.moved == 0 and pair.peer()["transport"] == "tcp"
        clock.advance(6.0)
        pair.connected()
        pair.all_hits()
        assert pair.moved == len(KEYS) and pair.lender.server.counts["readers"] == 1
    finally:
        pair.close()
