"""The checks of the copy kernel, for a process in which Triton interprets kernels."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import torch

from rigs import cuda_order as order
from rigs.cuda_bench import LAYOUTS, Bench, check_layers, check_loads, check_stores
from rigs.cuda_model import Model

ORDERED = "stores and loads in order"
SEVERAL_PROGRAMS = "more pieces than programs"
STAGED = "slots that are not locked"


def interpreted(views: Callable[[], dict[str, torch.Tensor]], seed: int = 0, refused: bool = False) -> Bench:
    """A bench whose kernel runs in its stream's turn."""
    model = Model(seed)
    model.deferred = model.driver.kernels = True
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
    assert bench.model.calls == []
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
