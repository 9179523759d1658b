"""Weights that change while the engine runs. vLLM tells connectors nothing of it, so its own calls are watched.

Two places see an update. In the scheduler's process `EngineCore.collective_rpc` is the door through which users reach
the ranks: the weights are sampled before and after, so that an update is noticed whatever it is called, before
another request is looked up. In a rank's process the calls that update weights are counted, for an update that comes
another way; a step that was planned without knowing of it is refused there (`Worker`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

log = logging.getLogger("kvbm.vllm")

UPDATES = (
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
)
"""Calls of a rank that change its weights."""

MEMORY_CALLS = ("sleep", "discard")
"""Calls of a rank after which its KV memory is not there."""

SAMPLED_BYTES = 64
"""Of each weight so many bytes are compared, spread over it."""


class WeightsListener(Protocol):
    """Who must know: the leader's side."""

    def weights_changed(self) -> None:
        """The ranks compute with other weights from now on."""

    def weights_named(self, version: str) -> None:
        """The trainer says which weights these are."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_before_sleep: weakref.WeakSet[Any] = weakref.WeakSet()
_updates = 0


def listen(listener: WeightsListener) -> None:
    """Tell this one, as long as it lives, of changes that an engine core of this process makes."""
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    _wrap(EngineCore, "collective_rpc", _watched_call)
    _wrap(EngineCore, "set_weight_version", _noted_version)


def count_updates(worker_side: Any) -> None:
    """Count, from now on, the calls that change the weights of this rank; `worker_side.quiesce()` comes before its
    memory goes."""
    from vllm.v1.worker.gpu_worker import Worker

    _before_sleep.add(worker_side)
    for name in UPDATES:
        _wrap(Worker, name, _counted_update)
    for name in MEMORY_CALLS:
        _wrap(Worker, name, _quiet_first)


def updates_seen() -> int:
    """How often this process's weights were changed by calls that are counted."""
    return _updates


def _wrap(owner: type, name: str, wrapper: Callable[..., Callable[..., Any]]) -> None:
    """Put our watch around a method, once; a vLLM that has no such method has nothing to watch."""
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "kvbm_watches"):
        watched = functools.wraps(original)(wrapper(original))
        watched.kvbm_watches = True  # type: ignore[attr-defined]
        setattr(owner, name, watched)


def _counted_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        global _updates
        try:
            return original(*arguments, **more)
        finally:
            _updates += 1  # also when it failed half-way

    return call


def _quiet_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        for side in list(_before_sleep):
            side.quiesce()
        return original(*arguments, **more)

    return call


def _watched_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(core: Any, method: Any, *arguments: Any, **more: Any) -> Any:
        if not _listeners:
            return original(core, method, *arguments, **more)
        before = None if method in UPDATES else _samples(core)
        try:
            return original(core, method, *arguments, **more)
        finally:
            if before is None or _samples(core) != before:
                for listener in list(_listeners):
                    listener.weights_changed()

    return call


def _noted_version(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(core: Any, weight_version: str) -> Any:
        result = original(core, weight_version)
        for listener in list(_listeners):
            listener.weights_named(str(weight_version))
        return result

    return call


def _samples(core: Any) -> tuple[str, ...] | None:
    """A digest of a sample of each rank's weights; None where it cannot be taken, which counts as a change."""
    executor = core.model_executor
    if getattr(executor, "is_sleeping", False):
        return None  # their memory may not be there
    try:
        found = executor.collective_rpc(sample_weights)
    except Exception:
        log.debug("no sample of the weights", exc_info=True)
        return None
    return tuple(found)


def sample_weights(worker: Any) -> str:
    """In a rank: a digest of some bytes of every weight, and of where weights lie that are kept packed."""
    model = worker.get_model()
    digest = hashlib.sha256()
    samples = []
    for name, weight in sorted(model.named_parameters()):
        data = weight.detach()
        digest.update(f"{name} {tuple(data.shape)} {data.data_ptr()};".encode())
        if data.numel() and data.is_contiguous():
            flat = data.reshape(-1).view(torch.uint8)
            places = torch.linspace(0, flat.numel() - 1, min(SAMPLED_BYTES, flat.numel()), device=flat.device)
            samples.append(flat[places.long()])
    for name, module in sorted(model.named_modules()):
        digest.update(f"{name} {id(getattr(module, 'cpu_linear', None))};".encode())
    if samples:
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()
