"""`DynamoConnector`: vLLM's contract (0.28 to 0.32, and 0.33 untested) on one side, `Leader` or `Worker` on the other.

vLLM builds the class twice, once in the scheduler's process and once in every rank; each half delegates to its side.
A configuration that cannot be served gets one line, and the engine runs as if there were no connector.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from kvbm.client.kept_process import KeptProcess
from kvbm.observe.log import configure
from kvbm.settings import (
    LoadedSettings,
    available_memory_bytes,
    load_settings,
    process_environment,
    shared_manager_notices,
)
from kvbm.step_plan import StepPlan, StepReport
from kvbm.vllm_integration import stats, weight_changes
from kvbm.vllm_integration.consolidator_config import kept_consolidator
from kvbm.vllm_integration.guard import GuardedScheduler
from kvbm.vllm_integration.runner import model_runner
from kvbm.vllm_integration.scheduler_side import SchedulerSide
from kvbm.vllm_integration.support import layout_notice, unsupported_reason
from kvbm.vllm_integration.under_ray import lost_variables
from kvbm.vllm_integration.worker_side import WorkerSide

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError:  # vLLM < 0.29 knows no block-outermost layouts
    KVCacheLayout = None

log = logging.getLogger("kvbm.vllm")


@dataclass
class DynamoConnectorMetadata(KVConnectorMetadata):
    """One step's plan, scheduler → workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class DynamoConnectorReport(KVConnectorWorkerMetadata):
    """The ranks' reports, workers → scheduler; those of several ranks are merged into one."""

    report: StepReport = field(default_factory=StepReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, DynamoConnectorReport)
        return DynamoConnectorReport(self.report.merge(other.report))


class DynamoConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. `SupportsHMA` keeps vLLM from changing how hybrid models are laid out on our account."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: GuardedScheduler | None = None
        self._worker: WorkerSide | None = None
        self._consolidator: KeptProcess | None = None
        environment = process_environment()
        loaded = _load(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        configure(loaded.settings.log_level)
        is_scheduler = role == KVConnectorRole.SCHEDULER
        if is_scheduler:
            shared = shared_manager_notices(loaded.settings, loaded.origins)
            notices = shared if loaded.settings.manager else loaded.notices
            for line in (*loaded.warnings, *notices):
                log.warning("%s", line)
            if notice := layout_notice(loaded.settings.kv_layout, KVCacheLayout is not None):
                log.warning("%s", notice)
            if notice := lost_variables(vllm_config, environment):
                log.warning("%s", notice)
            # Also where the engine runs without us: a router was told to listen there.
            self._consolidator = kept_consolidator(vllm_config, loaded.settings)
        if reason := unsupported_reason(vllm_config, kv_cache_config):
            if is_scheduler:
                log.warning("KVBM is off for this engine: %s", reason)
            return
        if is_scheduler:
            log.info("vLLM runs Model Runner %s", model_runner(vllm_config))
            side = SchedulerSide(vllm_config, kv_cache_config, loaded.settings, environment)
            self._scheduler = GuardedScheduler(side)
            from vllm.v1.engine.core import EngineCore

            weight_changes.listen(self._scheduler, EngineCore)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, loaded.settings, environment)

    @property
    def requires_kv_delivery(self) -> bool:
        """No receiver waits for a cache's bytes: requests may finish before they are stored."""
        return False

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        if self._consolidator is not None:
            self._consolidator.end()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Called first in every step, the last moment at which the blocks of earlier steps can be read.
        if self._worker is not None and isinstance(kv_connector_metadata, DynamoConnectorMetadata):
            self._worker.store(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        # Only layer-wise loads are waited for here: a request with any other load starts when all its blocks are there.
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the forward pass that filled them."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.finished(self._plan()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.report() if self._worker is not None else None
        return DynamoConnectorReport(report) if report is not None else None

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        return metadata.plan if isinstance(metadata, DynamoConnectorMetadata) else StepPlan()

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        if self._scheduler is None:
            return {}
        return self._scheduler.hit_sources(request, num_external_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return DynamoConnectorMetadata()
        return DynamoConnectorMetadata(self._scheduler.step(scheduler_output))

    def has_pending_push_work(self) -> bool:
        """The last blocks of a request are stored in steps after its end, and vLLM steps on for them: a second at most
        for those that are not pinned, 2 s where the manager does not answer, 30 s where copies do not end
        (`Stores.pending`). A pause is complete when no load writes to the device."""
        return self._scheduler.work_pending() if self._scheduler is not None else False

    def has_pending_block_frees(self) -> bool:
        """Blocks of requests that ended are pinned until they are copied, for milliseconds: vLLM (0.30) preempts no
        request for want of them meanwhile."""
        return self._scheduler.unpins_soon() if self._scheduler is not None else False

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            meta = getattr(connector_output, "kv_connector_worker_meta", None)
            report = meta.report if isinstance(meta, DynamoConnectorReport) else None
            self._scheduler.updated(connector_output, report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request) if self._scheduler is not None else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids) if self._scheduler is not None else None

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else None

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def get_kv_connector_stats(self) -> stats.KvbmStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Replaying a whole graph calls nothing for its layers: piecewise while loads are layer-wise."""
        return _load(extra_config).settings.onboard_mode == "layerwise"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A preference: vLLM drops it with a warning where the attention backend cannot read it.

        All layers of a block lie side by side in both layouts. FlashInfer takes only the one with heads outside of
        tokens on devices of capability 10 (`vllm.v1.attention.backends.flashinfer`, 0.32).
        """
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        if KVCacheLayout is None or _load(extra).settings.kv_layout != "block":
            return None
        capability = current_platform.get_device_capability()
        heads_outside = capability is not None and capability.major == 10
        return str((KVCacheLayout.BLHNC if heads_outside else KVCacheLayout.BLNHC).name)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> stats.KvbmStats | None:
        return stats.build(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> stats.KvbmPromMetrics:
        return stats.KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _load(extra_config: Mapping[str, Any]) -> LoadedSettings:
    """The settings of an engine: its environment, and `kvbm` in the connector's extra configuration."""
    return load_settings(
        process_environment(),
        extra_config=extra_config.get("kvbm"),
        memory_bytes=available_memory_bytes(),
    )
