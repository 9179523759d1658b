"""TensorRT-LLM's connector interface on one side, `Leader` or `Worker` on the other. See docs/guides/trtllm.md.

The engine makes a `DynamoKVBMConnectorWorker` in every rank and a `DynamoKVBMConnectorLeader` in rank 0. What cannot be
served gets one line, and the engine runs as if there were no connector. No defect of ours reaches the engine: each call
is guarded. One error does, `PromiseBroken`: see `DynamoKVBMConnectorWorker.start_load_kv`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvbm.client.kept_process import KeptProcess
from kvbm.guard import Guard
from kvbm.observe.log import configure
from kvbm.settings import (
    LoadedSettings,
    available_memory_bytes,
    load_settings,
    process_environment,
    shared_manager_notices,
)
from kvbm.step_plan import StepPlan
from kvbm.strict import record_swallowed
from kvbm.trtllm_integration.consolidator_config import kept_consolidator
from kvbm.trtllm_integration.engine_facts import facts_of, model_config, notices, unsupported_reason
from kvbm.trtllm_integration.errors import PromiseBroken
from kvbm.trtllm_integration.interface import RELEASE, KvCacheConnectorScheduler, KvCacheConnectorWorker
from kvbm.trtllm_integration.message import StepMessage, decode
from kvbm.trtllm_integration.request_facts import media_tokens
from kvbm.trtllm_integration.scheduler_side import SchedulerSide, failing
from kvbm.trtllm_integration.settling import Settling
from kvbm.trtllm_integration.versions import signature_notice, version_notice
from kvbm.trtllm_integration.worker_side import WorkerSide, broken

log = logging.getLogger("kvbm.trtllm")

ResultT = TypeVar("ResultT")


class DynamoKVBMConnectorLeader(KvCacheConnectorScheduler):
    """The scheduler's half, in rank 0.

    Promises only what lies verified in host memory, leased. What is on disk alone is brought up for the next time.
    """

    def __init__(self, llm_args: Any, consolidator_trtllm_endpoint: str | None = None) -> None:
        """The second argument is the original's, which does not use it either."""
        super().__init__(llm_args)
        self._lock = threading.RLock()
        self._side: SchedulerSide | None = None
        self._guard = Guard(log, self._give_up)
        self._settling: Settling | None = None
        self._consolidator: KeptProcess | None = None
        self._guard.call(None, self._start, llm_args)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that are loaded before the forward pass that comes next: never asynchronously."""
        side = self._side
        tokens = self._call(0, lambda: side.matched(request, num_computed_tokens) if side is not None else 0)
        return tokens, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        side = self._side
        self._call(None, lambda: side.allocated(request, block_ids) if side is not None else None)

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """With several groups no rank has joined, and there is nothing to do."""
        if len(block_ids_by_layer_group) == 1:
            self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def build_connector_meta(self, scheduler_output: Any) -> bytes:
        side = self._side
        if side is None:
            return StepMessage().encode()
        plan = self._call(None, side.step, scheduler_output)
        if plan is None:
            # Off after a defect. The engine counts on what it was promised before: no rank can bring it.
            plan = StepPlan(loads=tuple(failing(name) for name in self._take_owed(side)))
        if self._settling is not None:
            self._settling.wake()
        return StepMessage(plan=plan).encode()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """True while a rank may be reading the request's blocks; its `get_finished` ends that."""
        side = self._side
        return self._call(False, lambda: side.finished(request) if side is not None else False)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """The same for any number of groups."""
        return self.request_finished(
            request, cache_block_ids_by_layer_group[0] if cache_block_ids_by_layer_group else []
        )

    def request_reset(self, request: Any) -> None:
        """The request's blocks are gone and it will run again: what was being copied out of them is not kept."""
        side = self._side
        self._call(None, lambda: side.request_reset(request) if side is not None else None)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine computes tokens `[start, end)` itself: give their leases back."""
        side = self._side
        self._call(None, lambda: side.cancel_load(request, start, end) if side is not None else None)

    def wait_for_initialization(self) -> None:
        """Nothing is waited for: the cache is on once all ranks have joined."""

    def _start(self, llm_args: Any) -> None:
        environment = process_environment()
        loaded = _load()
        shared = shared_manager_notices(loaded.settings, loaded.origins)
        for line in (*loaded.warnings, *(shared if loaded.settings.manager else loaded.notices)):
            log.warning("%s", line)
        for line in (
            version_notice(RELEASE),
            signature_notice(
                [
                    (KvCacheConnectorScheduler, DynamoKVBMConnectorLeader),
                    (KvCacheConnectorWorker, DynamoKVBMConnectorWorker),
                ]
            ),
            *notices(llm_args),
        ):
            if line:
                log.warning("%s", line)
        self._consolidator = kept_consolidator(loaded.settings)
        try:
            reason, facts = unsupported_reason(llm_args), facts_of(llm_args, environment, "leader")
        except ValueError as error:
            reason = str(error)
        if reason:
            log.warning("KVBM is off for this engine: %s", reason)
            return
        placeholders = media_tokens(model_config(llm_args))
        self._side = SchedulerSide(facts, loaded.settings, environment, placeholders)
        self._settling = Settling(self._settle)

    def _give_up(self) -> None:
        """After a defect: the manager gets back what it leased."""
        if self._side is not None:
            self._side.close()

    def _settle(self) -> bool:
        side = self._side
        return self._call(False, lambda: side.settle() if side is not None else False)

    def _take_owed(self, side: SchedulerSide) -> list[str]:
        with self._lock:
            return side.take_owed()

    def _call(self, otherwise: ResultT, method: Callable[..., ResultT], *arguments: object) -> ResultT:
        with self._lock:
            return self._guard.call(otherwise, method, *arguments)

    def close(self) -> None:
        """End the session with the manager. TensorRT-LLM has no call for it: a process that ends does the same."""
        for part in (self._settling, self._side):
            if part is not None:
                part.close()
        if self._consolidator is not None:
            self._consolidator.end()


class DynamoKVBMConnectorWorker(KvCacheConnectorWorker):
    """The rank's half, in every rank."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._side: WorkerSide | None = None
        self._guard = Guard(log, passes=(PromiseBroken,))
        self._guard.call(None, self._start, llm_args)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The cache of the first manager: one tensor `[blocks, layers, K and V, …]`."""
        side = self._side
        if side is not None:
            self._guard.call(None, side.register_tensor, kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The cache of the second manager. Several layer groups are not served: one line says so."""
        side = self._side
        if side is not None:
            self._guard.call(None, side.register_layout, layout)

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """Called at the end of each forward pass, also of one that is a CUDA graph: the step's stores begin there."""
        return self._forward_ended

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        plan = decode(metadata).plan  # also after a defect: what the step counts on must be known
        if self._side is not None:
            self._side.bind(plan)
        elif plan.loads:
            raise PromiseBroken(broken(plan.loads, "this rank has no KV cache"))

    def get_connector_meta(self) -> object:
        return super().get_connector_meta()

    def start_load_kv(self, stream: Any) -> None:
        """Before the forward pass: the step's loads are complete on return.

        The engine has no way to be told of a load that failed. So nothing is promised but blocks that lie verified in
        host memory, are leased, and are checked to be the same before and after they are copied. Where a promise cannot
        be kept all the same (the device fails), this raises `PromiseBroken`, one line, which ends the engine: it would
        compute from whatever lies in the blocks, and nobody would notice.
        """
        side = self._side
        if side is None:
            return
        if not side.loads:
            self._guard.call(None, side.load, stream)
            return
        try:  # whatever was switched off before: the engine counts on it
            side.load(stream)
        except PromiseBroken:
            raise
        except Exception as error:
            record_swallowed(error)
            log.exception("a defect in KVBM, while a load was carried out")
            raise PromiseBroken(broken(side.loads, f"{type(error).__name__} in KVBM")) from error

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """All layers have come before the forward pass began."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """All layers are stored when the forward pass has ended: replayed CUDA graphs call nothing for a layer."""

    def wait_for_save(self, stream: Any) -> None:
        """The forward pass has ended: stores begin, if they have not yet. They are not waited for on a GPU."""
        side = self._side
        if side is not None:
            self._guard.call(None, side.store, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Requests whose blocks no copy reads any more. None is ever loaded asynchronously."""
        side, loading = self._side, list(started_loading_req_ids)
        if side is None:
            return list(finished_gen_req_ids), loading
        saved = self._guard.call(None, side.finished, finished_gen_req_ids)
        if saved is None:  # off: nothing is copied any more
            saved = side.take_saving(finished_gen_req_ids)
        return saved, loading

    def _start(self, llm_args: Any) -> None:
        environment = process_environment()
        loaded = _load()
        try:
            reason, facts = unsupported_reason(llm_args), facts_of(llm_args, environment, "worker")
        except ValueError:
            return  # the leader says why
        if not reason:
            self._side = WorkerSide(llm_args, facts, loaded.settings, environment, RELEASE)

    def _forward_ended(self) -> None:
        side = self._side
        if side is not None:
            self._guard.call(None, side.store)

    def close(self) -> None:
        """End the copying thread and the session. TensorRT-LLM has no call for it."""
        if self._side is not None:
            self._side.close()


def _load() -> LoadedSettings:
    """The settings of an engine: its environment."""
    loaded = load_settings(process_environment(), memory_bytes=available_memory_bytes())
    configure(loaded.settings.log_level)
    return loaded
