"""Page-locking the host arena bit by bit, while the engine starts.

Locking gigabytes takes seconds, and the driver holds its own locks meanwhile: so it is done in pieces, in slot order,
by a thread. Slots behind the last locked piece are copied through a small buffer until it has got there, or for good
where the driver refuses.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from kvbm.transfer.cuda.device import Device, first_line
from kvbm.transfer.cuda.driver import CudaError, Driver
from kvbm.transfer.cuda.lock_turns import LockTurns
from kvbm.transfer.cuda.pieces import SlotRows

_log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""Locked in one call; other calls into the driver wait that long at most."""


class PageLocks:
    """The page locks of `slot_count` slots. `locked_slots` of them, from the first on, are locked by now.

    `run` belongs to one thread of the caller's; `close` may be called from another one, once. With `turns` pieces are
    locked when no other process locks any of the same memory.
    """

    def __init__(
        self,
        slots: SlotRows,
        slot_count: int,
        driver: Driver,
        device: Device,
        turns: LockTurns | None = None,
    ) -> None:
        self._slots = slots
        self._slot_count = slot_count
        self._driver = driver
        self._device = device
        self._turns = turns
        self._piece_slots = max(1, PIECE_BYTES // slots.row_bytes)
        self._closing = threading.Event()
        self._pieces: list[int] = []
        self.locked_slots = 0
        self.refusal = ""
        self.finished = threading.Event()

    def run(self) -> None:
        """Lock all that can be locked; returns early when `close` was called."""
        try:
            with self._device.active():
                while self.locked_slots < self._slot_count and not self._closing.is_set():
                    self._lock_piece()
        except (CudaError, RuntimeError) as error:
            self.refusal = first_line(error)
            _log.warning(
                "%d of %d slots (%.2f GB) of the host arena could not be page-locked (%s): copies of them go through "
                "a small buffer and are slower; raise the limit of locked memory (ulimit -l, or the container's)",
                self._slot_count - self.locked_slots,
                self._slot_count,
                (self._slot_count - self.locked_slots) * self._slots.row_bytes / 1e9,
                self.refusal,
            )
        finally:
            self.finished.set()

    def stop(self) -> None:
        """Lock no further piece."""
        self._closing.set()

    def close(self, unlock: bool = True) -> None:
        """Stop locking, and unlock unless the device is lost. Waits for `run` to end."""
        self.stop()
        self.finished.wait()
        pieces, self._pieces, self.locked_slots = self._pieces, [], 0
        if not unlock:
            return
        with self._device.active():
            for address in pieces:
                try:
                    self._driver.unlock_pages(address)
                except CudaError as error:
                    _log.warning("unlocking the host arena: %s", error)
                    if error.lost:
                        return

    def _lock_piece(self) -> None:
        first = self.locked_slots
        count = min(self._piece_slots, self._slot_count - first)
        address = self._slots.address + first * self._slots.row_bytes
        with self._turns.turn(self._closing) if self._turns is not None else contextlib.nullcontext():
            if self._closing.is_set():
                return
            self._driver.lock_pages(address, count * self._slots.row_bytes)
        self._pieces.append(address)
        self.locked_slots = first + count
