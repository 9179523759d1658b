"""A load that began on one manager's memory never continues on another's."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.protocol import PROTOCOL_VERSION, Hello, LoadPlan, StepPlan, StorePlan, Welcome
from kvbm.worker.jobs import PIECE_BLOCKS, LoadJob, Mark
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker

BLOCKS = 3 * PIECE_BLOCKS


class Over:
    """A copy that has ended."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class RecordingMapping:
    """A mapping whose slots are always intact, as if both lives counted generations alike."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.layers = ("layer",)
        self.copier = self
        self.loaded: list[tuple[int, int]] = []
        self.closed = False

    def intact(self, slots: tuple[int, ...], generations: tuple[int, ...]) -> int:
        return len(slots)

    def begin_load(self, pairs: list[tuple[int, int]], after: object) -> Over:
        assert not self.closed
        self.loaded += pairs
        return Over()

    def close(self) -> None:
        self.closed = True


class NoManager:
    """A finder that finds nothing."""

    def attempt(self) -> None:
        return None


class Line:
    """A session that is never read from."""

    def take_fds(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


HELLO = Hello(version=PROTOCOL_VERSION, role="worker", engine="e")


def mover_with(old: RecordingMapping, new: RecordingMapping) -> Any:
    mover: Any = Mover(NoManager(), HELLO, lambda welcome, fds: new, lambda: 0.0)  # type: ignore[arg-type, return-value]
    mover._mapping = old
    return mover


def load_of(mapping: RecordingMapping) -> LoadJob:
    numbers = tuple(range(BLOCKS))
    plan = LoadPlan(
        request="r",
        lookup=1,
        epoch=mapping.epoch,
        slots=numbers,
        generations=(0,) * BLOCKS,
        device_blocks=numbers,
        offset=0,
        ready=BLOCKS,
    )
    mark = Mark(mapping, None)  # type: ignore[arg-type]
    return LoadJob(plan, mark, copied=0, ready=BLOCKS, started_s=0.0, heard_s=0.0)


def test_a_load_ends_on_the_memory_it_began_on() -> None:
    old, new = RecordingMapping(1), RecordingMapping(2)
    mover = mover_with(old, new)
    mover._begin_load(load_of(old))
    mover._copy_pieces()
    assert len(old.loaded) == PIECE_BLOCKS
    mover._adopt(Line(), Welcome(version=PROTOCOL_VERSION, epoch=2))
    assert mover.loads.get_nowait().failed == ()
    assert len(old.loaded) == BLOCKS
    mover._copy_pieces()
    assert new.loaded == []
    assert old.closed


def test_a_piece_of_another_life_is_not_copied() -> None:
    old, new = RecordingMapping(1), RecordingMapping(2)
    mover = mover_with(old, new)
    job = load_of(old)
    mover._begin_load(job)
    mover._mapping = new
    mover._copy_pieces()
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))
    assert new.loaded == []


def test_without_a_session_a_store_fails_at_once_and_the_engine_does_not_wait() -> None:
    cache: Any = SimpleNamespace(layers={}, device=SimpleNamespace(type="cpu"))
    worker: Any = Worker(NoManager(), HELLO, cache)  # type: ignore[arg-type]
    plan = StorePlan(store=5, epoch=1, slots=(0, 1), generations=(0, 0), device_blocks=(3, 4))
    done = threading.Event()
    thread = threading.Thread(
        target=lambda: (worker.store(StepPlan(stores=(plan,))), done.set()), daemon=True
    )
    thread.start()
    assert done.wait(10.0)
    assert worker.report().stored == {5: (1, (0, 1), 0.0)}
