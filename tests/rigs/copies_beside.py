"""Copies that run by themselves, as on a GPU: a device whose copies a test ends, and a mover over it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from kvbm.clock import Clock
from kvbm.errors import CopyHung, ManagerUnavailable
from kvbm.protocol import PROTOCOL_VERSION, Hello, Welcome
from kvbm.step_plan import LoadPlan, StorePlan
from kvbm.worker.jobs import LoadJob, StoreJob
from kvbm.worker.layers import LayerGate
from kvbm.worker.loading import FIRST_PIECE_BYTES, PIECE_BYTES, WINDOW_BYTES
from kvbm.worker.mapping import Mark
from kvbm.worker.mover import Mover

SLOT_BYTES = FIRST_PIECE_BYTES
FIRST_BLOCKS = FIRST_PIECE_BYTES // SLOT_BYTES
PIECE_BLOCKS = PIECE_BYTES // SLOT_BYTES
WINDOW_BLOCKS = WINDOW_BYTES // SLOT_BYTES
BLOCKS = WINDOW_BLOCKS + 2 * PIECE_BLOCKS
LAYERS = ("a", "b", "c")
DEADLINE_S = 20.0
HELLO = Hello(version=PROTOCOL_VERSION, role="worker", engine="e")


class Copying:
    """A copy that a test ends, or the first `wait` if it is `patient`. A `wait` sets `awaited`, and fails at once if
    the copy `hangs`."""

    def __init__(
        self, what: str, pairs: list[tuple[int, int]], layer: str | None = None, after: Any = None
    ) -> None:
        self.what, self.pairs, self.layer, self.after = what, pairs, layer, after
        self.error: Exception | None = None
        self.awaited = threading.Event()
        self.patient = self.hangs = False
        self._over = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    @property
    def over(self) -> bool:
        """The test has ended it."""
        return self._over.is_set()

    def done(self) -> bool:
        if self._over.is_set() and self.error:
            raise self.error
        return self._over.is_set()

    def wait(self) -> None:
        self.awaited.set()
        if self.hangs:
            raise CopyHung("this copy hangs")
        if self.patient:
            self._over.set()
        assert self._over.wait(DEADLINE_S), "waits for a copy that the test has not ended"
        if self.error:
            raise self.error


class Device:
    """A mapping and its copier: all copies that were begun, and those that the engine's stream waits for."""

    layers = LAYERS
    slot_bytes = SLOT_BYTES

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.copier = self
        self.begun: list[Copying] = []
        self.held: list[Copying] = []
        self.changed: set[int] = set()
        self.at_once = self.patient = False
        self.refused_from = -1
        self.when_begun: Callable[[], object] = lambda: None
        self.adopted_by: list[str] = []
        self.adopted = threading.Event()
        self.begun_one = threading.Event()
        self.closed = False

    def adopt_thread(self) -> None:
        self.adopted_by.append(threading.current_thread().name)
        self.adopted.set()

    def mark(self) -> str:
        return "mark"

    def intact(self, slots: tuple[int, ...], generations: tuple[int, ...]) -> int:
        return next((i for i, slot in enumerate(slots) if slot in self.changed), len(slots))

    def begin_store(self, pairs: Any, after: Any) -> Copying:
        return self._begin("store", pairs, None, after)

    def begin_load(self, pairs: Any, after: Any, layer: str | None = None) -> Copying:
        return self._begin("load", pairs, layer, after)

    def hold(self, copying: Copying) -> None:
        self.held.append(copying)

    def close(self) -> None:
        assert all(copying.over for copying in self.begun)
        self.closed = True

    def _begin(self, what: str, pairs: Any, layer: str | None, after: Any) -> Copying:
        assert not self.closed
        if len(self.begun) == self.refused_from:
            raise RuntimeError("refused")
        self.begun.append(Copying(what, list(pairs), layer, after))
        self.begun[-1].patient = self.patient
        if self.at_once:
            self.begun[-1].end()
        self.begun_one.set()
        self.when_begun()
        return self.begun[-1]

    def end_all(self) -> None:
        """All that was begun has been copied."""
        for copying in self.begun:
            if not copying.over:
                copying.end()


class Line:
    """A session with a manager of this epoch: it takes what is sent, and says what the test has it say."""

    def __init__(self, epoch: int = 1) -> None:
        self.sent: list[Any] = []
        self.closed = False
        self._welcome = Welcome(version=PROTOCOL_VERSION, epoch=epoch)
        self._incoming: list[Any] = []
        self._gone = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def say(self, *messages: Any) -> None:
        self._incoming += messages
        os.eventfd_write(self._descriptor, 1)

    def hang_up(self) -> None:
        """The manager goes."""
        self._gone = True
        self.say()

    def introduce(self, hello: Hello, timeout_s: float) -> Welcome:
        return self._welcome

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        os.eventfd_read(self._descriptor)
        if self._gone:
            raise ManagerUnavailable("it hung up")
        messages, self._incoming = self._incoming, []
        return messages

    def fileno(self) -> int:
        return self._descriptor

    def take_fds(self) -> list[int]:
        return []

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        self.closed = True


class Finder:
    """Finds the sessions that the test made, in this order, and then none."""

    def __init__(self, *lines: Line) -> None:
        self.lines = list(lines)

    def attempt(self) -> Line | None:
        return self.lines.pop(0) if self.lines else None

    def establish(self, hello: Hello, timeout_s: float, pause: Any) -> tuple[Line, Welcome]:
        line = self.attempt()
        assert line is not None
        return line, line.introduce(hello, timeout_s)

    def welcomed(self) -> None:
        """It keeps no back-off."""


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


def make_mover(finder: Finder, *devices: Any, clock: Clock = lambda: 0.0) -> Mover:
    """A mover that no thread runs, in the first of the finder's sessions: the test takes its turns.

    Each session gives the device of its epoch.
    """
    by_epoch = {device.epoch: device for device in devices}
    made = Mover(finder, HELLO, lambda welcome, fds: by_epoch[welcome.epoch], clock)  # type: ignore[arg-type]
    if finder.lines:
        made.attach(0.0)
    return made


def step(mover: Mover, turns: int = 1) -> None:
    """Some turns that wait for nothing."""
    for _ in range(turns):
        mover.turn(wait=False)


def store_job(device: Device, *numbers: int) -> StoreJob:
    return StoreJob(stores(*numbers), Mark(device, None))  # type: ignore[arg-type]


def job_of(device: Device, plan: LoadPlan, gate: LayerGate | None = None) -> LoadJob:
    mark = Mark(device, None)  # type: ignore[arg-type]
    return LoadJob(plan, mark, ready=plan.ready, started_s=0.0, last_progress_s=0.0, layers=gate)


def reported(mover: Mover) -> list[tuple[int, tuple[int, ...]]]:
    """The stores reported so far: (number, failed)."""
    found = []
    while not mover.stores.empty():
        store = mover.stores.get_nowait()
        found.append((store.store, store.failed))
    return found
