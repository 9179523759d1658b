"""Where the engine's thread waits for the layers of a load that runs beside the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvbm.transfer import Copying
from kvbm.worker.mapping import Mark


class LayerGate:
    """One load, layer by layer: the mover opens the gate of each layer, the engine's thread passes through.

    The engine's thread sets `abandoned` when it waits for no further layer; the mover sets `writes` before it begins a
    copy, and `over`. The first of both to claim the report reports the load's end.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        self._begun = {layer: threading.Event() for layer in layers}
        self._copies: dict[str, Copying] = {}
        self.over = threading.Event()
        self.abandoned = self.writes = False
        self._report = threading.Lock()

    def open(self, layer: str, copying: Copying) -> None:
        """The copy of this layer was begun."""
        self._copies[layer] = copying
        self._begun[layer].set()

    def abandon(self) -> bool:
        """Have no further layer begun. Whether none was begun before."""
        self.abandoned = True  # first: the mover sets `writes` before it reads this
        return not self.writes

    def claim_report(self) -> bool:
        """Whether the caller reports the end of this load: True once."""
        return self._report.acquire(blocking=False)

    def open_all(self) -> None:
        """The load has ended: no layer is waited for any more."""
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
            after.hold(copying)
        return True
