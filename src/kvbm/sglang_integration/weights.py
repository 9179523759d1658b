"""Which weights this rank, and all others of its model, compute with now.

SGLang's page hashes cover no weights, and weights can change in memory: from disk, from tensors, over a network. So
what is digested is what runs: the bytes of all parameters and buffers (rotary tables are among them) of the models that
are loaded. K and V of one rank depend on the weights of all, so the digests of all ranks are put together; they meet in
torch's store. SGLang's functions that change weights are watched: a change makes the digest unknown, and it is made
again when it is asked for next.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from kvbm.errors import KvbmError
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.sglang")

CHUNK_BYTES = 64 << 20

WEIGHTS_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"
SCHEDULER_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater",
    "SchedulerWeightUpdaterManager",
)
CHANGES = {
    WEIGHTS_UPDATER: (
        "begin_weight_update",
        "end_weight_update",
        "load_weights_from_distributed",
        "receive_weights_from_distributed",
        "update_weights_from_disk",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
    ),
}
"""By class: the methods during which weights may change."""
RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
"""Of the scheduler's class: between them there are no weights to read, if these are among the tags."""
WEIGHTS_TAG = "weights"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner", "ModelRunner"

SCHEDULER = "sglang.srt.managers.scheduler", "Scheduler"


@dataclass(frozen=True)
class Watched:
    """Counts of one process. `changes` is odd while weights change; `emptied` is its value when SGLang emptied its own
    caches last: before that they may hold KV of other weights."""

    changes: int = 0
    emptied: int = 0

    @property
    def stable(self) -> bool:
        """No weights are changing."""
        return self.changes % 2 == 0

    @property
    def unmixed(self) -> bool:
        """What SGLang's own caches hold was computed with the present weights."""
        return self.stable and self.emptied == self.changes


class WeightsWatch:
    """Notices the changes of this process's weights. Its counts are read by any thread."""

    def __init__(self) -> None:
        self.now = Watched()
        self.watching = False
        self._lock = threading.Lock()
        self.runners: weakref.WeakSet[Any] = weakref.WeakSet()
        """The model runners that were made since changes are watched: SGLang hands a backend none of them."""
        self._depth = 0
        self._emptied_inside = False

    def begin(self) -> None:
        """Weights are about to change."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._emptied_inside = False
                self.now = Watched(self.now.changes + 1, self.now.emptied)

    def end(self) -> None:
        """They have changed, perhaps only in part."""
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0 and self.now.changes % 2:
                changes = self.now.changes + 1
                # Nothing is computed in between: caches that were emptied by then are empty still.
                self.now = Watched(changes, changes if self._emptied_inside else self.now.emptied)

    def emptied(self) -> None:
        """SGLang has emptied its caches."""
        with self._lock:
            self._emptied_inside = self._depth > 0
            if self._depth == 0:
                self.now = Watched(self.now.changes, self.now.changes)

    def install(self, resolve: Callable[[str, str], Any]) -> None:
        """Wrap SGLang's functions, once in a process. Raises AttributeError or ImportError where they are not as in the
        versions we know: then no change could be seen."""
        if self.watching:
            return
        found = [(resolve(*place), name) for place, names in CHANGES.items() for name in names]
        updater, scheduler, runner = resolve(*SCHEDULER_UPDATER), resolve(*SCHEDULER), resolve(*MODEL_RUNNER)
        wanted = [*found, (updater, RELEASE), (updater, RESUME), (scheduler, "flush_cache")]
        for owner, name in wanted:
            getattr(owner, name)  # all of them, or none is wrapped
        for owner, name in found:
            setattr(owner, name, self._changing(getattr(owner, name)))
        setattr(updater, RELEASE, self._releasing(getattr(updater, RELEASE)))
        setattr(updater, RESUME, self._resuming(getattr(updater, RESUME)))
        scheduler.flush_cache = self._emptying(scheduler.flush_cache)
        runner.__init__ = self._making(runner.__init__)
        self.watching = True

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def changing(*arguments: Any, **keywords: Any) -> Any:
            self.begin()
            try:
                return original(*arguments, **keywords)
            finally:
                self.end()

        return changing

    def _releasing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def release(updater: Any, request: Any) -> Any:
            if _has_weights(request):
                self.begin()  # until they are resumed
            return original(updater, request)

        return release

    def _resuming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resume(updater: Any, request: Any) -> Any:
            resumed = original(updater, request)
            if _has_weights(request):
                self.end()
            return resumed

        return resume

    def _emptying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def flush_cache(*arguments: Any, **keywords: Any) -> Any:
            flushed = original(*arguments, **keywords)
            if flushed:
                self.emptied()
            return flushed

        return flush_cache

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def made(runner: Any, *arguments: Any, **keywords: Any) -> None:
            original(runner, *arguments, **keywords)
            self.runners.add(runner)

        return made


def _has_weights(request: Any) -> bool:
    """Whether a request to release or resume memory is about weights too: it names what, or means all."""
    tags = getattr(request, "tags", None)
    return not tags or WEIGHTS_TAG in tags


def model_runners() -> list[Any]:
    """The model runners of this process, the target's first."""
    found = list(WATCH.runners)
    if not found:  # the plug-in was not loaded; frozen objects (`/freeze_gc`) are not found so
        kind = getattr(importlib.import_module(MODEL_RUNNER[0]), MODEL_RUNNER[1])
        found = [each for each in gc.get_objects() if issubclass(type(each), kind) and hasattr(each, "model")]
    return sorted(found, key=lambda runner: bool(runner.is_draft_worker))


