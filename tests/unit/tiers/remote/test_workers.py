"""Threads that call a store: order, bounds and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvbm.tiers.remote.workers import Workers

WAIT_S = 20.0


class Gate:
    """A task that hangs until it is opened."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.opened.wait(WAIT_S)


@pytest.fixture
def make() -> Iterator[Callable[[int], Workers]]:
    made: list[Workers] = []

    def make(count: int) -> Workers:
        made.append(Workers("test", count))
        return made[-1]

    yield make
    for workers in made:
        assert workers.stop(WAIT_S)


def test_tasks_run_in_order(make: Callable[[int], Workers]) -> None:
    workers, gate, ran, done = make(1), Gate(), list[int](), threading.Event()
    workers.run(gate)
    assert gate.began.wait(WAIT_S)
    for number in range(3):
        workers.run(lambda number=number: ran.append(number))  # type: ignore[misc]
    workers.run(done.set)
    assert ran == []
    gate.opened.set()
    assert done.wait(WAIT_S) and ran == [0, 1, 2]


def test_threads_are_bounded_and_one_that_comes_back_goes_on(make: Callable[[int], Workers]) -> None:
    workers, gates = make(2), [Gate() for _ in range(3)]
    for gate in gates:
        workers.run(gate)
    assert gates[0].began.wait(WAIT_S) and gates[1].began.wait(WAIT_S)
    assert not gates[2].began.is_set()
    gates[1].opened.set()
    assert gates[2].began.wait(WAIT_S)
    for gate in gates:
        gate.opened.set()


@pytest.mark.swallows("^ZeroDivisionError: division by zero$")
def test_a_defect_ends_no_thread(make: Callable[[int], Workers], caplog: pytest.LogCaptureFixture) -> None:
    workers, done = make(1), threading.Event()
    workers.run(lambda: 1 / 0)  # type: ignore[arg-type]
    workers.run(done.set)
    assert done.wait(WAIT_S) and "ZeroDivisionError" in caplog.text


def test_a_task_that_hangs_does_not_hold_up_the_end(make: Callable[[int], Workers]) -> None:
    workers, gate, never = make(1), Gate(), Gate()
    workers.run(gate)
    workers.run(never)
    assert gate.began.wait(WAIT_S) and not workers.stop(0.0)
    gate.opened.set()
    assert workers.stop(WAIT_S) and not never.began.is_set()


def test_nothing_runs_after_the_end(make: Callable[[int], Workers]) -> None:
    workers = make(2)
    assert workers.stop(WAIT_S)
    assert not workers.run(lambda: None)
