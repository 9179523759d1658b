"""Weights that change while the engine runs. vLLM does not report it to connectors, so its own calls are watched.

Two places see an update. In the scheduler's process users reach the ranks through `EngineCore.collective_rpc`, and
empty the device's cache with `EngineCore.reset_prefix_cache`. After these calls the ranks compare a sample of their
weights with the one before: an update by any method is noticed before the next request is looked up. In a rank's
process the calls that update weights are counted as they begin and end, for updates that come another way; a step
that was planned before the update is refused there (`Worker`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from kvbm.strict import record_swallowed
from kvbm.vllm_integration.forced_reset import free_all_blocks

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
"""Calls of a rank that take its KV memory away."""

BEFORE_SERVING = "compile_or_warm_up_model"
"""The call of a rank that ends its start: its weights are loaded, and no request has come."""

SAMPLED_BYTES = 64
"""So many bytes of each weight are compared."""

SAMPLE_TIMEOUT_S = 60.0


class WeightsListener(Protocol):
    """The scheduler's side, which must know of changes."""

    def weights_changed(self) -> None:
        """The ranks compute with other weights from now on."""

    def weights_named(self, version: str) -> None:
        """The trainer names the weights."""

    def give_up_pins(self) -> bool:
        """The engine empties its cache: use none of its blocks any more. True if some were in use."""

    def loading_requests(self) -> Collection[str]:
        """The requests whose loads run."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_before_sleep: weakref.WeakSet[Any] = weakref.WeakSet()
_samples: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of each model in this process the latest sample."""
_updates = 0
_warned = False


def listen(listener: WeightsListener, core: type) -> None:
    """Notify this listener, as long as it lives, of changes that engine cores of this class make."""
    _listeners.add(listener)
    watch(core, "collective_rpc", _watched_call)
    watch(core, "reset_prefix_cache", _watched_reset)
    watch(core, "set_weight_version", _noted_version)


def count_updates(worker_side: Any, rank: type) -> None:
    """Count, from now on, the calls that change the weights of ranks of this class, and call `worker_side.quiesce()`
    before their memory is taken away."""
    _before_sleep.add(worker_side)
    for kind in (rank, *rank.__subclasses__()):
        for name in UPDATES:
            watch(kind, name, _counted_update)
        for name in MEMORY_CALLS:
            watch(kind, name, _quiet_first)
        watch(kind, BEFORE_SERVING, _sampled_first)


def updates_seen() -> int:
    """A number that grows whenever a call that changes this process's weights begins or ends."""
    return _updates


def watch(owner: type, name: str, wrapper: Callable[..., Callable[..., Any]]) -> None:
    """Wrap a method that the class itself defines, once; where it defines none there is nothing to watch."""
    original = vars(owner).get(name)
    if original is not None and not hasattr(original, "kvbm_watches"):
        watched = functools.wraps(original)(wrapper(original))
        watched.kvbm_watches = True  # type: ignore[attr-defined]
        setattr(owner, name, watched)


# ---- in a rank


def _counted_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        global _updates
        _updates += 1  # steps may run beside it, with weights that are half-written
        try:
            return original(*arguments, **more)
        finally:
            _updates += 1

    return call


def _quiet_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        for side in list(_before_sleep):
            side.quiesce()
        return original(*arguments, **more)

    return call


def _sampled_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(worker: Any, *arguments: Any, **more: Any) -> Any:
        try:
            weights_moved(worker)
        except Exception as error:
            record_swallowed(error)
            _warn_not_sampled(error)
        return original(worker, *arguments, **more)

    return call


def end_loads(_worker: Any) -> None:
    """In a rank: end the loads that run, with the blocks that are ready."""
    for side in list(_before_sleep):
        side.end_loads()


def weights_moved(worker: Any) -> bool:
    """In a rank: whether its weights differ from those at the last call; True at the first."""
    model = worker.get_model()
    before, now = _samples.get(model), _sample(model)
    _samples[model] = now
    return now != before


