"""Copies of slots that are not page-locked: through a few page-locked rows, by a thread for each direction.

The rows are few, and are used again when the device is through with them; that may wait for a step of the engine's. So
it happens in threads of its own: whoever begins such a copy waits for nothing. Until the arena is locked these are the
copies of the first seconds; where the driver refuses to lock, they are all that there are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from kvbm.errors import CopyHung, DeviceLost, KvbmError
from kvbm.transfer.copier import COPY_S_MAX, DeviceEvent, Pairs
from kvbm.transfer.cuda.choice import Method
from kvbm.transfer.cuda.device import LOAD_PRIORITY, STORE_PRIORITY, Device, Stream, first_line
from kvbm.transfer.cuda.driver import CudaError, Driver
from kvbm.transfer.cuda.pieces import Pieces, SlotRows

_log = logging.getLogger(__name__)

STAGING_BYTES_MAX = 64 << 20
"""Of both directions together, or a row for each where a slot has more."""


class _Thread:
    """Makes calls, in the order in which they come. A daemon, which an executor's threads are not: one that waits for a
    copy that hangs must not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Have it called."""
        ended: Future[None] = Future()
        self._calls.put((call, ended))
        return ended

    def end(self) -> None:
        """Wait for the calls, and for the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, ended = item
            try:
                call()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            del item, call, ended  # an idle thread keeps no copier, and no memory, alive


class _Side(NamedTuple):
    """One direction: the thread that copies, the stream, and the rows."""

    thread: _Thread
    stream: Stream
    rows: torch.Tensor


class Staging:
    """Begins copies of slots of `arena` in the order in which they come, for each direction. Close it once done.

    Raises KvbmError where there is no page-locked memory.
    """

    def __init__(self, arena: torch.Tensor, driver: Driver, device: Device, method: Method) -> None:
        row_bytes = arena.shape[1]
        rows = max(1, min(STAGING_BYTES_MAX // 2 // row_bytes, arena.shape[0]))
        self._arena = arena
        self._device = device
        self._method = method
        self._latest: dict[bool, Future[None]] = {}
        self._sides = {
            to_device: _Side(
                _start_thread(driver, device, f"kvbm-staged-{name}"),
                device.new_stream(priority),
                _pinned(device, rows, row_bytes),
            )
            for to_device, name, priority in (
                (False, "stores", STORE_PRIORITY),
                (True, "loads", LOAD_PRIORITY),
            )
        }

    def begin(self, pieces: Pieces, pairs: Pairs, after: DeviceEvent, *, to_device: bool) -> Future[None]:
        """Have the pairs copied behind `after`. What it raises, copies raise; nothing is under way then."""
        side = self._sides[to_device]
        copying = side.thread.submit(partial(self._copy, pieces, pairs, after, side, to_device))
        self._latest[to_device] = copying
        return copying

    def close(self) -> None:
        """Wait for copies under way, and end the threads. Raises CopyHung."""
        if futures.wait(self._latest.values(), COPY_S_MAX).not_done:
            raise CopyHung(f"copies of slots that are not page-locked have not ended within {COPY_S_MAX:g} s")
        for side in self._sides.values():
            side.thread.end()

    def _copy(self, pieces: Pieces, pairs: Pairs, after: DeviceEvent, side: _Side, to_device: bool) -> None:
        """In batches of as many as there are rows."""
        _, stream, rows = side
        places, span = SlotRows(rows.data_ptr(), rows.stride(0)), pieces.slot_span
        with self._device.active():
            try:
                stream.wait(after)
                for start in range(0, len(pairs), len(rows)):
                    batch = pairs[start : start + len(rows)]
                    staged = [rows[row, span] for row in range(len(batch))]
                    slots = [self._arena[slot, span] for _, slot in batch]
                    if to_device:
                        torch._foreach_copy_(staged, slots)
                    in_rows = [(block, row) for row, (block, _) in enumerate(batch)]
                    self._method.begin(pieces, in_rows, places, to_device=to_device, stream=stream)
                    # The rows are refilled by the next batch, and read below.
                    stream.record().synchronize()
                    if not to_device:
                        torch._foreach_copy_(slots, staged)
            except BaseException as error:
                drain(stream, error)
                raise


def _start_thread(driver: Driver, device: Device, name: str) -> _Thread:
    """A thread that copies, adopted while the device is known to work. Raises as `adopt_thread` does."""
    thread = _Thread(name)
    thread.submit(partial(driver.adopt_thread, device.index)).result()
    return thread


def _pinned(device: Device, rows: int, row_bytes: int) -> torch.Tensor:
    try:
        return device.pinned(rows, row_bytes)
    except RuntimeError as error:
        size = rows * row_bytes
        raise KvbmError(f"page-locking a buffer of {size} bytes for copies: {first_line(error)}") from error


def drain(stream: Stream, error: BaseException) -> None:
    """Wait, after this error, until nothing is under way on the stream.

    Where that fails the device is lost, and nothing moves any more: raises DeviceLost with the text of `error`, which
    says more, or `error` itself where it ends the thread.
    """
    try:
        stream.record().synchronize()
    except (CudaError, RuntimeError) as further:
        _log.debug("waiting for copies that were begun: %s", first_line(further))
        if not isinstance(error, Exception):
            raise error from None
        raise DeviceLost(first_line(error)) from error
