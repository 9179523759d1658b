"""Copies where the device is a CUDA GPU: beside the forward pass, on streams of our own.

Each direction has a stream. Events on the device order the copies and the engine's work: no thread waits for the
engine, and the engine's stream gets nothing but an event to wait for. `choice` decides how the bytes move; `page_lock`
page-locks the arena.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from kvbm.errors import DeviceLost, KvbmError
from kvbm.numa import keep_thread_on
from kvbm.transfer.copier import Copying, DeviceEvent, Pairs, assert_arena, checked
from kvbm.transfer.cuda import choice as cuda_choice
from kvbm.transfer.cuda.choice import AUTO, Choice, Method
from kvbm.transfer.cuda.device import LOAD_PRIORITY, STORE_PRIORITY, Device, Stream, TorchDevice, first_line
from kvbm.transfer.cuda.driver import CudaDriver, CudaError, Driver
from kvbm.transfer.cuda.lock_turns import LockTurns
from kvbm.transfer.cuda.page_lock import PageLocks
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, pieces_of
from kvbm.transfer.device_cache import DeviceCache

_log = logging.getLogger(__name__)

STAGING_BYTES_MAX = 64 << 20


class CudaCopying(NamedTuple):
    """Copies that were begun: over when the device has got to `event`. See `Copying`.

    An event fails only when work before it has cost the device its context: both raise DeviceLost then.
    """

    event: Any

    def done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError as error:
            raise DeviceLost(first_line(error)) from error

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise DeviceLost(first_line(error)) from error


class CudaCopier:
    """See `Copier`. `method` is one that `choice.methods` offers, or `auto`: what was measured to be best.

    From the first copy on a thread measures, and then page-locks the arena. Until it has measured, copy engines are
    used. Slots that are not locked yet are copied through a bounded page-locked buffer, and so are all of them where
    the driver refuses to lock. Pages that were never touched before lie on `numa_node` then (-1: anywhere). `turns` are
    those of the arena's memory; `close` closes them. Nothing that any thread does here ends the capture of a CUDA graph
    that runs in the engine's. Copies are begun by one thread at a time. Beginning one waits for the device in two cases:
    copies of slots that are not page-locked are over when the call returns, and copies by the kernel wait for earlier
    ones where they fill its ring of pairs (`kernel.PLACES`).

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
            self._staging = self._make_staging()
            # In a thread of ours: in the engine's, memory may come from a pool that the engine empties when it sleeps.
            with ThreadPoolExecutor(1, "kvbm-cuda-tables") as ours:
                self._choice, to_measure = ours.submit(self._first_choice, method).result()
        self._locks = PageLocks(self._slots, arena.shape[0], self._driver, self._device, turns)
        self._turns = turns
        self._preparation = threading.Thread(
            target=self._prepare,
            args=(to_measure,),
            name="kvbm-cuda-prepare",
            daemon=True,
        )
        self._preparation.start()

    @property
    def choice(self) -> Choice:
        """The ways of copying in use."""
        return self._choice

    @property
    def locks(self) -> PageLocks:
        """How much of the arena is page-locked by now, and how much was refused."""
        return self._locks

    def prepared(self, timeout_s: float) -> bool:
        """Have the ways of copying measured and the arena locked, and wait for that; False after the time."""
        self._locks.begin()
        return self._locks.finished.wait(timeout_s)

    def adopt_thread(self) -> None:
        """Bind the device's context, and never disturb the engine while it captures a CUDA graph."""
        self._driver.adopt_thread(self._device.index)

    def mark(self) -> DeviceEvent:
        """An event on the calling thread's current stream."""
        event: DeviceEvent = self._device.mark()
        return event

    def hold(self, copying: Copying) -> None:
        """The calling thread's current stream waits; the thread does not."""
        assert isinstance(copying, CudaCopying), copying
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
        """Wait for copies under way and unlock the arena's pages. Idempotent."""
        if self._closed:
            return
        self._closed = True
        lost = False
        with contextlib.ExitStack() as relaxed:
            try:
                relaxed.enter_context(self._device.active())
                relaxed.enter_context(self._driver.beside_captures(self._device.index))
                for stream in (self._store_stream, self._load_stream):
                    stream.record().synchronize()
            except (CudaError, RuntimeError) as error:
                # Nothing but a lost device fails here; the process's end unlocks what the driver no longer can.
                _log.warning("waiting for copies under way: %s", first_line(error))
                lost = True
            self._locks.close(unlock=not lost)
        self._preparation.join()
        if self._turns is not None:
            self._turns.close()

    def _begin(
        self, stream: Stream, pieces: Pieces, pairs: Pairs, after: DeviceEvent | None, *, to_device: bool
    ) -> CudaCopying:
        self._locks.begin()  # engines copy nothing before their first step
        method = self._choice.of(len(pairs) * len(pieces.size), to_device=to_device)
        locked_slots = self._locks.locked_slots
        locked = [pair for pair in pairs if pair[1] < locked_slots]
        with self._device.active():
            stream.wait(after if after is not None else self.mark())
            try:
                if locked:
                    method.begin(pieces, locked, self._slots, to_device=to_device, stream=stream)
                if len(locked) < len(pairs):
                    unlocked = [pair for pair in pairs if pair[1] >= locked_slots]
                    self._staging.copy(
                        lambda batch, rows: method.begin(
                            pieces, batch, rows, to_device=to_device, stream=stream
                        ),
                        stream,
                        self._arena,
                        unlocked,
                        pieces.slot_span,
                        to_device=to_device,
                    )
                return CudaCopying(stream.record())
            except BaseException as error:
                # Some copies may be under way: the caller frees their memory as soon as it gets the error.
                _drain(stream)
                if isinstance(error, CudaError) and error.lost:
                    raise DeviceLost(str(error)) from error
                raise

    def _first_choice(self, name: str) -> tuple[Choice, dict[str, Method]]:
        """The ways in use from now on, and those to be measured once the engine runs."""
        self._driver.adopt_thread(self._device.index)
        with self._device.active():
            return self._choose_first(name)

    def _choose_first(self, name: str) -> tuple[Choice, dict[str, Method]]:
        offered = cuda_choice.methods(self._driver, self._device)
        layouts = [self._pieces, *self._layers.values()]
        if name != AUTO:
            choice = cuda_choice.named(name, offered)
            choice.load.learn(layouts, self._load_stream)
            return choice, {}
        candidates = cuda_choice.candidates(offered, self._pieces)
        able = cuda_choice.learned(candidates, layouts, self._load_stream)
        return cuda_choice.unmeasured(able), able

    def _make_staging(self) -> _Staging:
        row_bytes = self._arena.shape[1]
        rows = max(1, min(STAGING_BYTES_MAX // row_bytes, self._arena.shape[0]))
        try:
            return _Staging(self._device.pinned(rows, row_bytes))
        except RuntimeError as error:
            raise KvbmError(
                f"page-locking a buffer of {rows * row_bytes} bytes for copies: {first_line(error)}"
            ) from error

    def _prepare(self, to_measure: dict[str, Method]) -> None:
        keep_thread_on(self._numa_node)
        try:
            self._driver.adopt_thread(self._device.index)
            # Not beside the engine's start, which measures memory. And before pages are locked, not beside it: that
            # holds the driver's locks and would be measured with it.
            if self._locks.wait_for_begin() and to_measure:
                with self._device.active():
                    table = cuda_choice.measure(self._pieces, to_measure, self._device)
                self._choice = cuda_choice.best(table, self._choice)
                _log.info(
                    "copies by %s down and %s up; %s",
                    self._choice.store.name,
                    self._choice.load.name,
                    cuda_choice.describe(table, self._pieces),
                )
        except (KvbmError, RuntimeError) as error:
            _log.warning(
                "the ways of copying could not be measured (%s): %s is used",
                first_line(error),
                self._choice.store.name,
            )
            if isinstance(error, CudaError) and error.lost:
                self._locks.stop()
        finally:
            self._locks.run()


class _Staging:
    """A few page-locked rows that stand for slots which are not locked. Copies through it end before it returns."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def copy(
        self,
        begin: Callable[[Pairs, SlotRows], None],
        stream: Stream,
        arena: torch.Tensor,
        pairs: Pairs,
        span: slice,
        *,
        to_device: bool,
    ) -> None:
        """Copy `span` of the pairs' slots in batches of as many as there are rows; `begin` puts one on the stream."""
        rows = SlotRows(self._rows.data_ptr(), self._rows.stride(0))
        for start in range(0, len(pairs), len(self._rows)):
            batch = pairs[start : start + len(self._rows)]
            staged = [self._rows[row, span] for row in range(len(batch))]
            slots = [arena[slot, span] for _, slot in batch]
            if to_device:
                torch._foreach_copy_(staged, slots)
            begin([(block, row) for row, (block, _) in enumerate(batch)], rows)
            # The rows are refilled by the next batch, and read below.
            stream.record().synchronize()
            if not to_device:
                torch._foreach_copy_(slots, staged)


def _drain(stream: Stream) -> None:
    """Wait until nothing is under way on the stream."""
    try:
        stream.record().synchronize()
    except RuntimeError as error:
        # The device is lost: nothing moves any more, and the error that led here says more.
        _log.debug("waiting for copies that were begun: %s", first_line(error))