def _sample(model: torch.nn.Module) -> str:
    """A digest of some bytes of every weight and scale, and of where weights lie that are kept packed.

    Raises RuntimeError where bytes cannot be read: the caller may not take these weights for unchanged.
    """
    digest = hashlib.sha256()
    samples: dict[torch.device, list[torch.Tensor]] = {}  # some weights may be offloaded to the host
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tuple(weight.shape)};".encode())
        if weight.is_meta or weight.layout is not torch.strided:  # it has no plain storage
            digest.update(f"{id(weight)};".encode())
        else:
            samples.setdefault(weight.device, []).append(_sample_bytes(weight.detach()))
    for name, module in sorted(model.named_modules()):
        digest.update(f"{name} {id(getattr(module, 'cpu_linear', None))};".encode())
    for parts in samples.values():
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sample_bytes(weight: torch.Tensor) -> torch.Tensor:
    """At most SAMPLED_BYTES bytes of a tensor, uint8, spread evenly over its elements, whatever its strides.

    They are read out of its storage at positions that are computed as integers: on CUDA, one position past the end
    costs the process its context. Raises RuntimeError where they cannot be read.
    """
    word = weight.element_size()
    size = weight.numel() * word
    count = min(SAMPLED_BYTES, size)
    positions = [
        (weight.storage_offset() + _element_offset(byte // word, weight)) * word + byte % word
        for byte in (number * (size - 1) // max(1, count - 1) for number in range(count))
    ]
    storage = weight.untyped_storage()
    stored = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(storage)
    return stored[torch.tensor(positions, dtype=torch.int64, device=weight.device)]


def _element_offset(number: int, tensor: torch.Tensor) -> int:
    """Where element `number`, in the order of the tensor's indices, lies behind its first one, in elements."""
    offset = 0
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        number, index = divmod(number, length)
        offset += index * stride
    return offset


def _warn_not_sampled(error: Exception) -> None:
    """Log once in a process that its weights cannot be compared."""
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "the weights of this engine cannot be sampled (%s: %s): every reset_prefix_cache() and collective_rpc() "
            "counts as a weight update, and the blocks stored before it are not used any more",
            type(error).__name__,
            str(error).partition("\n")[0],
        )


# ---- in the scheduler's process


def _watched_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(core: Any, method: Any, *arguments: Any, **more: Any) -> Any:
        try:
            result = original(core, method, *arguments, **more)
        except BaseException:
            _notify_changed()  # it may have changed some weights before it failed
            raise
        if _listeners:
            moved = _moved(core)  # in any case: the next call is compared with this one
            if moved or method in UPDATES:
                _notify_changed()
        return result

    return call


def _watched_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(core: Any, *arguments: Any, **more: Any) -> Any:
        if _listeners and _moved(core):
            _notify_changed()  # first: the reset below then empties the cache of the old weights
        running = bool(arguments[0] if arguments else more.get("reset_running_requests"))
        if running and _listeners:  # it raises where blocks stay in use
            free_all_blocks(core, _loading_requests, end_loads)
            _give_up_pins()
        done = original(core, *arguments, **more)
        if not done and _give_up_pins():
            done = original(core, *arguments, **more)
        return done

    return call


def _loading_requests() -> set[str]:
    return {request for listener in list(_listeners) for request in listener.loading_requests()}


def _give_up_pins() -> bool:
    gave_up = [listener.give_up_pins() for listener in list(_listeners)]  # all of them
    return any(gave_up)


def _noted_version(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(core: Any, weight_version: str) -> Any:
        result = original(core, weight_version)
        for listener in list(_listeners):
            listener.weights_named(str(weight_version))
        return result

    return call


def _notify_changed() -> None:
    for listener in list(_listeners):
        listener.weights_changed()


def _moved(core: Any) -> bool:
    """Whether some rank's weights changed since the last call; True where that cannot be found out."""
    executor = core.model_executor
    if "weights" in getattr(executor, "sleeping_tags", ()):
        return True  # their memory may not be there
    try:
        return any(executor.collective_rpc(weights_moved, timeout=SAMPLE_TIMEOUT_S))
    except Exception as error:
        record_swallowed(error)
        _warn_not_sampled(error)
        return True
