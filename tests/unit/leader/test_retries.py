"""Blocks that the manager had no slot for are offered again while the device has them, and not in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbm.hashing import split_keys
from kvbm.leader.retry import RETRY_S, RETRY_S_MAX, Retry
from kvbm.protocol import HELD, REFUSED, Reserve
from rigs.leader import TABLE, Bench, ScriptedDevice, keys


def offered(bench: Bench, complete: int, request: str = "r") -> list[Reserve]:
    """A step in which so many of the request's blocks are complete: what slots are asked for."""
    bench.step({request: complete})
    return [message for message in bench.manager.said() if isinstance(message, Reserve)]


def test_what_was_refused_is_offered_again_from_its_first_block_on(bench: Bench) -> None:
    bench.add(blocks=10)
    (reserve,) = offered(bench, 4)
    bench.grant(reserve, (HELD, 3, REFUSED, REFUSED))
    (plan,) = bench.step({"r": 4}).stores
    assert plan.device_blocks == (TABLE[1],), "what got a slot is stored"
    bench.clock.advance(RETRY_S)
    (again,) = offered(bench, 6)
    assert (again.parent, split_keys(again.keys)) == (keys(2)[1], keys(6)[2:])
    bench.grant(again)
    (plan,) = bench.step({"r": 6}).stores
    assert plan.device_blocks == tuple(TABLE[2:6])
    (later,) = offered(bench, 8)
    assert (reserve.again, again.again, later.again) == (False, True, False), "what the manager is told"


def test_later_blocks_wait_with_it_and_no_step_asks_meanwhile(bench: Bench) -> None:
    bench.add(blocks=10)
    (reserve,) = offered(bench, 2)
    bench.grant(reserve, (HELD, REFUSED))
    for complete in (3, 4, 5):
        assert offered(bench, complete) == []
    bench.clock.advance(RETRY_S)
    (again,) = offered(bench, 5)
    assert split_keys(again.keys) == keys(5)[1:]


def test_refused_again_and_again_it_is_offered_less_and_less_often(bench: Bench) -> None:
    bench.add(blocks=10)
    (reserve,) = offered(bench, 1)
    waits = []
    for _ in range(12):
        bench.grant(reserve, (REFUSED,))
        bench.step({"r": 1})
        waited = 0.0
        while not (again := offered(bench, 1)):
            bench.clock.advance(RETRY_S)
            waited += RETRY_S
        (reserve,) = again
        waits.append(round(waited / RETRY_S))
    assert waits[:6] == [1, 2, 4, 8, 16, 32]
    assert set(waits[7:]) <= {round(RETRY_S_MAX / RETRY_S), round(RETRY_S_MAX / RETRY_S) + 1}
    bench.grant(reserve)
    (plan,) = bench.step({"r": 1}).stores
    assert plan.device_blocks == (TABLE[0],)


def test_each_refusal_in_a_row_reaches_further_back(bench: Bench) -> None:
    """The manager may have dropped the block before the refused one: without it, it refuses all that follow."""
    bench.add(blocks=12)
    (reserve,) = offered(bench, 9)
    bench.grant(reserve)
    bench.step({"r": 9})
    (reserve,) = offered(bench, 10)
    assert split_keys(reserve.keys) == keys(10)[9:]
    firsts = []
    for _ in range(5):
        held = len(split_keys(reserve.keys)) - 1
        bench.grant(reserve, (*(HELD,) * held, REFUSED))
        bench.step({"r": 10})
        bench.clock.advance(RETRY_S_MAX)
        (reserve,) = offered(bench, 10)
        firsts.append(10 - len(split_keys(reserve.keys)))
    assert firsts == [9, 8, 6, 2, 0]


