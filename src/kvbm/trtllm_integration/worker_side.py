"""The rank's half of the connector: turns TensorRT-LLM's tensors and step calls into calls of `Worker`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch

from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.errors import KvbmError
from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import Settings
from kvbm.step_plan import LoadPlan, StepPlan
from kvbm.transfer import DeviceCache, numa_node
from kvbm.trtllm_integration.engine_facts import KIND, EngineFacts
from kvbm.trtllm_integration.errors import PromiseBroken
from kvbm.trtllm_integration.namespace import engine_namespace
from kvbm.worker import Mapping as WorkerMapping
from kvbm.worker import Mover, Worker

log = logging.getLogger("kvbm.trtllm")

SHARED_TIMEOUT_S = 5.0
LOAD_S_MAX = 60.0
HOLD_S_MAX = 30.0
"""A copy out of a request's blocks that takes longer is given up, and the engine gets the blocks back."""


class WorkerSide:
    """Calls `worker`, once its tensors exist and it can serve, for TensorRT-LLM. Owned by the rank's engine thread."""

    def __init__(
        self,
        llm_args: Any,
        facts: EngineFacts,
        settings: Settings,
        environment: Mapping[str, str],
        release: str,
    ) -> None:
        self._llm_args = llm_args
        self._facts = facts
        self._settings = settings
        self._release = release
        self._address = ManagerAddress.of(settings, facts.engine)
        self._finder = ManagerFinder(self._address, settings, environment, time.monotonic)
        self.worker: Worker | None = None
        self._plan = StepPlan()
        self._stored = True
        # Of each request that ended while copies ran: those copies, and when they are given up.
        self._quiet = False
        self._saving: dict[int, tuple[frozenset[int], float]] = {}
        # A private manager starts now, so that it is there when the KV tensors are.
        channel = self._finder.attempt()
        if channel is not None:
            channel.close()

    # ---- the cache

    def register_tensor(self, tensor: torch.Tensor) -> None:
        """All layers' KV in one tensor `[blocks, layers, K and V, …]`; one instead of K and V where all ranks of a
        stage hold the same (MLA)."""
        blocks = int(tensor.shape[0])
        description = f"{tensor.dtype}[{','.join(str(size) for size in tensor.shape[1:])}]"
        replicated = tensor.dim() > 2 and int(tensor.shape[2]) == 1
        self._join({"kv": tensor.view(blocks, -1)}, blocks, description, replicated)

    def register_layout(self, layout: Any) -> None:
        """The cache as regions of page slots. Off, with one line, where a block is not one page of one group."""
        if len(layout.groups) != 1:
            kinds = ", ".join(f"window {group.window_size}" for group in layout.groups)
            log.warning(
                "KVBM is off for this engine: %d layer groups (%s); accepted is one",
                len(layout.groups),
                kinds,
            )
            return
        (group,) = layout.groups
        regions = (*group.regions, *group.replicated_regions)
        slots = {int(region.num_slots) for region in regions}
        if group.window_size is not None or len(slots) != 1:
            log.warning(
                "KVBM is off for this engine: %s; accepted is full attention and one number of slots",
                f"the layers attend to a window of {group.window_size} tokens"
                if group.window_size is not None
                else f"regions of {sorted(slots)} slots",
            )
            return
        if int(layout.tokens_per_block) != self._facts.block_tokens:
            log.warning(
                "KVBM is off for this engine: pages of %d tokens in blocks of %d; accepted is the same size",
                layout.tokens_per_block,
                self._facts.block_tokens,
            )
            return
        parts = [f"{region.size}:{','.join(map(_buffer, region.buffers))}" for region in regions]
        roles = {str(buffer.role) for region in group.regions for buffer in region.buffers}
        tensors = {f"region {number}": region.as_tensor() for number, region in enumerate(regions)}
        self._join(tensors, slots.pop(), f"layout {';'.join(parts)}", replicated=_latent(roles))

    def _join(
        self, tensors: dict[str, torch.Tensor], blocks: int, description: str, replicated: bool
    ) -> None:
        """Join the manager. Whatever fails, the engine starts; what is refused is one line."""
        facts, settings = self._facts, self._settings
        try:
            cache = DeviceCache.from_tensors(tensors, blocks)
            shape = f"{description} {cache.description}"
            namespace = engine_namespace(
                self._llm_args, facts, shape, replicated, self._release, settings.runtime_dir
            )
        except (KvbmError, OSError) as error:
            log.warning("KVBM is off for this engine: %s", " ".join(str(error).split()))
            return
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="worker",
            engine=facts.engine,
            rank=facts.rank,
            rank_count=facts.rank_count,
            shard=facts.stage if replicated else facts.rank,
            request_blocks=facts.request_blocks,
            numa_node=numa_node(cache.device) if settings.numa else -1,
            kind=KIND,
            namespace=namespace,
            layout=BlockLayout(
                block_tokens=facts.block_tokens,
                shard_bytes=cache.shard_bytes,
                shard_count=facts.stages if replicated else facts.rank_count,
            ),
        )
        map_arena = partial(
            WorkerMapping,
            cache=cache,
            cuda_method=settings.cuda_copy,
            numa_node=hello.numa_node,
            huge_pages=settings.huge_pages,
            runtime_dir=settings.runtime_dir,
        )
        mover = Mover(self._finder, hello, map_arena, reports=True)
        worker = Worker(mover, cache, stores_here=not replicated or facts.tensor_rank == 0)
        timeout_s = float(settings.init_timeout_s) if self._address.private else SHARED_TIMEOUT_S
        try:
            worker.attach(timeout_s)
        except (KvbmError, RuntimeError, OSError) as error:
            log.warning("serving without a KV cache for now: %s", str(error).partition("\n")[0])
        worker.start()
        self.worker = worker

    # ---- a step

    def bind(self, plan: StepPlan) -> None:
        """The step's plan has come."""
        self._plan = plan
        self._stored = not plan.stores

    @property
    def loads(self) -> tuple[LoadPlan, ...]:
        """What the step's forward pass counts on."""
        return self._plan.loads

    def load(self, stream: Any) -> None:
        """Before the forward pass: on return the plan's loads lie on the device. Raises PromiseBroken."""
        worker, plan = self.worker, self._plan
        if worker is None:
            if plan.loads:
                raise PromiseBroken(broken(plan.loads, "this rank has no KV cache"))
            return
        released = set(plan.released)
        # What lies in blocks that the engine may hand out from now on is copied before anything else.
        first = tuple(store for store in plan.stores if store.store in released)
        with _on(stream):
            worker.store(msgspec.structs.replace(plan, stores=first, loads=()))
            if not plan.loads:
                return
            done = worker.load_now(msgspec.structs.replace(plan, stores=()), LOAD_S_MAX)
        failed = {load.request for load in done if load.failed}
        if failed:
            loads = [load for load in plan.loads if load.request in failed]
            raise PromiseBroken(broken(loads, f"rank {self._facts.rank} could not copy it"))

    def store(self, stream: Any = None) -> None:
        """The forward pass has been given to the device: begin the plan's stores behind it. Once a step."""
        if self._stored or self.worker is None:
            return
        self._stored = True
        released = set(self._plan.released)
        stores = tuple(store for store in self._plan.stores if store.store not in released)
        with _on(stream):
            self.worker.store(StepPlan(stores=stores, weights=self._plan.weights))

    def finished(self, ended: Iterable[int]) -> list[int]:
        """Requests that ended, of those told now or before, whose blocks no copy reads any more."""
        worker = self.worker
        if worker is None:
            return list(ended)
        worker.send_report()
        now_s, running = time.monotonic(), worker.open_stores
        for request in ended:
            self._saving[request] = running, now_s + HOLD_S_MAX
        done = []
        for request, (stores, until_s) in list(self._saving.items()):
            left = stores & running
            if left and now_s > until_s:
                log.warning("copies of request %s's blocks take too long: they are given up", request)
                worker.abandon(left)
                left = frozenset()
            if not left:
                done.append(request)
                del self._saving[request]
        return done

    def take_saving(self, ended: Iterable[int]) -> list[int]:
        """All requests whose blocks the engine keeps for us: none is read any more once KVBM is off here."""
        if self.worker is not None and not self._quiet:
            self._quiet = True
            self.worker.quiesce(HOLD_S_MAX)
        done = [*self._saving, *ended]
        self._saving.clear()
        return done

    def close(self) -> None:
        """End the copying thread and the session."""
        if self.worker is not None:
            self.worker.close()


def _buffer(buffer: Any) -> str:
    return f"{buffer.layer_id}.{buffer.role}.{getattr(buffer, 'expansion', 1)}"


def _latent(roles: set[str]) -> bool:
    """Whether pages hold keys alone, which every rank of a stage computes alike."""
    return roles == {"key"}


def broken(loads: Iterable[LoadPlan], why: str) -> str:
    """The one line of a promise that is not kept."""
    requests = ", ".join(load.request for load in loads)
    return f"KV that was promised for request {requests} is not on the device: {why}"


def _on(stream: Any) -> Any:
    """Work that is begun inside comes behind what the engine gave this stream of the device."""
    if stream is None or not isinstance(stream, getattr(torch.cuda, "Stream", ())):
        return contextlib.nullcontext()
    return torch.cuda.stream(stream)
