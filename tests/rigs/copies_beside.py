"""Copies that run by themselves, as on a GPU: a device whose copies end when the test says so, and a mover over it."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

from kvbm.protocol import PROTOCOL_VERSION, Hello, LoadPlan, StorePlan
from kvbm.worker.jobs import PIECE_BLOCKS, LoadJob, Mark
from kvbm.worker.layers import LayerGate
from kvbm.worker.mover import Mover

BLOCKS = 4 * PIECE_BLOCKS
LAYERS = ("a", "b", "c")
DEADLINE_S = 20.0
HELLO = Hello(version=PROTOCOL_VERSION, role="worker", engine="e")


class Copying:
    """A copy that ends when the test says so."""

    def __init__(self, what: str, pairs: list[tuple[int, int]], layer: str | None = None) -> None:
        self.what, self.pairs, self.layer = what, pairs, layer
        self.error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    def done(self) -> bool:
        if self._over.is_set() and self.error:
            raise self.error
        return self._over.is_set()

    def wait(self) -> None:
        assert self._over.wait(DEADLINE_S), "waits for a copy that the test has not ended"
        if self.error:
            raise self.error


class Device:
    """A mapping and its copier: everything that was begun, and what the engine's stream was told to wait for."""

    epoch = 1
    layers = LAYERS

    def __init__(self) -> None:
        self.copier = self
        self.begun: list[Copying] = []
        self.held: list[Copying] = []
        self.changed: set[int] = set()
        self.at_once = False
        self.adopted_by: list[str] = []

    def adopt_thread(self) -> None:
        self.adopted_by.append(threading.current_thread().name)

    def mark(self) -> str:
        return "mark"

    def intact(self, slots: tuple[int, ...], generations: tuple[int, ...]) -> int:
        return next((i for i, slot in enumerate(slots) if slot in self.changed), len(slots))

    def begin_store(self, pairs: Any, after: Any) -> Copying:
        return self._begin("store", pairs)

    def begin_load(self, pairs: Any, after: Any, layer: str | None = None) -> Copying:
        return self._begin("load", pairs, layer)

    def hold(self, copying: Copying) -> None:
        self.held.append(copying)

    def close(self) -> None:
        assert all(copying.done() for copying in self.begun)

    def _begin(self, what: str, pairs: Any, layer: str | None = None) -> Copying:
        self.begun.append(Copying(what, list(pairs), layer))
        if self.at_once:
            self.begun[-1].end()
        return self.begun[-1]


class Line:
    """A session that takes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.incoming: list[Any] = []
        self.closed = False
        self._descriptor = os.eventfd(0)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        messages, self.incoming = self.incoming, []
        return messages

    def fileno(self) -> int:
        return self._descriptor

    def take_fds(self) -> list[int]:
        return []

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        self.closed = True


def stores(*numbers: int) -> tuple[StorePlan, ...]:
    return tuple(
        StorePlan(store=n, epoch=1, slots=(n,), generations=(0,), device_blocks=(n,)) for n in numbers
    )


def load(layerwise: bool = False, blocks: int = BLOCKS) -> LoadPlan:
    numbers = tuple(range(blocks))
    return LoadPlan(
        request="r",
        lookup=1,
        epoch=1,
        slots=numbers,
        generations=(0,) * blocks,
        device_blocks=numbers,
        offset=0,
        ready=blocks,
        layerwise=layerwise,
    )


def make_mover(device: Device) -> Any:
    """A mover that no thread runs: the test takes its turns. Its session is a `Line`."""
    made: Any = Mover(SimpleNamespace(attempt=lambda: None), HELLO, lambda *_: device, lambda: 0.0)  # type: ignore[arg-type, return-value]
    made._mapping, made._channel = device, Line()
    return made


def job_of(device: Device, plan: LoadPlan, gate: LayerGate | None = None) -> LoadJob:
    mark = Mark(device, None)  # type: ignore[arg-type]
    return LoadJob(plan, mark, ready=plan.ready, started_s=0.0, heard_s=0.0, layers=gate)


def told(mover: Any) -> list[tuple[int, tuple[int, ...]]]:
    """The stores reported so far: (number, failed)."""
    found = []
    while not mover.stores.empty():
        store = mover.stores.get_nowait()
        found.append((store.store, store.failed))
    return found
