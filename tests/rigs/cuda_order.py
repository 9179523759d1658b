"""An engine whose stream writes and reads blocks while they are copied, and whether every copy saw the right bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from kvbm.testing.kv_views import stacked
from kvbm.transfer.copier import Copying
from rigs.cuda_bench import BLOCKS, Bench
from rigs.cuda_model import Model

SEEDS = range(6)
SLOTS = 16


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
    """A bench whose blocks all hold zeros, and the engine beside it."""
    views = stacked("LBHNC", torch.uint8)
    model = Model(seed)
    bench = Bench(views, model, method, SLOTS).prepared()
    for view in views.values():
        view.fill_(0)
    return bench, Engine(bench)


def slots_hold(bench: Bench, slots: list[int], value: int) -> bool:
    """Whether all bytes of these slots are that one."""
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
    """As an engine must: its later work waits for the copy."""
    bench.copier.hold(copying)


def not_held(bench: Bench, copying: Copying) -> None:
    """The mistake."""


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
