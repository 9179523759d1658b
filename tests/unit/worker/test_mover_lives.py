"""A load that began on one manager's memory never continues on another's."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.clock import ManualClock
from kvbm.protocol import Welcome
from kvbm.step_plan import StepPlan, StorePlan
from kvbm.worker.mover import ADOPT_RETRY_S, Mover
from kvbm.worker.worker import Worker
from rigs.copies_beside import (
    BLOCKS,
    DEADLINE_S,
    HELLO,
    Device,
    Finder,
    Line,
    job_of,
    load,
    make_mover,
    step,
)


def lives() -> tuple[Mover, Line, Device, Device]:
    """A mover in the first of two lives of a manager, both of which count generations alike."""
    first, second = Device(1), Device(2)
    first.at_once = second.at_once = True
    line = Line(1)
    return make_mover(Finder(line, Line(2)), first, second), line, first, second


def copied(device: Device) -> int:
    return sum(len(copying.pairs) for copying in device.begun)


def test_a_load_ends_on_the_memory_it_began_on() -> None:
    mover, line, old, new = lives()
    line.hang_up()
    step(mover)
    assert not mover.connected
    mover.put(job_of(old, load()))
    step(mover)  # takes the load, and joins the next life
    assert mover.connected
    assert mover.loads.get_nowait().failed == ()
    assert copied(old) == BLOCKS
    step(mover, 3)
    assert new.begun == []
    assert old.closed
    mover.stop()


def test_nothing_that_was_meant_for_another_life_is_copied() -> None:
    mover, line, old, new = lives()
    line.hang_up()
    step(mover, 2)
    assert mover.connected
    mover.put(job_of(old, load()))
    step(mover)
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))
    assert new.begun == old.begun == []
    mover.stop()


@pytest.mark.swallows(r"^OSError: \[Errno 12\] no memory$")
def test_memory_that_cannot_be_mapped_is_tried_again_after_a_while_however_long_it_took() -> None:
    """Another try at once could keep the thread busy for good: mapping and page-locking can take minutes."""
    clock, lines = ManualClock(), [Line(), Line(), Line()]
    tried: list[float] = []

    def refuse(welcome: Welcome, fds: list[int]) -> Any:
        tried.append(clock())
        clock.advance(10 * ADOPT_RETRY_S)
        raise OSError(errno.ENOMEM, "no memory")

    mover = Mover(Finder(*lines), HELLO, refuse, clock)  # type: ignore[arg-type]
    step(mover, 3)
    assert len(tried) == 1
    clock.advance(ADOPT_RETRY_S)
    step(mover, 3)
    assert len(tried) == 2
    assert [line.closed for line in lines] == [True, True, False]
    mover.stop()


@pytest.mark.swallows("^RuntimeError: unlocking the host arena$")
def test_a_session_is_closed_when_the_memory_of_the_one_before_cannot_be_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manager would refuse this rank while the session is open: it is attached already."""
    first, second = Line(1), Line(2)
    old = Device(1)
    mover = make_mover(Finder(first, second), old, Device(2))

    def fails() -> None:
        raise RuntimeError("unlocking the host arena")

    with monkeypatch.context() as patch:
        patch.setattr(old, "close", fails)
        first.hang_up()
        step(mover, 2)
    assert second.closed
    assert not mover.connected
    mover.stop()


def test_without_a_session_a_store_fails_at_once_and_the_engine_does_not_wait() -> None:
    cache: Any = SimpleNamespace(layers={}, device=SimpleNamespace(type="cpu"))
    worker = Worker(make_mover(Finder()), cache)
    plan = StorePlan(store=5, epoch=1, slots=(0, 1), generations=(0, 0), device_blocks=(3, 4))
    done = threading.Event()
    thread = threading.Thread(
        target=lambda: (worker.store(StepPlan(stores=(plan,))), done.set()), daemon=True
    )
    thread.start()
    assert done.wait(DEADLINE_S)
    report = worker.report()
    assert report is not None
    assert report.stored == {5: (1, (0, 1), 0.0)}
