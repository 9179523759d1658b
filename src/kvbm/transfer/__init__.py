"""G1⇄G2: where an engine's KV lies (`device_cache`), and copies of it to and from the host arena.

One copier per kind of device: `cpu`, `cuda`. Their contract is in `copier`.
"""

from __future__ import annotations

import torch

from kvbm.errors import KvbmError
from kvbm.numa import node_of_pci_device
from kvbm.transfer.copier import Copier, Copying, DeviceEvent, Pairs, arena_tensor
from kvbm.transfer.cpu import CpuCopier
from kvbm.transfer.device_cache import DeviceCache
from kvbm.transfer.device_copier import DeviceCopier

__all__ = [
    "Copier",
    "Copying",
    "CpuCopier",
    "DeviceCache",
    "DeviceCopier",
    "DeviceEvent",
    "Pairs",
    "arena_tensor",
    "make_copier",
]


def make_copier(
    cache: DeviceCache,
    arena: torch.Tensor,
    cuda_method: str = "auto",
    by_engine: bool = False,
    numa_node: int = -1,
    runtime_dir: str = "",
) -> Copier:
    """The copier for the device that `cache` lies on; `arena` is uint8 `[slots, slot_bytes]` in host memory.

    `cuda_method` forces a way of copying on CUDA, and `numa_node` is where pages lie that locking brings forth (see
    `CudaCopier`). The processes of a node that use the same `runtime_dir` lock pages by turns; without one there are no
    turns. `by_engine` says that the engine's own thread calls (see `CpuCopier`).
    Raises `KvbmError` for a kind of device that has no copier, and where a CUDA device cannot be used.
    """
    if cache.device.type == "cpu":
        return CpuCopier(cache, arena, by_engine=by_engine)
    if cache.device.type == "cuda":
        from kvbm.transfer.cuda.copier import CudaCopier

        turns = None
        if runtime_dir:
            from kvbm.transfer.cuda.lock_turns import LockTurns

            turns = LockTurns(runtime_dir)
        try:
            return CudaCopier(cache, arena, cuda_method, numa_node=numa_node, turns=turns)
        except BaseException:
            if turns is not None:
                turns.close()
            raise
    raise KvbmError(f"copying KV on device {cache.device}: accepted are cpu and cuda")


def numa_node(device: torch.device) -> int:
    """The NUMA node that a CUDA device is attached to; -1 for any other device, and where it is not known."""
    if device.type != "cuda":
        return -1
    from kvbm.transfer.cuda.driver import CudaDriver

    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        return node_of_pci_device(CudaDriver().pci_bus_id(index))
    except KvbmError:
        return -1  # a driver that does not tell its place is no reason to go without a cache
