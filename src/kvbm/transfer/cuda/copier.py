"""Copies where the device is a CUDA GPU: beside the forward pass, on streams of our own.

Each direction has a stream. Events on the device order the copies and the engine's work: no thread waits for the
engine, and the engine's stream gets nothing but an event to wait for. `choice` decides how the bytes move; `page_lock`
page-locks the arena.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from kvbm.errors import CopyHung, DeviceLost
from kvbm.numa import keep_thread_on
from kvbm.transfer.copier import COPY_S_MAX, Copying, DeviceEvent, Pairs, assert_arena, checked
from kvbm.transfer.cuda.choice import AUTO, Choice, choose_methods
from kvbm.transfer.cuda.device import LOAD_PRIORITY, STORE_PRIORITY, Device, Stream, TorchDevice, first_line
from kvbm.transfer.cuda.driver import CudaDriver, CudaError, Driver
from kvbm.transfer.cuda.lock_turns import LockTurns
from kvbm.transfer.cuda.page_lock import PageLocks
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, pieces_of
from kvbm.transfer.cuda.staging import Staging, drain
from kvbm.transfer.device_cache import DeviceCache

_log = logging.getLogger(__name__)

_POLL_S = 0.0002


class CudaCopying(NamedTuple):
    """Copies that were begun: over when the device has got to `event`, and those of unlocked slots have been `staged`;
    None where there are none of a kind. See `Copying`.

    An event fails only when work before it has cost the device its context: both raise DeviceLost then.
    """

    event: Any = None
    staged: Future[None] | None = None

    def done(self) -> bool:
        if self.staged is not None and not self.staged.done():
            return False
        try:
            if self.event is not None and not self.event.query():
                return False
        except RuntimeError as error:
            raise DeviceLost(first_line(error)) from error
        # Last: whoever hears of an error takes it that nothing is under way.
        _raise_of(self.staged)
        return True

    def wait(self) -> None:
        until_s = time.monotonic() + COPY_S_MAX
        if self.staged is not None:
            futures.wait([self.staged], COPY_S_MAX)
        # An event cannot be waited for with a limit.
        while not self.done():
            if time.monotonic() > until_s:
                raise CopyHung(f"copies have not ended within {COPY_S_MAX:g} s")
            time.sleep(_POLL_S)


class CudaCopier:
    """See `Copier`. `method` is one that `choice.list_methods` names, or `auto` (see `choice`).

    From the first copy on a thread page-locks the arena. Slots that are not locked yet are copied through a bounded
    page-locked buffer (`staging`), and so are all of them where the driver refuses to lock. Pages that were never
    touched before lie on `numa_node` then (-1: anywhere). `turns` are this node's turns at locking pages; `close`
    closes them. Nothing that any thread does here ends the capture of a CUDA graph that runs in the engine's. Copies
    are begun by one thread at a time. Beginning one waits for earlier ones only where copies by the kernel fill its
    ring of pairs (`kernel.PLACES`).

    Raises KvbmError where there is no driver or no page-locked memory, SettingsError for a method that is not
    offered here.
    """

    def __init__(
        self,
        cache: DeviceCache,
        arena: torch.Tensor,
        method: str = AUTO,
        driver: Driver | None = None,
        device: Device | None = None,
        numa_node: int = -1,
        turns: LockTurns | None = None,
    ) -> None:
        assert_arena(arena, cache)
        self._cache = cache
        self._arena = arena
        self._driver = driver or CudaDriver()
        self._device = device or TorchDevice(cache.device)
        self._slots = SlotRows(arena.data_ptr(), arena.stride(0))
        self._pieces = pieces_of(cache.regions)
        self._layers = {name: pieces_of([region]) for name, region in cache.layers.items()}
        self._numa_node = numa_node
        self._closed = False
        with self._device.active(), self._driver.beside_captures(self._device.index):
            self._store_stream = self._device.new_stream(STORE_PRIORITY)
            self._load_stream = self._device.new_stream(LOAD_PRIORITY)
            # In a thread of ours: in the engine's, memory may come from a pool that the engine empties when it sleeps.
            with ThreadPoolExecutor(1, "kvbm-cuda-tables") as ours:
                self._choice = ours.submit(self._choose_methods, method).result()
            self._staging = Staging(arena, self._driver, self._device, self._choice.engines)
        _log.info("%s", self._choice)
        self._locks = PageLocks(self._slots, arena.shape[0], self._driver, self._device, turns)
        self._turns = turns
        self._locking = threading.Thread(target=self._lock, name="kvbm-cuda-lock", daemon=True)
        self._locking.start()

    @property
    def choice(self) -> Choice:
        """The ways of copying in use."""
        return self._choice

    @property
    def locks(self) -> PageLocks:
        """How much of the arena is page-locked by now, and how much was refused."""
        return self._locks

    def prepared(self, timeout_s: float) -> bool:
        """Have the arena locked, and wait until it is or the driver refuses; False after the time."""
        self._locks.begin()
        return self._locks.settled.wait(timeout_s)

    def adopt_thread(self) -> None:
        """Bind the device's context, and never disturb the engine while it captures a CUDA graph."""
        self._driver.adopt_thread(self._device.index)

    def mark(self) -> DeviceEvent:
        """An event on the calling thread's current stream."""
        event: DeviceEvent = self._device.mark()
        return event

    def hold(self, copying: Copying) -> None:
        """The calling thread's current stream waits; the thread waits for copies of slots that are not locked.

        Raises CopyHung where these take longer than `COPY_S_MAX`.
        """
        assert isinstance(copying, CudaCopying), copying
        # There is no event yet that the device could wait for. What became of it, its own waiters hear.
        if copying.staged is not None and futures.wait([copying.staged], COPY_S_MAX).not_done:
            raise CopyHung(f"copies of slots that are not page-locked have not ended within {COPY_S_MAX:g} s")
        if copying.event is not None:
            self._device.hold(copying.event)

    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> CudaCopying:
        """Device blocks → slots."""
        ordered = checked(pairs, self._cache, self._arena)
        return self._begin(self._store_stream, self._pieces, ordered, after, to_device=False)

    def begin_load(
        self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None
    ) -> CudaCopying:
        """Slots → device blocks."""
        ordered = checked(pairs, self._cache, self._arena)
        pieces = self._pieces if layer is None else self._layers[layer]
        return self._begin(self._load_stream, pieces, ordered, after, to_device=True)

    def store(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """`begin_store`, and wait."""
        self.begin_store(pairs, after).wait()

    def load(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """`begin_load`, and wait."""
        self.begin_load(pairs, after).wait()

    def close(self) -> None:
        """Wait for copies under way and unlock the arena's pages. Idempotent. Raises CopyHung, and unlocks nothing."""
        if self._closed:
            return
        self._closed = True
        self._locks.stop()  # also where a copy hangs
        lost = False
        self._staging.close()
        with contextlib.ExitStack() as relaxed:
            try:
                relaxed.enter_context(self._device.active())
                relaxed.enter_context(self._driver.beside_captures(self._device.index))
                for stream in (self._store_stream, self._load_stream):
                    CudaCopying(stream.record()).wait()
            except (CudaError, RuntimeError) as error:
                # Nothing but a lost device fails here; the process's end unlocks what the driver no longer can.
                _log.warning("waiting for copies under way: %s", first_line(error))
                lost = True
            self._locks.close(unlock=not lost)
        self._locking.join()
        if self._turns is not None:
            self._turns.close()

    def _begin(
        self, stream: Stream, pieces: Pieces, pairs: Pairs, after: DeviceEvent | None, *, to_device: bool
    ) -> CudaCopying:
        self._locks.begin()  # engines copy nothing before their first step
        method = self._choice.choose_method(len(pairs) * len(pieces.size), to_device=to_device)
        locked_slots = self._locks.locked_slots
        locked = [pair for pair in pairs if pair[1] < locked_slots]
        unlocked = [pair for pair in pairs if pair[1] >= locked_slots]
        with self._device.active():
            after, event, staged = after if after is not None else self.mark(), None, None
            try:
                if locked or not unlocked:
                    stream.wait(after)
                    method.begin(pieces, locked, self._slots, to_device=to_device, stream=stream)
                    event = stream.record()
                if unlocked:
                    staged = self._staging.begin(pieces, unlocked, after, to_device=to_device)
            except BaseException as error:
                # Some copies may be under way: the caller frees their memory as soon as it gets the error. An error of
                # torch's does not say whether the device is lost, but then the stream cannot be waited for either.
                drain(stream, error)
                if isinstance(error, CudaError) and error.lost:
                    raise DeviceLost(str(error)) from error
                raise
        return CudaCopying(event, staged)

    def _choose_methods(self, method: str) -> Choice:
        self._driver.adopt_thread(self._device.index)
        with self._device.active():
            layouts = [self._pieces, *self._layers.values()]
            return choose_methods(method, self._driver, self._device, layouts, self._slots, self._load_stream)

    def _lock(self) -> None:
        keep_thread_on(self._numa_node)
        self._locks.run()


def _raise_of(staged: Future[None] | None) -> None:
    """Raise what copies through rows, which are over, have raised."""
    try:
        if staged is not None:
            staged.result()
    except CudaError as error:
        if error.lost:
            raise DeviceLost(str(error)) from error
        raise
