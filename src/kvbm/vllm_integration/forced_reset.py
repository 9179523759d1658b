"""vLLM's reset of its cache although requests run (`reset_running_requests=True`).

vLLM preempts the requests that run, and raises RuntimeError where blocks stay in use all the same. That is so with any
connector: a request that waits for its load keeps its blocks, one that has loaded and not begun does, and so do steps
in flight. So loads and steps end before the reset, and requests that have loaded give their blocks back: vLLM schedules
them anew. The names are those of vLLM 0.28 to 0.32.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from kvbm.clock import Clock
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.vllm")

END_S_MAX = 30.0
"""Loads and steps that have not ended by then stay; vLLM raises as it does without us."""


def free_all_blocks(
    core: Any,
    loading: Callable[[], Collection[str]],
    end_loads: Callable[[Any], None],
    clock: Clock = time.monotonic,
) -> None:
    """Of this engine core, have only requests that run hold blocks. `loading()` names the requests whose loads run, of
    any engine core, and `end_loads`, run in each rank, ends them with the blocks that are ready."""
    scheduler, until_s = core.scheduler, clock() + END_S_MAX

    def loads_run() -> bool:
        return any(request in scheduler.requests for request in loading())

    if loads_run():
        try:
            core.model_executor.collective_rpc(end_loads, timeout=END_S_MAX)
        except Exception as error:
            record_swallowed(error)
            log.warning("the ranks did not end their loads for a reset of the prefix cache: %s", error)
    if core.batch_queue or loads_run():
        outputs = []
        with _nothing_scheduled(scheduler):
            while (core.batch_queue or loads_run()) and clock() < until_s:
                outputs.append(_step(core))
        _deliver(core, list(filter(None, outputs)))
    for request in scheduler.requests.values():
        _give_blocks_back(scheduler, request)


def _step(core: Any) -> Any:
    outputs, model_executed = core.step_fn()
    core.post_step(model_executed)
    return outputs


@contextmanager
def _nothing_scheduled(scheduler: Any) -> Iterator[None]:
    """Steps compute nothing new."""
    from vllm.v1.core.sched.interface import PauseState

    before = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        yield
    finally:
        scheduler.set_pause_state(before)


def _deliver(core: Any, held: list[Any]) -> None:
    """Hand on the outputs of steps: to the queue of an engine core in its own process, or as the next steps do."""
    queue = getattr(core, "output_queue", None)
    if queue is not None:
        for outputs in held:
            for each in outputs.items():
                queue.put_nowait(each)
    elif held:
        step = core.step_fn

        def next_outputs() -> tuple[Any, bool]:
            outputs = held.pop(0)
            if not held:
                core.step_fn = step
            return outputs, False

        core.step_fn = next_outputs


def _give_blocks_back(scheduler: Any, request: Any) -> None:
    """Make a request that has loaded, and not begun, one that has yet to be scheduled."""
    from vllm.v1.request import RequestStatus

    name, status = request.request_id, request.status
    if status is RequestStatus.WAITING_FOR_REMOTE_KVS and name in scheduler.finished_recving_kv_req_ids:
        scheduler.finished_recving_kv_req_ids.discard(name)
        scheduler.failed_recving_kv_req_ids.discard(name)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
    elif status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or not request.num_computed_tokens:
        return
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
