"""The checks of the copy kernel, for a process in which Triton interprets kernels."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from unittest import mock

import torch

from kvbm.transfer.cuda import choice
from rigs import cuda_order as order
from rigs import cuda_streams
from rigs.cuda_bench import LAYOUTS, MOVED, Bench, check_layers, check_loads, check_stores
from rigs.cuda_model import Model

ORDERED = "stores and loads in order"
SEVERAL_PROGRAMS = "more pieces than programs"
STAGED = "slots that are not locked"
RING = "pairs in a ring of two places"
CHOSEN = "chosen by measurement"


def interpreted(views: Callable[[], dict[str, torch.Tensor]], seed: int = 0, refused: bool = False) -> Bench:
    """A bench whose kernel runs in its stream's turn."""
    model = Model(seed)
    model.driver.kernels = True
    model.refuse_locks_from = 0 if refused else None
    bench = Bench(views(), model, "kernel").prepared()
    assert bench.copier.choice.load.name == "kernel"
    return bench


def check_layout(name: str) -> None:
    """Both directions and layer by layer."""
    bench = interpreted(LAYOUTS[name])
    check_stores(bench)
    check_loads(bench)
    check_layers(bench, seed=4)
    assert {(call.name, call.to_device, call.pieces) for call in bench.model.calls} == {("each", True, 1)}, (
        "tables and pairs are all that copy engines copy"
    )
    bench.close()


def check_programs() -> None:
    """Each program does its share where there are fewer of them than pieces, and where there are more."""
    for programs in (1, 3, 1000):
        bench = interpreted(LAYOUTS["LBNHC"])
        bench.copier.choice.store._programs = programs
        check_stores(bench)
        check_loads(bench)
        bench.close()


def check_staged() -> None:
    """The kernel works on the staging buffer too."""
    bench = interpreted(LAYOUTS["words-of-2"], refused=True)
    check_stores(bench)
    check_loads(bench)
    bench.close()


def check_ring() -> None:
    """Copies of several launches each, begun one after the other: a place waits until its launch is over."""
    from kvbm.transfer.cuda import kernel as cuda_kernel

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
    """Measured for loads alone, and used for those of many pieces."""
    model = Model()
    model.driver.kernels = True
    model.seconds = {"kernel": (0.1, 1.0), "batch": (1.0, 1.5), "rows": (2.0, 2.0), "each": (2.0, 2.0)}
    # A sample of two blocks: an interpreter is slow.
    with mock.patch.object(choice, "SAMPLE_BLOCKS_MAX", 2), mock.patch.object(choice, "COPIES_A_ROUND", 1):
        bench = Bench(LAYOUTS["BHLNC"](), model, "auto").prepared()
    assert [method.name for method in bench.copier.choice] == ["batch", "kernel", "batch"]
    pieces = len(bench.copier._pieces.size)
    check_stores(bench)
    check_loads(bench)
    assert len(MOVED) * pieces >= choice.KERNEL_PIECES_MIN > pieces
    stream = bench.copier._load_stream
    for pairs, by_kernel in ((MOVED, True), (MOVED[:1], False)):
        stream.kinds.clear()
        bench.copier.load(pairs)
        assert ("run" in stream.kinds) == by_kernel
    bench.close()


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