def test_where_slots_come_block_by_block_it_goes_on_without_longer_waits(bench: Bench) -> None:
    bench.add(blocks=10)
    (reserve,) = offered(bench, 8)
    for taken in range(1, 6):
        bench.grant(reserve, (taken, *(REFUSED,) * (len(split_keys(reserve.keys)) - 1)))
        bench.step({"r": 8})
        bench.clock.advance(RETRY_S)
        (reserve,) = offered(bench, 8)
        assert split_keys(reserve.keys) == keys(8)[taken:]


def test_answers_to_earlier_offers_are_one_refusal(bench: Bench) -> None:
    """Several questions were on their way when the first was refused; the blocks after it cannot be stored either."""
    bench.add(blocks=10)
    reserves = [*offered(bench, 2), *offered(bench, 4), *offered(bench, 6)]
    for reserve in reserves:
        bench.grant(reserve, (REFUSED, REFUSED))
    bench.clock.advance(RETRY_S / 2)
    assert offered(bench, 6) == []
    bench.clock.advance(RETRY_S)
    (again,) = offered(bench, 6)
    assert split_keys(again.keys) == keys(6)


def test_what_came_from_the_manager_is_not_offered_to_it(bench: Bench) -> None:
    bench.arrive(bench.load(5))
    (reserve,) = offered(bench, 7)
    assert (reserve.parent, split_keys(reserve.keys)) == (keys(5)[4], keys(7)[5:])
    bench.grant(reserve, (REFUSED, REFUSED))  # the manager has dropped it since
    for _ in range(3):
        bench.step({"r": 7})
        bench.clock.advance(RETRY_S_MAX)
        (reserve,) = offered(bench, 7)
        bench.grant(reserve, (REFUSED,) * len(split_keys(reserve.keys)))
    bench.step({"r": 7})
    bench.clock.advance(RETRY_S_MAX)
    (reserve,) = offered(bench, 7)
    assert split_keys(reserve.keys) == keys(7), "all of it, at last"


@pytest.mark.parametrize("why", ["device", "failed", "session"])
def test_what_the_manager_may_not_hold_is_offered_from_the_first_block_on(
    make_bench: Callable[..., Bench], why: str
) -> None:
    bench = make_bench(device=ScriptedDevice())
    plan = bench.load(5, computed=1 if why == "device" else 0)
    if why == "session":
        bench.manager.die()
        bench.step()
        bench.reconnect()
    bench.arrive(plan, {plan.device_blocks[3]} if why == "failed" else None)
    reserves = offered(bench, 7)
    assert split_keys(b"".join(reserve.keys for reserve in reserves)) == keys(7)


def test_a_new_manager_is_offered_everything_at_once(bench: Bench) -> None:
    bench.add(blocks=10)
    (reserve,) = offered(bench, 4)
    bench.grant(reserve, (HELD, HELD, HELD, REFUSED))
    bench.step({"r": 4})
    bench.manager.die()
    bench.step({"r": 4})
    bench.reconnect()
    (again,) = offered(bench, 4)
    assert split_keys(again.keys) == keys(4)


def test_a_refusal_for_a_request_that_has_ended_is_forgotten(bench: Bench) -> None:
    bench.add("r")
    (reserve,) = offered(bench, 2)
    bench.leader.finished("r")
    bench.grant(reserve, (REFUSED, REFUSED))
    bench.step()
    bench.clock.advance(RETRY_S_MAX)
    bench.step()
    assert [message for message in bench.manager.said() if isinstance(message, Reserve)] == []
    assert len(bench.leader.stores) == 0


def test_a_success_makes_the_next_wait_short_again() -> None:
    def wait_after(*events: Any) -> float:
        retry, now_s = Retry(), 0.0
        for event in events:
            now_s = max(now_s, retry.due_s)
            retry.failed(now_s) if event == "refused" else retry.succeeded()
        return retry.due_s - now_s

    assert wait_after("refused", "refused", "refused") == pytest.approx(4 * RETRY_S)
    assert wait_after("refused", "refused", "taken", "refused") == pytest.approx(RETRY_S)
