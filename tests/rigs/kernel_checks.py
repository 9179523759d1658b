"""The checks of the copy kernel, for a process in which Triton interprets kernels."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from kvbm.transfer.cuda import kernel as cuda_kernel
from kvbm.transfer.cuda.choice import AUTO, KERNEL_PIECES_MIN
from rigs import cuda_order as order
from rigs import cuda_streams
from rigs.cuda_bench import LAYOUTS, MOVED, Bench, check_layers, check_loads, check_stores
from rigs.cuda_model import Model

ORDERED = "stores and loads in order"
SEVERAL_PROGRAMS = "more pieces than programs"
STAGED = "slots that are not locked"
RING = "pairs in a ring of two places"
CHOSEN = "chosen by the rule"
COMPILED = "compiled with the copier"


def interpreted(views: Callable[[], dict[str, torch.Tensor]], seed: int = 0, refused: bool = False) -> Bench:
    """A bench whose kernel runs in its stream's turn."""
    model = Model(seed)
    model.refuse_locks_from = 0 if refused else None
    bench = Bench(views(), model, "kernel").prepared()
    assert bench.copier.choice.kernel_only
    return bench


def check_layout(name: str) -> None:
    """Both directions and layer by layer."""
    bench = interpreted(LAYOUTS[name])
    check_stores(bench)
    check_loads(bench)
    check_layers(bench, seed=4)
    assert {(call.name, call.to_device, call.pieces) for call in bench.model.calls} == {("copy", True, 1)}, (
        "tables and pairs are all that copy engines copy"
    )
    bench.close()


def check_programs() -> None:
    """Each program does its share where there are fewer of them than pieces, and where there are more."""
    for programs in (1, 3, 1000):
        with mock.patch.object(cuda_kernel, "PROGRAMS", programs):
            bench = interpreted(LAYOUTS["LBNHC"])
            check_stores(bench)
            check_loads(bench)
            bench.close()


def check_staged() -> None:
    """These go by the copy engines, through the staging buffer."""
    bench = interpreted(LAYOUTS["words-of-2"], refused=True)
    check_stores(bench)
    check_loads(bench)
    bench.close()


def check_ring() -> None:
    """Copies of several launches each, begun one after the other: a place waits until its launch is over."""
    with mock.patch.object(cuda_kernel, "PLACES", 2), mock.patch.object(cuda_kernel, "PLACE_PAIRS", 2):
        assert all(ring_is_right(seed) for seed in order.SEEDS)
        with mock.patch.object(cuda_streams.ModelEvent, "synchronize"):
            assert not all(ring_is_right(seed) for seed in order.SEEDS)


def ring_is_right(seed: int) -> bool:
    """Whether stores of all blocks and loads into others, under way at once, move the right bytes."""
    bench, engine = order.new_bench(seed, "kernel")
    # The first half of the slots is stored to, the second half is loaded from; of the blocks likewise.
    for slot in range(8, order.SLOTS):
        bench.arena[slot].fill_(100 + slot)
    for block in range(4):
        engine.write([block], 10 + block)
    mark = bench.copier.mark()
    begun = [
        begin(pairs, mark)
        for begin, pairs in (
            (bench.copier.begin_store, [(0, 0), (1, 1), (2, 2)]),
            (bench.copier.begin_load, [(4, 8), (5, 9), (6, 10)]),
            (bench.copier.begin_store, [(3, 3)]),
            (bench.copier.begin_load, [(7, 11), (8, 12)]),
        )
    ]
    bench.model.drain()
    assert all(copying.event.reached for copying in begun)
    right = all(order.slots_hold(bench, [slot], 10 + slot) for slot in range(4)) and all(
        order.content(view[block]) == [104 + block] for view in bench.views.values() for block in range(4, 9)
    )
    bench.close()
    return right


def check_chosen() -> None:
    """For loads of many small pieces, and nothing else."""
    bench = Bench(LAYOUTS["BHLNC"](), Model(), AUTO).prepared()
    pieces = len(bench.copier._pieces.size)
    check_stores(bench)
    check_loads(bench)
    assert len(MOVED) * pieces >= KERNEL_PIECES_MIN > pieces
    stream = bench.copier._load_stream
    for pairs, by_kernel in ((MOVED, True), (MOVED[:1], False)):
        stream.kinds.clear()
        bench.copier.load(pairs)
        assert ("run" in stream.kinds) == by_kernel
    bench.close()


def check_compiled() -> None:
    """What the copier's making launches is all that copies launch later: Triton compiles nothing for them."""
    for method in ("kernel", AUTO):
        for views in LAYOUTS.values():
            with mock.patch.object(cuda_kernel, "copy_pieces", launches := Variants(cuda_kernel.copy_pieces)):
                bench = Bench(views(), Model(), method).prepared()
                bench.model.drain()
                compiled, launches.seen = launches.seen, set()
                check_stores(bench)
                check_loads(bench)
                check_layers(bench, seed=4)
                bench.close()
            assert launches.seen <= compiled
            assert launches.seen or method == AUTO
            assert launches.copied_nothing == bool(compiled)


class Variants:
    """Stands before the kernel, and notes what Triton compiles anew for: constants, and pointers by their alignment."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.seen: set[tuple[object, ...]] = set()
        self.copied_nothing = False

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(pairs: torch.Tensor, table: torch.Tensor, *counts: int, **constants: Any) -> None:
            aligned = tuple(memory.data_ptr() % 16 == 0 for memory in (pairs, table))
            self.seen.add((aligned, *constants.items()))
            self.copied_nothing |= counts[0] == 0
            self._kernel[grid](pairs, table, *counts, **constants)

        return launch


def check_order() -> None:
    """As for the other methods; see there."""
    for seed in range(3):
        assert order.stores_are_right(seed, "kernel", order.held)
        assert order.loads_are_right(seed, "kernel", order.held, by_layer=True)
    assert not all(order.stores_are_right(seed, "kernel", order.not_held) for seed in order.SEEDS)
    assert not all(
        order.loads_are_right(seed, "kernel", order.not_held, by_layer=True) for seed in order.SEEDS
    )


CHECKS: dict[str, Callable[[], None]] = {
    **{name: (lambda name=name: check_layout(name)) for name in LAYOUTS},
    SEVERAL_PROGRAMS: check_programs,
    STAGED: check_staged,
    RING: check_ring,
    CHOSEN: check_chosen,
    COMPILED: check_compiled,
    ORDERED: check_order,
}


def main() -> None:
    """In the process with the interpreter: every check's name and how it failed, or nothing."""
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
