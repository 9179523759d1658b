"""Threads that call a store: bounds, and what happens with one that hangs."""

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
def make() -> Iterator[Callable[[int, int], Workers]]:
    made: list[Workers] = []

    def make(count: int, spare_max: int) -> Workers:
        made.append(Workers("test", count, spare_max))
        return made[-1]

    yield make
    for workers in made:
        assert workers.stop(WAIT_S)


def test_tasks_run_in_order_and_an_urgent_one_before(make: Callable[[int, int], Workers]) -> None:
    workers, gate, ran = make(1, 0), Gate(), list[int]()
    workers.run(gate)
    assert gate.began.wait(WAIT_S)
    for number in range(3):
        workers.run(lambda number=number: ran.append(number))  # type: ignore[misc]
    workers.run(lambda: ran.append(9), first=True)
    assert ran == [] and not workers.wait_idle(0.0)
    gate.opened.set()
    assert workers.wait_idle(WAIT_S)
    assert ran == [9, 0, 1, 2]


def test_a_hanging_thread_is_replaced_and_ends_when_it_comes_back(
    make: Callable[[int, int], Workers],
) -> None:
    workers, gate, done = make(1, 1), Gate(), threading.Event()
    workers.run(gate)
    assert gate.began.wait(WAIT_S)
    workers.run(done.set)
    workers.give_up(gate)
    assert done.wait(WAIT_S) and workers.hanging == 1
    assert workers.wait_idle(WAIT_S), "nobody waits for the one that hangs"
    gate.opened.set()
    again = Gate()
    workers.run(again)
    assert again.began.wait(WAIT_S)
    again.opened.set()
    assert workers.wait_idle(WAIT_S)


def test_replacements_are_bounded(make: Callable[[int, int], Workers]) -> None:
    workers, gates = make(1, 1), [Gate() for _ in range(3)]
    for gate in gates:
        workers.run(gate)
    assert gates[0].began.wait(WAIT_S)
    workers.give_up(gates[0])
    assert gates[1].began.wait(WAIT_S)
    workers.give_up(gates[1])
    assert workers.running == 2 and not gates[2].began.is_set()
    gates[0].opened.set()
    gates[1].opened.set()
    assert gates[2].began.wait(WAIT_S), "a thread that came back goes on"
    gates[2].opened.set()


def test_a_task_that_was_given_up_before_it_began_does_not_run(make: Callable[[int, int], Workers]) -> None:
    workers, gate, never = make(1, 0), Gate(), Gate()
    workers.run(gate)
    workers.run(never)
    workers.give_up(never)
    gate.opened.set()
    assert workers.wait_idle(WAIT_S) and not never.began.is_set()


@pytest.mark.swallows("^ZeroDivisionError: division by zero$")
def test_a_defect_ends_no_thread(
    make: Callable[[int, int], Workers], caplog: pytest.LogCaptureFixture
) -> None:
    workers, done = make(1, 0), threading.Event()
    workers.run(lambda: 1 / 0)  # type: ignore[arg-type]
    workers.run(done.set)
    assert done.wait(WAIT_S) and "ZeroDivisionError" in caplog.text


def test_nothing_runs_after_the_end(make: Callable[[int, int], Workers]) -> None:
    workers = make(2, 0)
    assert workers.stop(WAIT_S)
    assert not workers.run(lambda: None)