def digest_of(models: Iterable[Any]) -> bytes:
    """32 bytes over the names, types, shapes and bytes of all parameters and buffers of the models, in order."""
    digest = blake3(b"running weights", max_threads=blake3.AUTO)
    with torch.no_grad():
        for model in models:
            digest.update(type(model).__qualname__.encode() + b"\0")
            tensors = [*model.named_parameters(), *model.named_buffers()]
            for name, tensor in sorted(tensors, key=lambda named: named[0]):
                digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                for chunk in _chunks(tensor):
                    digest.update(memoryview(chunk.numpy()))
    return digest.digest()


def _chunks(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensor's bytes, in order, some at a time, in main memory."""
    if tensor.numel() == 0 or tensor.is_meta:
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].cpu()


class Meeting:
    """Where the digests of all ranks of a model meet: torch's store, which every rank has.

    A call is a round trip over the network, and waits for nothing else. Never in the scheduler's thread.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._shown = ""

    @classmethod
    def of_process(cls) -> Meeting | None:
        """That of this process; None where it is alone."""
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return None
        store = torch.distributed.distributed_c10d._get_default_store()
        return cls(store, torch.distributed.get_rank(), torch.distributed.get_world_size())

    def put(self, round_: str, digest: bytes) -> None:
        """Show this rank's digest to the others."""
        self._store.set(self._name(round_, self._rank), digest.hex())
        before, self._shown = self._shown, self._name(round_, self._rank)
        if before:
            self._store.delete_key(before)

    def all_of(self, round_: str) -> list[bytes] | None:
        """Every rank's digest; None until all are there."""
        names = [self._name(round_, rank) for rank in range(self._ranks)]
        if not self._store.check(names):
            return None
        return [bytes.fromhex(self._store.get(name).decode()) for name in names]

    @staticmethod
    def _name(round_: str, rank: int) -> str:
        return f"kvbm/weights/{round_}/{rank}"


class RunningWeights:
    """The digest of the weights of all ranks, made in the background when it is asked for.

    `name` tells apart those who ask (a process may have several); it is the same on every rank. `extras` is what shapes
    KV beside the models' own tensors, on this rank. `take` makes this rank's digest; it runs in a thread.
    """

    def __init__(
        self,
        name: str,
        watch: WeightsWatch,
        take: Callable[[], bytes],
        meeting: Meeting | None,
        extras: bytes = b"",
    ) -> None:
        self._name, self._watch, self._take, self._meeting, self._extras = name, watch, take, meeting, extras
        self._lock = threading.Lock()
        self._known: tuple[int, bytes] | None = None
        self._own: tuple[int, bytes] | None = None
        self._unreadable: int | None = None
        self._taking: threading.Thread | None = None

    def identity(self) -> bytes | None:
        """32 bytes that name the present weights; None while they change, and until all ranks have their digest.

        For any thread: it waits for nothing (see `look`).
        """
        now = self._watch.now
        if not now.stable:
            return None
        with self._lock:
            if self._known is not None and self._known[0] == now.changes:
                return self._known[1]
            # Reading all weights again and again would cost the engine.
            taken = self._own is not None and self._own[0] == now.changes
            if not taken and self._unreadable != now.changes:
                self._begin()
        return None

    def look(self) -> bytes | None:
        """`identity`, after a look at whether the other ranks have their digests. Not for the scheduler's thread."""
        known = self.identity()
        now, own = self._watch.now, self._own
        if known is not None or own is None or own[0] != now.changes:
            return known
        digests = [own[1]] if self._meeting is None else self._meeting.all_of(f"{self._name}/{now.changes}")
        if digests is None:
            return None
        identity = hashlib.sha256(b"".join(digests)).digest()
        with self._lock:
            self._known = now.changes, identity
        return identity

    @property
    def coming(self) -> bool:
        """Whether the name of the present weights is not known and will soon be."""
        now = self._watch.now
        return now.stable and self._unreadable != now.changes and self.identity() is None

    def wait(self, timeout_s: float) -> None:
        """Wait until this rank's digest is made, at most so long."""
        self.identity()
        thread = self._taking
        if thread is not None:
            thread.join(timeout_s)
            self.look()

    def _begin(self) -> None:
        if self._taking is None or not self._taking.is_alive():
            self._taking = threading.Thread(target=self._digest, name="kvbm-weights", daemon=True)
            self._taking.start()

    def _digest(self) -> None:
        changes = self._watch.now.changes
        try:
            digest = hashlib.sha256(self._take() + self._extras).digest()
            if changes != self._watch.now.changes:
                return  # they changed meanwhile: whoever asks next begins anew
            if self._meeting is not None:
                self._meeting.put(f"{self._name}/{changes}", digest)
        except Exception as error:
            record_swallowed(error)
            if changes == self._watch.now.changes:
                self._unreadable = changes
                log.exception(
                    "the weights of this rank could not be read: KVBM keeps and finds nothing until they change"
                )
            return
        with self._lock:
            self._own = changes, digest


WATCH = WeightsWatch()
"""That of this process: SGLang's functions can be wrapped once only."""


def watch_weights() -> None:
    """See every change of the weights from now on. Raises KvbmError where SGLang is not as we know it."""
    try:
        WATCH.install(lambda module, name: getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise KvbmError(f"KVBM cannot see when SGLang changes weights, and is off: {error}") from None
