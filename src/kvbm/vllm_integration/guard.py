"""A defect of ours must never end the engine: the border between vLLM's scheduler and our half of the connector.

An exception that gets this far switches KVBM off for this engine, once, with a traceback in the log. Loads that the
scheduler was promised by then are handed to the ranks and fail there, so that no request waits for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvbm.guard import Guard
from kvbm.step_plan import LoadPlan, StepPlan, StepReport
from kvbm.vllm_integration.block_tables import table_of
from kvbm.vllm_integration.scheduler_side import SchedulerSide
from kvbm.vllm_integration.stats import KvbmStats

log = logging.getLogger("kvbm.vllm")

NO_LOAD = -1
"""The lookup and the epoch of a load that was never planned: no rank maps memory of that epoch."""
NULL_BLOCK = 0
"""The block of vLLM that no request computes into."""


class GuardedScheduler:
    """Each call of `side`, guarded. Owned by the engine core's thread."""

    def __init__(self, side: SchedulerSide) -> None:
        self.side = side
        # What is pinned is given up, or the engine would never get those blocks back.
        self._guard = Guard(log, side.give_up_pins)
        # Loads that the scheduler was promised and that no plan has carried yet: block table, first block and end.
        self._owed: dict[str, tuple[Sequence[int], int, int]] = {}
        # Those of them for which the scheduler does not wait, because the step itself reads their blocks.
        self._by_layer: set[str] = set()
        self._computed_tokens: dict[str, int] = {}

    def bind_block_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, which knows the blocks on the device."""
        self._guard.call(None, self.side.bind_block_pool, pool)

    def added(self, request: Any) -> None:
        """A request arrived."""
        self._guard.call(None, self.side.added, request)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded, and whether the request waits; none when KVBM is off."""
        nothing: tuple[int | None, bool] = (0, False)
        tokens, waits = self._guard.call(nothing, self.side.matched, request, computed_tokens)
        if tokens:
            self._computed_tokens[request.request_id] = computed_tokens
            if waits:
                self._by_layer.discard(request.request_id)
            else:
                self._by_layer.add(request.request_id)
        return tokens, waits

    def hit_sources(self, request: Any, tokens: int) -> dict[Any, int]:
        """The split of a hit over the tiers."""
        return self._guard.call({}, self.side.hit_sources, request, tokens)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The scheduler made room for a promised load: from here on the request waits for it."""
        computed = self._computed_tokens.pop(request.request_id, 0)
        if tokens > 0:
            first = computed // self.side.block_tokens
            end = first - (-tokens // self.side.block_tokens)
            self._owed[request.request_id] = table_of(blocks), first, end
        self._guard.call(None, self.side.allocated, request, blocks, tokens)

    def step(self, output: Any) -> StepPlan:
        """The step's plan. With KVBM off, loads that were promised and not planned fail at the ranks."""
        plan = self._guard.call(None, self.side.step, output)
        for load in plan.loads if plan is not None else ():
            self._owed.pop(load.request, None)
        if self._guard.off and self._owed:
            failing = tuple(
                # A group may have fewer blocks than the prompt; a load of none would count as done.
                _failing(request, tuple(table[first:end]) or (NULL_BLOCK,), request in self._by_layer)
                for request, (table, first, end) in self._owed.items()
            )
            self._owed.clear()
            return StepPlan(loads=failing)
        return plan if plan is not None else StepPlan()

    def updated(self, connector_output: Any, report: StepReport | None) -> None:
        """Take in the ranks' reports."""
        self._guard.call(None, self.side.updated, connector_output, report)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]] = ()) -> dict[str, Any] | None:
        """The request ended or was aborted; `block_ids` has the block table of each group. Returns what its client is
        told of its hint."""
        self._computed_tokens.pop(request.request_id, None)
        self._by_layer.discard(request.request_id)
        return self._guard.call(None, self.side.finished, request, block_ids)

    def work_pending(self) -> bool:
        """Whether the engine should step on although it has no request."""
        return self._guard.call(False, lambda: self.side.work_pending)

    def unpins_soon(self) -> bool:
        """Whether the engine gets blocks back in a moment."""
        return self._guard.call(False, lambda: self.side.leader.stores.unpins_soon)

    def reset(self) -> bool:
        """Forget all blocks; True when KVBM is off, because then none is kept."""
        return self._guard.call(True, self.side.reset)

    def give_up_pins(self) -> bool:
        """The engine is about to empty its cache: use none of its blocks. True if some were in use."""
        return self._guard.call(False, self.side.give_up_pins)

    def loading_requests(self) -> list[str]:
        """The requests whose loads run."""
        nothing: list[str] = []
        return self._guard.call(nothing, lambda: self.side.leader.lookups.loading_requests)

    def weights_changed(self) -> None:
        """The ranks compute with other weights."""
        self._guard.call(None, self.side.weights_changed)

    def weights_named(self, version: str) -> None:
        """The trainer names the ranks' weights."""
        self._guard.call(None, self.side.weights_named, version)

    def take_events(self) -> list[Any]:
        """vLLM's events of what came into the tiers and left them."""
        nothing: list[Any] = []
        return self._guard.call(nothing, self.side.take_events)

    def take_stats(self) -> KvbmStats | None:
        """The counts since the last call."""
        return self._guard.call(None, self.side.take_stats)

    def close(self) -> None:
        self._guard.call(None, self.side.close)


def _failing(request: str, device_blocks: tuple[int, ...], layerwise: bool) -> LoadPlan:
    """A load that no rank can carry out: all its blocks are reported as failed, and computed."""
    nowhere = (0,) * len(device_blocks)
    return LoadPlan(
        request=request,
        lookup=NO_LOAD,
        epoch=NO_LOAD,
        slots=nowhere,
        generations=nowhere,
        device_blocks=device_blocks,
        offset=0,
        ready=0,
        layerwise=layerwise,
    )
