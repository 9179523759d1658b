"""vLLM's asynchronous scheduling, CUDA's default, on a CPU: a step is planned before the last one's tokens are known.

A CPU's vLLM turns it off, for want of streams. What those order is in order on a CPU anyway, so stand-ins will do:
what a connector sees of it (plans made ahead of outputs, ends that are noticed a step late) is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from engine.engine_child import Child
from engine.engine_process import EngineProcess

_undo: list[Callable[[], None]] = []


class _Order:
    """A stream, or an event: whatever is asked of it has happened. A class, because vLLM names both in types."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        pass

    def _nothing(self, *arguments: Any, **more: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = _nothing


def _replace(owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    _undo.append(lambda: setattr(owner, name, before))
    setattr(owner, name, value)


def schedule_ahead(child: Child) -> None:
    """Engines that are started in this process from now on schedule ahead."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_turn_on(cls: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    _replace(CpuPlatform, "check_and_update_config", classmethod(check_and_turn_on))
    _replace(torch.cuda, "Event", _Order)
    _replace(torch.cuda, "Stream", _Order)
    _replace(torch.cuda, "stream", lambda stream: nullcontext())
    _replace(torch.cuda, "current_stream", lambda device=None: _Order())


def schedule_as_before(child: Child) -> None:
    """Undo `schedule_ahead`."""
    while _undo:
        _undo.pop()()


@contextmanager
def scheduling_ahead(process: EngineProcess) -> Iterator[None]:
    """Engines of that process schedule ahead; the last one is stopped at the end."""
    try:
        process.call(schedule_ahead, timeout_s=60.0)
        yield
    finally:
        if process.alive:
            try:
                process.stop()
            finally:
                process.call(schedule_as_before, timeout_s=20.0)


def steps_in_flight(child: Child) -> int:
    """How many steps the engine keeps under way."""
    assert child.engine is not None
    return int(child.engine.core.engine_core.engine_core.batch_queue_size)
