"""The keeper's thread: jobs in order, jobs that wait take turns, and nobody waits for what cannot come."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from kvbm.clock import ManualClock
from kvbm.sglang_integration import keeper as keeper_module
from kvbm.sglang_integration.keeper import IDLE_S, JOBS_MAX, Keeper

DEADLINE_S = 30.0


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper("test-keeper")
    yield keeper
    keeper.close(lambda: None, DEADLINE_S)


class Gate:
    """A job that stands still until it is opened."""

    def __init__(self, keeper: Keeper) -> None:
        self.begun, self._open = threading.Event(), threading.Event()
        self.result = keeper.submit(self._wait, "")
        assert self.begun.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()

    def _wait(self) -> str:
        self.begun.set()
        assert self._open.wait(DEADLINE_S)
        return "through"


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """What the call returns, in a thread of its own."""
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result


def test_jobs_run_in_order_in_one_thread(keeper: Keeper) -> None:
    seen: list[int] = []
    threads: set[int] = set()

    def job(number: int) -> int:
        seen.append(number)
        threads.add(threading.get_ident())
        return 2 * number

    results = [keeper.submit(lambda number=number: job(number), -1) for number in range(50)]
    assert [result.result(DEADLINE_S) for result in results] == [2 * number for number in range(50)]
    assert seen == list(range(50))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_jobs_that_wait_take_turns_and_others_go_on(keeper: Keeper) -> None:
    steps: list[str] = []
    end = threading.Event()

    def waiting(name: str) -> Generator[None, None, str]:
        while not end.is_set():
            steps.append(name)
            yield
        return name

    one, two = keeper.submit(lambda: waiting("one"), ""), keeper.submit(lambda: waiting("two"), "")
    until(lambda: "two" in steps)
    assert keeper.call(lambda: "between", "", DEADLINE_S) == "between"
    mark = len(steps)
    until(lambda: len(steps) > mark + 4)
    later = steps[mark + 1 : mark + 5]
    assert later in (["one", "two"] * 2, ["two", "one"] * 2)
    end.set()
    assert (one.result(DEADLINE_S), two.result(DEADLINE_S)) == ("one", "two")


def test_a_job_that_began_is_awaited_however_long_it_takes(keeper: Keeper) -> None:
    """It may be writing into the caller's memory."""
    begun, go_on = threading.Event(), threading.Event()

    def writing() -> str:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return "written"

    gate = Gate(keeper)
    call = in_thread(lambda: keeper.call(writing, "too late", DEADLINE_S))
    gate.open()
    assert begun.wait(DEADLINE_S)
    assert not call.done()
    go_on.set()
    assert call.result(DEADLINE_S) == "written"


