"""vLLM's own KV offloading, made to run on the CPU: the peer that our numbers are compared with.

vLLM's OffloadingConnector refuses to run on a CPU "device" only because its copies are CUDA copies. The specs here
replace nothing but the copy: host pool, index, eviction, the file tier and all scheduling are vLLM's own code. The
copy is one strided `copy_` per block, the fastest way torch has on a CPU, so the peer is not held back by us.

Used through `kv_connector_extra_config`, see `host_config` and `file_config`; vLLM imports this module by name in
its engine and worker processes, so the directory above `benchmarks` must be on their path.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

MODULE = "benchmarks.peers.vllm_native"
WAIT_S_MAX = 60.0
IDLE_WAIT_S = 0.002


def host_config(host_bytes: int) -> dict[str, Any]:
    """The transfer config of vLLM with a host tier of so many bytes."""
    return _config("CpuHostSpec", {"cpu_bytes_to_use": host_bytes})


def file_config(host_bytes: int, root_dir: str) -> dict[str, Any]:
    """The transfer config of vLLM with a host tier and its file tier below it, in `root_dir`."""
    tiers = [{"type": "fs", "root_dir": root_dir}]
    return _config("CpuTieringSpec", {"cpu_bytes_to_use": host_bytes, "secondary_tiers": tiers})


def _config(spec: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": spec, "spec_module_path": MODULE, **extra},
    }


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM has no types: its classes are Any
    """Copies blocks between the engine's KV and the host pool on one thread of its own, in order of submission.

    Called by the engine's worker thread; nothing here blocks but `wait` and `shutdown`.
    """

    def __init__(
        self, device: torch.Tensor, host: torch.Tensor, region: SharedOffloadRegion | None = None
    ) -> None:
        """`device` and `host`: blocks and chunks by layers by bytes. The worker owns the region, if there is one."""
        self._device = device
        self._host: torch.Tensor | None = host
        self._region = region
        self._jobs: queue.Queue[tuple[int, bool, list[int], list[int]] | None] = queue.Queue()
        self._done: list[TransferResult] = []
        self._pending: set[int] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="peer-copy", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Device to host."""
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Host to device."""
        return self._submit(job_id, False, dst_spec, src_spec)

    def _submit(self, job_id: int, store: bool, device: LoadStoreSpec, host: LoadStoreSpec) -> bool:
        assert isinstance(device, BlockIDsLoadStoreSpec) and isinstance(host, BlockIDsLoadStoreSpec)
        device_ids, host_ids = device.block_ids.tolist(), host.block_ids.tolist()
        # Chunks of more than one block would need sub-block arithmetic; the benchmarks use one block per chunk.
        assert len(device_ids) == len(host_ids)
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put((job_id, store, device_ids, host_ids))
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, store, device_ids, host_ids = job
            started = time.perf_counter()
            try:
                moved = self._copy(store, device_ids, host_ids)
                result = TransferResult(job_id, True, moved, time.perf_counter() - started)
            except (RuntimeError, IndexError):
                result = TransferResult(job_id, False)
            with self._changed:
                self._done.append(result)
                self._pending.discard(job_id)
                self._changed.notify_all()

    def _copy(self, store: bool, device_ids: list[int], host_ids: list[int]) -> int:
        device, host = self._device, self._host
        assert host is not None
        for device_id, host_id in zip(device_ids, host_ids, strict=True):
            if store:
                host[host_id].copy_(device[device_id])
            else:
                device[device_id].copy_(host[host_id])
        return len(device_ids) * int(device[0].numel())

    def get_finished(self) -> list[TransferResult]:
        """What ended since the last call. With nothing but a copy pending it waits a moment: no busy loop."""
        with self._changed:
            if self._pending and not self._done:
                self._changed.wait(IDLE_WAIT_S)
            done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended, at most a minute."""
        with self._changed:
            self._changed.wait_for(lambda: not job_ids & self._pending, WAIT_S_MAX)

    def shutdown(self) -> None:
        """End the thread and give the region back."""
        self._jobs.put(None)
        self._thread.join(WAIT_S_MAX)
        self._host = None
        if self._region is not None:
            self._region.cleanup()


def _all_layers(kv_caches: CanonicalKVCaches) -> torch.Tensor:
    """The engine's KV as one view: blocks by layers by bytes. All layers lie in one allocation, equally spaced."""
    layers = [tensor.tensor for tensor in kv_caches.tensors]
    first, page = layers[0], kv_caches.tensors[0].page_size_bytes
    spacing = layers[1].data_ptr() - first.data_ptr() if len(layers) > 1 else 0
    for index, layer in enumerate(layers):
        assert layer.dtype == torch.int8 and layer.shape == first.shape and layer.stride() == first.stride()
        assert layer.data_ptr() == first.data_ptr() + index * spacing
        assert layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    blocks = first.shape[0]
    return first.as_strided(
        (blocks, len(layers), page), (first.stride(0), spacing, 1), first.storage_offset()
    )


class CpuHostSpec(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM has no types: its classes are Any
    """vLLM's host tier. The pool is private memory of the worker process."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker, without asking for a GPU."""
        assert self.blocks_per_chunk == 1
        device = _all_layers(kv_caches)
        # Zeros are written, not only reserved: first touch is not part of what is compared.
        pool = torch.empty((self.num_chunks, *device.shape[1:]), dtype=torch.int8).fill_(0)
        return CpuCopyWorker(device, pool)


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM has no types: its classes are Any
    """vLLM's host tier with secondary tiers. The pool is shared with the scheduler process, whose threads do I/O."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker, without asking for a GPU."""
        assert self.blocks_per_chunk == 1
        device = _all_layers(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        pool = region.create_next_worker_view(device[0].numel())
        return CpuCopyWorker(device, pool.view(self.num_chunks, *device.shape[1:]), region)
