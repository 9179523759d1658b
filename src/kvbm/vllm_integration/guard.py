"""A defect of ours must never end the engine: the border between vLLM's scheduler and our half of the connector.

An exception that gets this far switches KVBM off for this engine, once, with a traceback in the log. What had been
promised to the scheduler by then is handed to the ranks as loads that fail there, so that no request waits for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvbm.protocol import LoadPlan, StepPlan, StepReport
from kvbm.vllm_integration.scheduler_side import SchedulerSide
from kvbm.vllm_integration.stats import KvbmStats

log = logging.getLogger("kvbm.vllm")

_NO_EPOCH = -1
ResultT = TypeVar("ResultT")


class GuardedScheduler:
    """`SchedulerSide`, each call of it guarded. Owned by the engine core's thread."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._off = False
        # Device blocks of loads that the scheduler counts on and that no plan has carried yet.
        self._owed: dict[str, tuple[int, ...]] = {}
        # Of those, the ones that the scheduler does not wait for: the step itself reads their blocks.
        self._by_layer: set[str] = set()
        self._computed_tokens: dict[str, int] = {}

    def bind_block_pool(self, pool: Any) -> None:
        """vLLM's block pool, for a look at what is on the device."""
        self._call(None, self._side.bind_block_pool, pool)

    def added(self, request: Any) -> None:
        """A request arrived."""
        self._call(None, self._side.added, request)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """What can be loaded; nothing when we are off."""
        nothing: tuple[int | None, bool] = (0, False)
        self._computed_tokens[request.request_id] = computed_tokens
        tokens, waits = self._call(nothing, self._side.matched, request, computed_tokens)
        if tokens and not waits:
            self._by_layer.add(request.request_id)
        else:
            self._by_layer.discard(request.request_id)
        return tokens, waits

    def hit_sources(self, request: Any, tokens: int) -> dict[Any, int]:
        """The split of a hit over the tiers."""
        return self._call({}, self._side.hit_sources, request, tokens)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The scheduler made room for a promise: from here on the request waits for its load."""
        computed = self._computed_tokens.pop(request.request_id, 0)
        if tokens > 0:
            first = computed // self._side.block_tokens
            end = first - (-tokens // self._side.block_tokens)
            self._owed[request.request_id] = tuple(blocks.get_block_ids()[0][first:end])
        self._call(None, self._side.allocated, request, blocks, tokens)

    def step(self, output: Any) -> StepPlan:
        """The step's plan; what we owe and could not plan fails at the ranks."""
        plan = self._call(None, self._side.step, output)
        for load in plan.loads if plan is not None else ():
            self._owed.pop(load.request, None)
        if self._off and self._owed:
            failing = tuple(
                _failing(request, blocks, request in self._by_layer) for request, blocks in self._owed.items()
            )
            self._owed.clear()
            return StepPlan(loads=failing)
        return plan if plan is not None else StepPlan()

    def updated(self, connector_output: Any, report: StepReport | None) -> None:
        """What the ranks reported."""
        self._call(None, self._side.updated, connector_output, report)

    def finished(self, request: Any) -> None:
        """The request ended or was aborted."""
        self._computed_tokens.pop(request.request_id, None)
        self._by_layer.discard(request.request_id)
        self._call(None, self._side.finished, request)

    def settling(self) -> bool:
        """Whether the engine should step on although it has no request."""
        return self._call(False, lambda: self._side.settling)

    def reset(self) -> bool:
        """Forget everything; True when we are off, because then nothing is kept."""
        return self._call(True, self._side.reset)

    def weights_changed(self) -> None:
        """The ranks compute with other weights."""
        self._call(None, self._side.weights_changed)

    def weights_named(self, version: str) -> None:
        """The trainer says which weights these are."""
        self._call(None, self._side.weights_named, version)

    def take_stats(self) -> KvbmStats | None:
        """What was counted since the last call."""
        return self._call(None, self._side.take_stats)

    def close(self) -> None:
        self._call(None, self._side.close)

    def _call(self, otherwise: ResultT, method: Callable[..., ResultT], *arguments: Any) -> ResultT:
        if self._off:
            return otherwise
        try:
            return method(*arguments)
        except Exception:
            self._off = True
            log.exception(
                "KVBM is off for this engine from now on, which serves without it: a defect of ours"
            )
            return otherwise


def _failing(request: str, device_blocks: tuple[int, ...], layerwise: bool) -> LoadPlan:
    """A load that no rank can carry out: all its blocks are reported as failed, and computed."""
    nowhere = (0,) * len(device_blocks)
    return LoadPlan(
        request=request,
        lookup=_NO_EPOCH,
        epoch=_NO_EPOCH,
        slots=nowhere,
        generations=nowhere,
        device_blocks=device_blocks,
        offset=0,
        ready=0,
        layerwise=layerwise,
    )