def test_the_timeout_is_no_end_for_a_job_that_has_begun(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    wait = keeper_module.concurrent.futures.wait

    def late(results: Any, timeout_s: float) -> Any:
        assert begun.wait(DEADLINE_S)
        try:
            return wait(results, 0.0)
        finally:
            go_on.set()

    def writing() -> str:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return "written"

    monkeypatch.setattr(keeper_module.concurrent.futures, "wait", late)
    assert keeper.call(writing, "too late", 0.0) == "written"


def test_a_job_that_did_not_begin_in_time_never_runs(keeper: Keeper) -> None:
    gate, ran = Gate(keeper), list[int]()
    assert keeper.call(lambda: ran.append(1), "too late", 0.0) == "too late"
    gate.open()
    assert keeper.call(lambda: "next", "", DEADLINE_S) == "next"
    assert ran == []


def test_a_full_queue_refuses_one_more(keeper: Keeper) -> None:
    gate = Gate(keeper)
    queued = [keeper.submit(lambda: True, False) for _ in range(JOBS_MAX)]
    assert keeper.submit(lambda: True, False).result(0.0) is False
    gate.open()
    assert all(result.result(DEADLINE_S) for result in queued)
    assert keeper.call(lambda: True, False, DEADLINE_S)


@pytest.mark.swallows("^ValueError: broken$")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_job_that_raises_costs_its_caller_the_result_and_nobody_else(
    keeper: Keeper, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Generator[None, None, str]:
        for _ in range(steps):
            yield
        raise ValueError("broken")

    def broken() -> str:
        raise ValueError("broken")

    work: Any = failing if steps else broken
    assert keeper.call(work, "otherwise", DEADLINE_S) == "otherwise"
    assert isinstance(keeper.submit(work, "").exception(DEADLINE_S), ValueError)
    assert keeper.call(lambda: "next", "", DEADLINE_S) == "next"
    assert sum("costs this call its result" in record.getMessage() for record in caplog.records) == 2


def test_an_event_is_told_when_a_descriptor_can_be_read() -> None:
    told, said = threading.Event(), os.eventfd(0, os.EFD_NONBLOCK)

    def event() -> None:
        os.eventfd_read(said)
        told.set()

    keeper = Keeper("test-keeper", event, lambda: (said,), ManualClock())
    keeper.call(lambda: None, None, DEADLINE_S)
    assert not told.is_set()
    os.eventfd_write(said, 1)
    assert told.wait(DEADLINE_S)
    keeper.close(lambda: None, DEADLINE_S)
    os.close(said)


def test_an_event_is_told_about_once_a_second_however_many_jobs_there_are() -> None:
    clock, told = ManualClock(), list[float]()
    keeper = Keeper("test-keeper", lambda: told.append(clock()), tuple, clock)
    for _ in range(5):
        gate = Gate(keeper)
        jobs = [keeper.submit(lambda: True, False) for _ in range(3)]
        gate.open()
        assert all(job.result(DEADLINE_S) for job in jobs)
        clock.advance(0.4 * IDLE_S)
    keeper.close(lambda: None, DEADLINE_S)
    assert told == [pytest.approx(1.2 * IDLE_S)], told


@pytest.mark.swallows("^ValueError: broken$")
def test_a_defect_of_an_event_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()

    def broken() -> None:
        raise ValueError("broken")

    keeper = Keeper("test-keeper", broken, tuple, clock)
    clock.advance(IDLE_S)
    assert keeper.call(lambda: 1, 0, DEADLINE_S) == 1
    assert keeper.call(lambda: 2, 0, DEADLINE_S) == 2
    keeper.close(lambda: None, DEADLINE_S)
    assert any("a defect in KVBM" in record.getMessage() for record in caplog.records)


# ---- the end


def test_closing_drops_what_has_not_begun_and_its_callers_hear_of_it_at_once() -> None:
    keeper, ran, order = Keeper("test-keeper"), list[str](), list[str]()
    gate = Gate(keeper)
    waiting = in_thread(lambda: keeper.call(lambda: ran.append("job"), "dropped", 1000 * DEADLINE_S))
    until(lambda: keeper._jobs.qsize() == 1)
    closing = in_thread(lambda: keeper.close(lambda: order.append("last"), DEADLINE_S))
    assert waiting.result(DEADLINE_S) == "dropped"
    gate.open()
    closing.result(DEADLINE_S)
    assert gate.result.result(DEADLINE_S) == "through"
    assert (ran, order) == ([], ["last"])
    assert not keeper._thread.is_alive()


def test_closing_ends_jobs_that_wait_before_what_they_use_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order: list[str] = []
    keeper, begun = Keeper("test-keeper"), threading.Event()

    def endless() -> Generator[None, None, str]:
        try:
            while True:
                begun.set()
                yield
        finally:
            order.append("given back")

    call = in_thread(lambda: keeper.call(endless, "otherwise", DEADLINE_S))
    assert begun.wait(DEADLINE_S)
    keeper.close(lambda: order.append("last"), DEADLINE_S)
    assert call.result(DEADLINE_S) == "otherwise"
    assert order == ["given back", "last"]
    assert not caplog.records, "an end is no defect"


def test_after_the_end_everything_is_refused_and_its_descriptor_is_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    keeper = Keeper("test-keeper")
    keeper.close(lambda: None, DEADLINE_S)
    keeper.close(lambda: pytest.fail("twice"), DEADLINE_S)
    assert keeper.submit(lambda: 1, 0).result(0.0) == 0
    assert keeper.call(lambda: 1, 0, 0.0) == 0
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_job_that_is_cancelled_by_whoever_submitted_it_does_not_run(keeper: Keeper) -> None:
    gate, ran = Gate(keeper), list[int]()
    result = keeper.submit(lambda: ran.append(1), None)
    assert result.cancel()
    gate.open()
    assert keeper.call(lambda: 1, 0, DEADLINE_S) == 1
    with pytest.raises(CancelledError):
        result.result(DEADLINE_S)
    assert ran == []
