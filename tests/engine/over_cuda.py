"""vLLM on a CPU with KVBM's copies for CUDA, on the stand-in for a driver: KV lies in "device memory".

The engine computes where it is called, so what would have its stream wait makes its thread wait. Copies run beside it,
and end late.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.engine_child import Child
from engine.engine_process import EngineProcess

FAULTS = ("hold", "done", "pin")
"""What a control can take out: the engine's waits for copies, where no block is pinned; the check whether copies are
over; pins alone."""

_undo: list[Callable[[], None]] = []
_cuda: list[Any] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    _undo.append(lambda: setattr(owner, name, before))
    setattr(owner, name, value)


def put_on_cuda(child: Child, library: str, late_s: float, fault: str) -> None:
    """Engines that this process starts from now on copy through that library; each copy takes up to `late_s`."""
    from kvbm.leader.device import Pins
    from kvbm.transfer.cuda.copier import CudaCopier, CudaCopying
    from kvbm.transfer.device_cache import DeviceCache
    from kvbm.vllm_integration.block_pool import PoolBlocks
    from rigs.libcuda.library import Libcuda
    from rigs.libcuda.torch_cuda import DEVICE, TorchCuda, make_replacements

    libcuda = Libcuda(Path(library))
    libcuda.set_delay(late_s / 2, late_s)
    cuda = TorchCuda(libcuda, engine_computes_on_cpu=True)
    for name, value in make_replacements(cuda).items():
        module, _, attribute = name.rpartition(".")
        _replace(importlib.import_module(module), attribute, value)
    from_tensors = DeviceCache.from_tensors

    def on_device(cls: type[DeviceCache], kv_caches: Mapping[str, Any], block_count: int) -> DeviceCache:
        cache = from_tensors(kv_caches, block_count)
        libcuda.own(kv_caches.values())
        cache.device = DEVICE
        return cache

    _replace(DeviceCache, "from_tensors", classmethod(on_device))
    if fault == "hold":
        _replace(CudaCopier, "hold", lambda *arguments: None)
        _replace(Pins, "has_room", lambda *arguments: False)
    if fault == "done":
        _replace(CudaCopying, "done", lambda self: True)
    if fault == "pin":
        _replace(PoolBlocks, "pin", lambda *arguments: True)
        _replace(PoolBlocks, "unpin", lambda *arguments: None)
    _cuda[:] = [libcuda]


def put_on_cpu(child: Child) -> None:
    """Undo `put_on_cuda`."""
    while _undo:
        _undo.pop()()
    for libcuda in _cuda:
        libcuda.reset()
    _cuda.clear()


def device_seen(child: Child) -> tuple[int, list[str]]:
    """How many pieces were copied, and the violations."""
    (libcuda,) = _cuda
    return libcuda.call_count("piece"), libcuda.violations


def fail_by_chance(child: Child, name: str, chance: float) -> None:
    """Each call of that name fails with that probability."""
    (libcuda,) = _cuda
    libcuda.fail_by_chance(name, chance)


def stop_copies(child: Child, limit_s: float) -> None:
    """No copy ends from now on, and one hangs after `limit_s`."""
    from kvbm.transfer.cuda import copier
    from kvbm.worker import hang_watch

    _replace(hang_watch, "LATE_S", 0.0)
    for module in (hang_watch, copier):
        _replace(module, "COPY_S_MAX", limit_s)
    (libcuda,) = _cuda
    libcuda.hold_copies()


def copier_of(child: Child) -> str:
    """The class of the engine's copier."""
    assert child.engine is not None
    side = child.engine.worker_half._worker
    return type(side.mover._mapping.copier).__name__


@contextmanager
def on_cuda(process: EngineProcess, library: Path, late_s: float, fault: str = "") -> Iterator[None]:
    """Engines of that process are on the stand-in; the last one is stopped at the end."""
    try:
        process.call(put_on_cuda, str(library), late_s, fault, timeout_s=60.0)
        yield
    finally:
        if process.alive:
            try:
                process.stop()
            finally:
                process.call(put_on_cpu, timeout_s=20.0)
