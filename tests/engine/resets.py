"""Resets of vLLM's prefix cache while requests run and load, inside the engine's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import weight_swaps
from engine.engine_child import Answers, Child, Engine
from engine.workload import Request

STEPS_MAX = 12
"""A reset comes after so many steps, or before, where a load runs."""


@dataclass
class Resets:
    """The answers of a run with resets. `while_loading` of them came while a load ran, `refused` were refused."""

    answers: Answers = field(default_factory=Answers)
    done: int = 0
    while_loading: int = 0
    refused: int = 0


def run_with_resets(child: Child, requests: Sequence[Request], resets: int, number: int = 0) -> Resets:
    """Answer the requests, with so many pauses in which the busy engine's cache is reset: the device's alone, or ours
    too, or it is tried without preempting what runs. Loads are held until a reset ends them. In the first pause, before
    any token was answered, the weights become those of this `number`, if it is one."""
    run, steps = Resets(), 0

    def between(engine: Engine, finished: int) -> None:
        nonlocal steps
        steps += 1
        core, loading = _core(engine), loads_run(engine)
        changing = number and not run.done
        due = loading or steps >= STEPS_MAX or changing
        if run.done >= resets or not core.scheduler.requests or not due:
            return
        steps = 0
        run.done += 1
        run.while_loading += loading
        if changing:
            assert not any(each.num_output_tokens for each in core.scheduler.requests.values())
            core.pause_scheduler("keep", False)
            weight_swaps.swap(child, number)
            assert core.reset_prefix_cache(True, True)
        elif run.done % 2:  # what was stored since the reset before is loaded now
            core.pause_scheduler("keep", False)
            assert core.reset_prefix_cache(True)
        elif run.done % 4:
            core.pause_scheduler("keep", True)
        else:
            core.pause_scheduler("keep", False)
            run.refused += not core.reset_prefix_cache(False, True)
        core.resume_scheduler()
        if run.done < resets:
            begin_no_load(engine)
        else:
            begin_loads(engine)

    begin_no_load(_engine(child))
    run.answers = _engine(child).run(requests, between=between)
    return run


def ask_while_one_runs(
    child: Child, long: Request, number: int, batches: Sequence[Sequence[Request]]
) -> list[Answers]:
    """Answer the first batch; then, while `long` runs, change the weights, have a reset refused, answer the others."""
    engine = _engine(child)
    found = [engine.run(batches[0])]
    core = _core(engine)
    add(engine, long)
    while not any(each.num_output_tokens for each in core.scheduler.requests.values()):
        engine.core.step()
    weight_swaps.swap(child, number)
    assert not core.reset_prefix_cache(False, True), "a request runs"
    found += [engine.run(batch) for batch in batches[1:]]
    assert core.scheduler.requests, "the long request ended too soon"
    engine.core.abort_request([long.name])
    engine.wait_for_stores()
    return found


def add(engine: Engine, request: Request) -> None:
    """Add a request that no run waits for."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=request.output_count, ignore_eos=True, detokenize=False
    )
    engine.core.add_request(request.name, {"prompt_token_ids": list(request.tokens)}, params)


def _engine(child: Child) -> Engine:
    assert child.engine is not None, "no engine was started"
    return child.engine


def _core(engine: Engine) -> Any:
    """vLLM's engine core."""
    return engine.core.engine_core.engine_core


def loads_run(engine: Engine) -> bool:
    """Whether the leader has loads that have not ended; False in an engine without us."""
    return engine.leader_half is not None and bool(engine.leader_half._scheduler.side.leader.lookups.loading)


def begin_no_load(engine: Engine) -> None:
    """No load begins before the rank is told to end its loads, or `begin_loads`; stores go on."""
    loading = engine.worker_half._worker.mover._loading
    begin_loads(engine)
    end_all = loading.end_all

    def begin_and_end() -> None:
        begin_loads(engine)
        end_all()

    loading._next, loading.end_all = lambda: None, begin_and_end


def begin_loads(engine: Engine) -> None:
    """End what `begin_no_load` began."""
    loading = engine.worker_half._worker.mover._loading
    loading.__dict__.pop("_next", None)
    loading.__dict__.pop("end_all", None)
