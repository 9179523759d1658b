"""What waits for what: with any interleaving of streams, copies see the bytes that they should.

Every law is shown to be tested: without the event that it rests on, some seed goes wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvbm.transfer.copier import Copying
from rigs.cuda_model import Model, ModelEvent
from unit.transfer.cuda.test_layouts import BLOCKS, Bench
from unit.transfer.test_cpu import stacked

SEEDS = range(6)
SLOTS = 16
METHODS = ["batch", "rows", "each"]


class Engine:
    """Puts work on its stream that writes blocks, and work that reads them; one operation per layer."""

    def __init__(self, bench: Bench) -> None:
        self._views = list(bench.views.values())
        self._stream = bench.model.engine
        self.read: dict[tuple[int, int], list[int]] = {}

    def write(self, blocks: list[int], value: int) -> None:
        """Fill blocks with a byte."""
        for view in self._views:
            for block in blocks:
                self._stream.work(lambda view=view, block=block: view[block].fill_(value))

    def note(self, blocks: list[int], turn: int) -> None:
        """Remember the bytes that blocks hold by then."""
        for block in blocks:
            seen = self.read[block, turn] = []
            for view in self._views:
                self._stream.work(lambda view=view, block=block, seen=seen: seen.extend(content(view[block])))


def content(part: torch.Tensor) -> list[int]:
    """The distinct bytes in a tensor of bytes."""
    return torch.unique(part).tolist()


def new_bench(seed: int, method: str) -> tuple[Bench, Engine]:
    views = stacked("LBHNC", torch.uint8)
    model = Model(seed)
    model.deferred = model.driver.kernels = method == "kernel"
    bench = Bench(views, model, method, SLOTS).prepared()
    for view in views.values():
        view.fill_(0)
    return bench, Engine(bench)


def slots_hold(bench: Bench, slots: list[int], value: int) -> bool:
    return all(content(bench.arena[slot, : bench.cache.shard_bytes]) == [value] for slot in slots)


def stores_are_right(seed: int, method: str, hold: Callable[[Bench, Copying], None]) -> bool:
    """Blocks are written, stored and overwritten, turn by turn; whether slots hold what they held when marked."""
    bench, engine = new_bench(seed, method)
    chosen = random.Random(seed)
    expected: list[tuple[list[int], int]] = []
    for turn in range(5):
        blocks, slots = chosen.sample(range(BLOCKS), 3), [3 * turn, 3 * turn + 1, 3 * turn + 2]
        engine.write(blocks, 10 + turn)
        mark = bench.copier.mark()
        copying = bench.copier.begin_store(list(zip(blocks, slots, strict=True)), mark)
        hold(bench, copying)
        engine.write(blocks, 200 + turn)
        for _ in range(chosen.randrange(30)):
            bench.model.advance()
        expected.append((slots, 10 + turn))
    bench.model.drain()
    right = all(slots_hold(bench, slots, value) for slots, value in expected)
    bench.close()
    return right


def held(bench: Bench, copying: Copying) -> None:
    bench.copier.hold(copying)


def not_held(bench: Bench, copying: Copying) -> None:
    """The mistake."""


@pytest.mark.parametrize("method", METHODS)
def test_slots_hold_what_blocks_held_at_the_mark(method: str) -> None:
    assert all(stores_are_right(seed, method, held) for seed in SEEDS)


@pytest.mark.parametrize("method", METHODS)
def test_without_hold_a_block_may_be_overwritten_before_it_is_copied(method: str) -> None:
    assert not all(stores_are_right(seed, method, not_held) for seed in SEEDS)


def loads_are_right(
    seed: int, method: str, hold: Callable[[Bench, Copying], None], *, by_layer: bool, marked: bool = True
) -> bool:
    """The engine reads blocks, they are loaded anew, it reads them again; whether it saw the old and the new."""
    bench, engine = new_bench(seed, method)
    chosen = random.Random(seed)
    for slot in range(SLOTS):
        bench.arena[slot].fill_(100 + slot)
    held_before = dict.fromkeys(range(BLOCKS), 0)
    right: list[tuple[int, int, int]] = []
    early = bench.copier.mark()
    for turn in range(5):
        pairs = list(zip(chosen.sample(range(BLOCKS), 3), chosen.sample(range(SLOTS), 3), strict=True))
        blocks = [block for block, _ in pairs]
        engine.note(blocks, 2 * turn)
        right += [(block, 2 * turn, held_before[block]) for block in blocks]
        mark = bench.copier.mark() if marked else early
        for layer in bench.views if by_layer else [None]:
            copying = bench.copier.begin_load(pairs, mark, layer)
        hold(bench, copying)
        engine.note(blocks, 2 * turn + 1)
        right += [(block, 2 * turn + 1, 100 + slot) for block, slot in pairs]
        held_before.update({block: 100 + slot for block, slot in pairs})
        for _ in range(chosen.randrange(30)):
            bench.model.advance()
    bench.model.drain()
    bench.close()
    return all(set(engine.read[block, turn]) == {value} for block, turn, value in right)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_loads_come_after_the_mark_and_before_what_is_held(method: str, by_layer: bool) -> None:
    assert all(loads_are_right(seed, method, held, by_layer=by_layer) for seed in SEEDS)


def test_without_hold_a_block_may_be_read_before_it_is_loaded() -> None:
    assert not all(loads_are_right(seed, "batch", not_held, by_layer=False) for seed in SEEDS)


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
        bench, engine = new_bench(seed, "each")
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
    bench, engine = new_bench(4, "each")
    engine.write([3], 7)
    bench.copier.begin_store([(3, 0)], bench.copier.mark())
    bench.copier.begin_load([(4, 1)], bench.copier.mark())
    bench.copier.close()
    assert not bench.model.copies_under_way()
    assert slots_hold(bench, [0], 7)
    bench.close()
