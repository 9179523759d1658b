"""What waits for what: with any interleaving of streams, copies see the bytes that they should.

Every law is shown to be tested: without the event that it rests on, some seed goes wrong.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvbm.testing.kv_views import stacked
from rigs.cuda_bench import BLOCKS, MOVED, Bench, check_loads, check_stores
from rigs.cuda_model import Model, ModelDriver
from rigs.cuda_order import (
    SEEDS,
    SLOTS,
    held,
    loads_are_right,
    new_bench,
    not_held,
    slots_hold,
    stores_are_right,
)
from rigs.cuda_streams import ModelEvent

METHODS = ["batch", "rows"]


@pytest.mark.parametrize("method", METHODS)
def test_slots_hold_what_blocks_held_at_the_mark(method: str) -> None:
    assert all(stores_are_right(seed, method, held) for seed in SEEDS)


@pytest.mark.parametrize("method", METHODS)
def test_without_hold_a_block_may_be_overwritten_before_it_is_copied(method: str) -> None:
    assert not all(stores_are_right(seed, method, not_held) for seed in SEEDS)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_loads_come_after_the_mark_and_before_what_is_held(method: str, by_layer: bool) -> None:
    assert all(loads_are_right(seed, method, held, by_layer=by_layer) for seed in SEEDS)


def test_without_hold_a_block_may_be_read_before_it_is_loaded() -> None:
    assert not all(loads_are_right(seed, "batch", not_held, by_layer=False) for seed in SEEDS)


def test_a_block_that_may_be_read_early_may_be_stored_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the sources of stores are read in the stream's order, and proof that the model notices."""
    copy_batch = ModelDriver.copy_batch

    def copy_early(*arguments: Any, read_early: bool) -> None:
        copy_batch(*arguments, read_early=True)

    monkeypatch.setattr(ModelDriver, "copy_batch", copy_early)
    assert not all(stores_are_right(seed, "batch", held) for seed in SEEDS)


def test_locked_memory_may_be_read_early_and_the_engines_never() -> None:
    bench, _ = both_ways(1, "batch")
    calls = bench.model.calls
    assert {(call.to_device, call.read_early) for call in calls} == {(True, True), (False, False)}
    bench.close()


def test_staging_rows_that_may_be_read_early_are_not_refilled_before_they_are_copied() -> None:
    for seed in SEEDS:
        model = Model(seed)
        model.refuse_locks_from = 0
        bench = Bench(stacked("BHLNC", torch.uint8), model, "batch").prepared()
        sides = bench.copier._staging._sides
        sides.update({to_device: side._replace(rows=side.rows[:2]) for to_device, side in sides.items()})
        model.calls.clear()
        check_stores(bench)  # the same rows hold other blocks' bytes before
        check_loads(bench)
        assert len([call for call in model.calls if call.read_early]) == -(-len(MOVED) // 2)
        bench.close()


def test_with_an_earlier_mark_a_block_may_be_loaded_while_it_is_read() -> None:
    assert not all(loads_are_right(seed, "batch", held, by_layer=False, marked=False) for seed in SEEDS)


def both_ways(seed: int, method: str) -> tuple[Bench, bool]:
    """Stores and loads under way at once, through locked pages, without a wait in between."""
    bench, engine = new_bench(seed, method)
    chosen = random.Random(seed)
    for slot in range(8, SLOTS):
        bench.arena[slot].fill_(100 + slot)
    expected = []
    for turn in range(4):
        blocks = chosen.sample(range(BLOCKS), 6)
        out, back = blocks[:2], blocks[2:]
        slots = [2 * turn, 2 * turn + 1]
        engine.write(out, 10 + turn)
        mark = bench.copier.mark()
        storing = bench.copier.begin_store(list(zip(out, slots, strict=True)), mark)
        pairs = list(zip(back, chosen.sample(range(8, SLOTS), len(back)), strict=True))
        loading = bench.copier.begin_load(pairs, mark)
        bench.copier.hold(storing)
        bench.copier.hold(loading)
        engine.note(back, turn)
        engine.write(out + back, 200 + turn)
        expected += [(slot, 10 + turn) for slot in slots]
        for block, slot in pairs:
            engine.read[block, turn].append(100 + slot)  # one more byte to agree with
    bench.model.drain()
    right = all(slots_hold(bench, [slot], value) for slot, value in expected)
    return bench, right and all(len(set(seen)) == 1 for seen in engine.read.values())


@pytest.mark.parametrize("method", METHODS)
def test_both_directions_at_once(method: str) -> None:
    for seed in SEEDS:
        bench, right = both_ways(seed, method)
        bench.close()
        assert right, seed


def test_the_engines_stream_gets_only_events() -> None:
    bench, _ = both_ways(1, "batch")
    kinds = [kind for kind in bench.model.engine.kinds if kind != "work"]
    assert kinds == ["record", "wait", "wait"] * 4
    bench.close()


def test_without_a_mark_copies_wait_for_the_callers_stream() -> None:
    for seed in SEEDS:
        bench, engine = new_bench(seed, "rows")
        engine.write([3], 7)
        bench.copier.store([(3, 0)])
        assert slots_hold(bench, [0], 7)
        bench.close()


def test_nothing_to_do_begins_nothing_and_waits_for_nothing() -> None:
    bench, engine = new_bench(2, "batch")
    engine.write([0], 1)
    copying = bench.copier.begin_store([], bench.copier.mark())
    assert bench.model.calls == []
    assert "work" in [operation.kind for operation in bench.model.engine.queue], (
        "nobody waited for the engine"
    )
    copying.wait()
    assert copying.done()
    bench.close()


def test_begin_does_not_wait_for_the_engine_and_done_never_blocks() -> None:
    bench, _ = new_bench(3, "batch")
    later = ModelEvent(bench.model)
    copying = bench.copier.begin_store([(0, 0)], later)
    assert not any(copying.done() for _ in range(50))
    later.reached = True
    copying.wait()
    assert copying.done()
    bench.close()


def test_close_waits_for_copies_under_way() -> None:
    bench, engine = new_bench(4, "rows")
    engine.write([3], 7)
    bench.copier.begin_store([(3, 0)], bench.copier.mark())
    bench.copier.begin_load([(4, 1)], bench.copier.mark())
    bench.copier.close()
    assert not bench.model.copies_under_way()
    assert slots_hold(bench, [0], 7)
    bench.close()
