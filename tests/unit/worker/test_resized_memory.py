"""A real rank over a manager whose host memory changes its size: right bytes, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.admin_protocol import Resize, Resized, decode_from_manager
from kvbm.manager import carrying
from kvbm.protocol import PROTOCOL_VERSION, Commit, Hello, Welcome
from kvbm.step_plan import LoadPlan, StepPlan
from kvbm.worker.jobs import FinishedLoad
from rigs.manager import Client
from rigs.mover import Rank


def operator(rank: Rank) -> Client:
    admin = rank.bench.client()
    admin.channel._decode = decode_from_manager
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    return admin


def resize(rank: Rank, blocks: int) -> Resized:
    admin = operator(rank)
    admin.channel.send(Resize(host_bytes=blocks * rank.layout.block_bytes))
    reply = admin.expect(Resized)
    admin.close()
    assert not reply.refusal
    return reply


@pytest.mark.parametrize("blocks", [12, 90])
def test_a_rank_loads_from_the_new_memory_and_stores_into_it(
    make_rank: Callable[..., Rank], blocks: int
) -> None:
    rank = make_rank()
    rank.put_in(10)
    assert resize(rank, blocks).carried == 10
    rank.come_back()
    assert rank.mappings[-1].slot_count == blocks
    plan = rank.lookup(10)
    assert len(plan.slots) == 10
    rank.judge(plan, rank.run_load(plan).failed)
    rank.paint(10, 110.0)
    rank.paint(11, 120.0)
    stored = rank.reserve(10, 2, [10, 11])
    assert rank.run_store(stored) == ()
    rank.leader.send(Commit(store=stored.store))
    plan = rank.lookup(12)
    assert len(plan.slots) == 12
    load = rank.run_load(plan)
    assert load.failed == ()
    rank.judge(plan, load.failed)


def test_a_load_that_was_promised_before_brings_right_bytes_or_none(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.put_in(10)
    promised = rank.lookup(10)
    assert resize(rank, 11).carried == 10
    rank.judge(promised, rank.run_load(promised).failed)
    rank.come_back()
    for block in range(20, 30):
        rank.paint(block, 0.0)
    assert rank.run_load(promised).failed == promised.device_blocks, "it was of other memory"


def test_a_store_that_was_planned_before_is_not_found(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.paint(0, 10.0)
    plan = rank.reserve(0, 1, [0])
    resize(rank, 50)
    rank.worker.store(StepPlan(stores=(plan,)))
    rank.come_back()
    assert rank.run_store(plan) == (0,)
    rank.leader.send(Commit(store=plan.store))
    assert rank.lookup(1).slots == ()


def test_the_rank_dies_while_blocks_are_carried(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    rank.put_in(10)
    copy = carrying.HostArena.copy_slots

    def dying(*arguments: object) -> None:
        rank.mover.stop()
        rank.leader.close()
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(carrying.HostArena, "copy_slots", dying)
    assert resize(rank, 60).carried == 10
    assert rank.bench.space().host_pool.counts().resident == 10


def test_an_engine_that_cannot_be_told_of_a_failure_loads_from_the_memory_of_its_promise(
    make_rank: Callable[..., Rank],
) -> None:
    """It was promised blocks before the change, and they are loaded after it."""
    rank = make_rank(reports=True)
    rank.put_in(10)
    plan = rank.lookup(10)
    assert resize(rank, 90).carried == 10
    rank.come_back()
    for block in plan.device_blocks:
        rank.paint(block, -1.0)
    done = load_now(rank, plan)
    assert [load.failed for load in done] == [()]
    rank.judge(plan, ())
    rank.mover._earlier.close()
    (late,) = load_now(rank, plan, timeout_s=0.01)
    assert late.failed == plan.device_blocks, "its time is over"


def load_now(rank: Rank, plan: LoadPlan, timeout_s: float = 20.0) -> list[FinishedLoad]:
    return rank.worker.load_now(StepPlan(loads=(plan,)), timeout_s)
