"""A load that runs beside the forward pass which reads it: begun layer by layer, waited for layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvbm.transfer import Copying

if TYPE_CHECKING:
    from kvbm.worker.jobs import LoadJob, Mark
    from kvbm.worker.mapping import Mapping


class LayerGate:
    """Where the engine's thread waits for one layer of a load that runs beside the forward pass.

    The engine's thread sets `abandoned` when it waits for no further layer, and `given_up` when it has told that all
    of the load failed; the mover sets `over`.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        self._begun = {layer: threading.Event() for layer in layers}
        self._copies: dict[str, Copying] = {}
        self.over = threading.Event()
        self.abandoned = False
        self.given_up = False

    def open(self, layer: str, copying: Copying | None) -> None:
        """The layer's copy was begun, or will never be."""
        if copying is not None:
            self._copies[layer] = copying
        self._begun[layer].set()

    def open_all(self) -> None:
        """Nobody waits any more."""
        for begun in self._begun.values():
            begun.set()
        self.over.set()

    def pass_through(self, layer: str, after: Mark | None, timeout_s: float) -> bool:
        """Wait until the layer's copy was begun, and have the device wait for its end; False after `timeout_s`."""
        begun = self._begun.get(layer)
        if begun is None:
            return True
        if not begun.wait(timeout_s):
            return False
        copying = self._copies.get(layer)
        if copying is not None and after is not None:
            after.mapping.copier.hold(copying)
        return True


def begin_layers(job: LoadJob, gate: LayerGate, mapping: Mapping, begun: list[Copying]) -> None:
    """Begin the whole load, one layer after the other, each announced at once, and wait for its end.

    What was begun is in `begun`, whatever happens; `job.copied` is what has arrived. Raises as copies do.
    """
    plan, after = job.plan, job.after
    assert after is not None and job.ready == len(plan.slots)
    if mapping.intact(plan.slots, plan.generations) < len(plan.slots):
        return
    pairs = list(zip(plan.device_blocks, plan.slots, strict=True))
    for layer in mapping.layers:
        if gate.abandoned:
            return
        begun.append(mapping.copier.begin_load(pairs, after.event, layer))
        gate.open(layer, begun[-1])
    begun[-1].wait()
    job.copied = mapping.intact(plan.slots, plan.generations)
