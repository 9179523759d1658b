"""What keeps device blocks in use ends before vLLM resets its cache although requests run, on a core that stands in."""

from __future__ import annotations

import queue
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the names are vLLM's; vllm is not installed")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvbm.clock import ManualClock
from kvbm.vllm_integration.forced_reset import END_S_MAX, free_all_blocks


def request(name: str, status: RequestStatus, computed: int = 8) -> Any:
    return SimpleNamespace(
        request_id=name, status=status, num_computed_tokens=computed, num_preemptions=int(name == "again")
    )


class Core:
    """An engine core with requests, and a step in flight. Each step takes a second, and ends a load if `loads_end`."""

    def __init__(self, requests: list[Any], loads_end: bool = True) -> None:
        self.clock, self.loads_end = ManualClock(), loads_end
        self.batch_queue = deque(["a step"])
        self.told: list[str] = []
        self.freed: list[str] = []
        self.executed: list[bool] = []
        self.loading = [each.request_id for each in requests if "load" in each.request_id]
        self.scheduler = SimpleNamespace(
            requests={each.request_id: each for each in requests},
            pause_state=PauseState.UNPAUSED,
            set_pause_state=lambda state: setattr(self.scheduler, "pause_state", state),
            finished_recving_kv_req_ids={"again", "loaded"},
            failed_recving_kv_req_ids={"loaded"},
            kv_cache_manager=SimpleNamespace(free=lambda each: self.freed.append(each.request_id)),
        )
        self.model_executor = SimpleNamespace(collective_rpc=self._in_ranks)
        self.step_fn = self._step

    def _in_ranks(self, function: Any, timeout: float) -> None:
        assert timeout <= END_S_MAX
        self.told.append(function)

    def _step(self) -> tuple[dict[int, str], bool]:
        assert self.scheduler.pause_state == PauseState.PAUSED_ALL, "nothing new is computed"
        self.clock.advance(1.0)
        if self.batch_queue:
            return {0: self.batch_queue.pop()}, True
        if self.loads_end and self.loading:
            self.scheduler.finished_recving_kv_req_ids.add(self.loading.pop())
        return {}, False

    def post_step(self, model_executed: bool) -> None:
        self.executed.append(model_executed)

    def free_all_blocks(self) -> None:
        free_all_blocks(self, lambda: [*self.loading, "of another core"], "end loads", self.clock)  # type: ignore[arg-type]


REMOTE = RequestStatus.WAITING_FOR_REMOTE_KVS


def test_loads_and_steps_end_and_what_is_loaded_gives_its_blocks_back() -> None:
    requests = [
        request("loading", REMOTE),
        request("again", REMOTE),
        request("loaded", REMOTE),
        request("not begun", RequestStatus.WAITING),
        request("waits", RequestStatus.WAITING, computed=0),
        request("runs", RequestStatus.RUNNING),
        request("of another connector", REMOTE),
    ]
    core = Core(requests)
    core.free_all_blocks()
    assert (core.told, core.loading) == (["end loads"], [])
    assert sorted(core.freed) == ["again", "loaded", "loading", "not begun"]
    assert [each.num_computed_tokens for each in requests] == [0, 0, 0, 0, 0, 8, 8]
    assert [each.status for each in requests[:3]] == [
        RequestStatus.WAITING,
        RequestStatus.PREEMPTED,
        RequestStatus.WAITING,
    ]
    assert core.scheduler.finished_recving_kv_req_ids == core.scheduler.failed_recving_kv_req_ids == set()
    assert core.scheduler.pause_state == PauseState.UNPAUSED


def test_the_outputs_of_steps_are_those_of_the_next_steps() -> None:
    core = Core([request("loading", REMOTE)])
    core.free_all_blocks()
    assert core.executed == [True, False]
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    assert [core.step_fn(), core.step_fn()] == [({0: "a step"}, False), ({}, False)]


def test_an_engine_core_in_its_own_process_hands_them_on_itself() -> None:
    core = Core([])
    core.output_queue = queue.Queue()  # type: ignore[attr-defined]
    core.free_all_blocks()
    assert core.output_queue.get_nowait() == (0, "a step")  # type: ignore[attr-defined]


def test_a_load_that_does_not_end_is_waited_for_within_a_bound() -> None:
    core = Core([request("loading", REMOTE)], loads_end=False)
    core.free_all_blocks()
    assert core.clock() == pytest.approx(END_S_MAX)
    assert core.freed == [], "a rank may still write to its blocks"


@pytest.mark.swallows("TimeoutError: no answer")
def test_ranks_that_fail_are_logged_and_nothing_is_freed_under_them(caplog: pytest.LogCaptureFixture) -> None:
    core = Core([request("loading", REMOTE)], loads_end=False)

    def fail(function: Any, timeout: float) -> None:
        raise TimeoutError("no answer")

    core.model_executor.collective_rpc = fail
    core.free_all_blocks()
    assert "the ranks did not end their loads" in caplog.text
    assert core.freed == []
