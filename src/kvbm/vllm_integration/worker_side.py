"""The rank's half of the connector: turns vLLM's tensors and step calls into calls of `Worker`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, ManagerUntrusted, SettingsError
from kvbm.layout import BlockLayout, Namespace
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import Settings
from kvbm.step_plan import StepPlan, StepReport
from kvbm.transfer import DeviceCache, numa_node
from kvbm.vllm_integration import weight_changes
from kvbm.vllm_integration.hybrid import hybrid_of
from kvbm.vllm_integration.kv_events import events_wanted
from kvbm.vllm_integration.namespace import engine_namespace
from kvbm.vllm_integration.ranks import Node, block_tokens, find_node, largest_shard
from kvbm.vllm_integration.support import kv_replicas
from kvbm.vllm_integration.weight_files import MEMO
from kvbm.worker import Mapping as WorkerMapping
from kvbm.worker import Mover, Worker

log = logging.getLogger("kvbm.vllm")

SHARED_TIMEOUT_S = 5.0
QUIESCE_TIMEOUT_S = 30.0
END_LOADS_S_MAX = 20.0


class WorkerSide:
    """Calls `worker`, once its tensors exist and it can serve, for vLLM. Owned by the rank's engine thread.

    `mover` is the worker's copying thread.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings, environment: Mapping[str, str]
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._address = ManagerAddress.of(settings, vllm_config.kv_transfer_config.engine_id)
        self._finder = ManagerFinder(self._address, settings, environment, time.monotonic)
        self.worker: Worker | None = None
        self.mover: Mover | None = None
        self._node: Node | None = None
        self._stored_plan: StepPlan | None = None
        self._own_plan: StepPlan | None = None
        self._hybrid = hybrid_of(kv_cache_config)
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        # A private manager starts now, so that it is there when the KV tensors are.
        channel = self._finder.attempt()
        if channel is not None:
            channel.close()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device's KV tensors exist: join the manager.

        A tier that cannot be opened stops the engine's start with one line. A shared manager that is absent does not,
        nor does another user's socket in its place.
        """
        opened = self._open(kv_caches)
        if opened is None:
            return
        cache, shard_bytes = opened
        config, settings = self._vllm_config, self._settings
        rank = int(config.parallel_config.rank)
        replicas = kv_replicas(config, self._kv_cache_config)
        memo_path = Path(settings.runtime_dir) / MEMO
        try:
            namespace = engine_namespace(config, self._kv_cache_config, cache.description, memo_path)
            node = find_node(
                config.parallel_config,
                config.kv_transfer_config.engine_id,
                self._address.socket_path,
                replicas,
            )
        except KvbmError as error:
            log.warning("KVBM is off for this engine: %s", error)
            return
        if node.shards_in_words:
            namespace = namespace.part(node.shards_in_words)
        self._node = node if node.part_count > 1 else None
        layout = self._layout(shard_bytes, len(node.shards))
        hello = self._hello(node, namespace, layout, cache)
        map_arena = partial(
            WorkerMapping,
            cache=cache,
            cuda_method=settings.cuda_copy,
            numa_node=hello.numa_node,
            huge_pages=settings.huge_pages,
            runtime_dir=settings.runtime_dir,
        )
        self.mover = Mover(self._finder, hello, map_arena)
        self.worker = Worker(
            self.mover,
            cache,
            stores_here=node.stores(rank, replicas),
            weights_changes=weight_changes.updates_seen,
        )
        from vllm.v1.worker.gpu_worker import Worker as Rank

        weight_changes.count_updates(self, Rank)
        timeout_s = float(settings.init_timeout_s) if self._address.private else SHARED_TIMEOUT_S
        try:
            self.worker.attach(timeout_s)
        except ManagerUntrusted as error:
            self._finder.log_trouble(str(error))
        except (ManagerUnavailable, ManagerRefused) as error:
            # A shared manager may be full for weights that no other engine has; a wrong setting stays wrong.
            waits = isinstance(error, ManagerUnavailable) or namespace.ephemeral
            if self._address.private or not waits:
                raise
            log.warning("%s; serving without a KV cache until it is there", error)
        except SettingsError:
            raise
        except (KvbmError, RuntimeError) as error:
            # The device or its driver refuses. That is no reason not to serve.
            log.warning("KVBM is off for this engine: %s", str(error).partition("\n")[0])
            self.worker.close()
            self.worker = None
            return
        self.worker.start()

    def _hello(self, node: Node, namespace: Namespace, layout: BlockLayout, cache: DeviceCache) -> Hello:
        """What this rank says first."""
        config = self._vllm_config
        rank, replicas = int(config.parallel_config.rank), kv_replicas(config, self._kv_cache_config)
        return Hello(
            version=PROTOCOL_VERSION,
            role="worker",
            engine=node.engine,
            rank=rank,
            rank_count=int(config.parallel_config.world_size),
            shard=node.shard_of(rank, replicas),
            request_blocks=self._largest_request(layout),
            numa_node=numa_node(cache.device) if self._settings.numa else -1,
            namespace=namespace,
            data_parallel_rank=_data_parallel_rank(config),
            events=events_wanted(config),
            ranks=node.ranks if node.part_count > 1 else (),
            part=node.part,
            part_count=node.part_count,
            layout=layout,
        )

    def _open(self, kv_caches: dict[str, torch.Tensor]) -> tuple[DeviceCache, int] | None:
        """The rank's tensors and the bytes of a shard; None, with one line, where some rank has no tensors, or such
        that we cannot tell blocks apart: that is no reason not to serve."""
        cache, trouble = None, ""
        if kv_caches:
            try:
                cache = DeviceCache.from_tensors(kv_caches, int(self._kv_cache_config.num_blocks))
            except KvbmError as error:
                trouble = str(error)  # told below, where the other ranks of a pipeline hear of it too
        try:
            largest = largest_shard(self._vllm_config.parallel_config, cache.shard_bytes if cache else 0)
        except KvbmError as error:
            trouble = trouble or str(error)
        if trouble:
            log.warning("KVBM is off for this engine: %s", trouble)
            return None
        return (cache, largest) if cache is not None else None

    def _layout(self, shard_bytes: int, shard_count: int) -> BlockLayout:
        """The layout of a block on this node; those of all groups have one size."""
        config, hybrid = self._vllm_config, self._hybrid
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        return BlockLayout(
            block_tokens=hybrid.block_tokens if hybrid is not None else block_tokens(config, spec),
            shard_bytes=shard_bytes,
            shard_count=shard_count,
            groups=hybrid.groups if hybrid is not None else (),
        )

    def _largest_request(self, layout: BlockLayout) -> int:
        """How many slots the largest request needs that the engine accepts."""
        tokens = int(self._vllm_config.model_config.max_model_len)
        if self._hybrid is not None:
            return self._hybrid.request_blocks(tokens)
        return -(-tokens // layout.block_tokens)

    def store(self, plan: StepPlan) -> None:
        """Once a step, before anything else of it."""
        if self.worker is not None:
            self._stored_plan = plan
            self._own_plan = plan if self._node is None else plan.on_node(self._node.part)
            self.worker.store(self._own_plan)

    def load(self, plan: StepPlan) -> None:
        if self.worker is None:
            return
        if plan is not self._stored_plan or self._own_plan is None:
            self.store(plan)
        assert self._own_plan is not None
        self.worker.load(self._own_plan)

    def wait_for_layer(self, layer: str) -> None:
        """The forward pass is about to read this layer."""
        if self.worker is not None:
            self.worker.wait_for_layer(layer)

    def finished(self, plan: StepPlan) -> set[str]:
        """Requests whose loads ended since the last call; `take_failed_blocks` has the blocks that failed."""
        if self.worker is None:
            return set()
        loads = self.worker.finished(plan)
        for load in loads:
            if self._hybrid is None:
                self._failed_blocks.update(load.failed)
            elif load.failed:
                # A block's number alone does not tell vLLM which of its groups lacks it.
                self._failed_requests.add(load.request)
        return {load.request for load in loads if not load.layerwise}

    def take_failed_blocks(self) -> set[int]:
        """Device blocks whose loads failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of a hybrid model whose loads failed, of those that `finished` named since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self) -> StepReport | None:
        return self.worker.report() if self.worker is not None else None

    def quiesce(self) -> None:
        """The device's memory is about to be taken away: end all copies from and to it."""
        if self.worker is not None and not self.worker.quiesce(QUIESCE_TIMEOUT_S):
            log.error(
                "copies are still under way after %g s while the engine goes to sleep", QUIESCE_TIMEOUT_S
            )

    def end_loads(self) -> None:
        """End all loads with the blocks that are ready."""
        if self.worker is not None:
            self.worker.quiesce(END_LOADS_S_MAX)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


def _data_parallel_rank(config: Any) -> int:
    """Which of the engines that serve one model this is: vLLM may set `data_parallel_rank` itself back to 0."""
    parallel = config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
