"""Page-locking the host arena bit by bit, once the engine runs.

Locking gigabytes takes seconds. The driver holds its own locks meanwhile, which a step that launches kernels waits
for, and so does a capture of a graph. So it begins with the first copy, and goes on in small pieces, in slot order: a
thread has the kernel bring forth a piece's pages, outside of the driver's locks, locks them, and leaves the driver to
others for at least as long as that took. Slots behind the last locked piece are copied through a small buffer until it
has got there, or for good where the driver refuses.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from mmap import PAGESIZE

from kvbm.clock import Clock, monotonic
from kvbm.pages import populate_at
from kvbm.transfer.cuda.device import Device, first_line
from kvbm.transfer.cuda.driver import CudaError, Driver
from kvbm.transfer.cuda.lock_turns import LockTurns
from kvbm.transfer.cuda.pieces import SlotRows

_log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Locked in one call; other calls into the driver wait that long at most."""

_OUT_OF_MEMORY, _ALREADY, _NOT_PERMITTED, _NOT_SUPPORTED = 2, 712, 800, 801
_MEANINGS = {
    _OUT_OF_MEMORY: "the machine, or the container, has no memory left for it: a locked page counts in full",
    _ALREADY: "another library of this process has locked some of it",
    _NOT_PERMITTED: "this driver does not let this process lock memory, as under WSL2 and on some virtual GPUs",
    _NOT_SUPPORTED: "this driver cannot lock memory that processes share, as under WSL2 and on some virtual GPUs",
}
"""Results of `cuMemHostRegister` (`cuda.h`). The limit of `ulimit -l` is none of the reasons: the driver pins pages
without counting them there."""


class PageLocks:
    """The page locks of `slot_count` slots. `locked_slots` of them, from the first on, are locked by now.

    `run` belongs to one thread of the caller's, and waits for `begin`; `close` may be called from another one, once.
    With `turns` pieces are locked when no other process locks any of the same memory.
    """

    def __init__(
        self,
        slots: SlotRows,
        slot_count: int,
        driver: Driver,
        device: Device,
        turns: LockTurns | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._slots = slots
        self._slot_count = slot_count
        self._driver = driver
        self._device = device
        self._turns = turns
        self._piece_slots = max(1, PIECE_BYTES // slots.row_bytes)
        self._clock = clock
        self._begun = threading.Event()
        self._closing = threading.Event()
        self._pieces: list[int] = []
        self.locked_slots = 0
        self.refusal = ""
        self.finished = threading.Event()

    def begin(self) -> None:
        """The engine runs: pages may be locked from now on."""
        self._begun.set()

    def wait_for_begin(self) -> bool:
        """Wait until the engine runs; False where it never will."""
        self._begun.wait()
        return not self._closing.is_set()

    def run(self) -> None:
        """Lock all that can be locked; returns early when `close` was called."""
        self._begun.wait()
        try:
            with self._device.active():
                while self.locked_slots < self._slot_count and not self._closing.is_set():
                    self._lock_piece()
        except (CudaError, RuntimeError) as error:
            self.refusal = first_line(error)
            _log.warning(
                "%d of %d slots (%.2f GB) of the host arena could not be page-locked (%s): copies of them go through "
                "a small buffer and are slower%s",
                self._slot_count - self.locked_slots,
                self._slot_count,
                (self._slot_count - self.locked_slots) * self._slots.row_bytes / 1e9,
                self.refusal,
                f"; {meaning}" if (meaning := _MEANINGS.get(getattr(error, "result", 0), "")) else "",
            )
        finally:
            self.finished.set()

    def stop(self) -> None:
        """Lock no further piece."""
        self._closing.set()
        self._begun.set()

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
            # Whole pages alone; what is left of others, and where the kernel cannot, locking brings forth.
            begun = -(-address // PAGESIZE) * PAGESIZE
            end = (address + count * self._slots.row_bytes) // PAGESIZE * PAGESIZE
            if end > begun:
                populate_at(begun, end - begun)
            began_s = self._clock()
            self._driver.lock_pages(address, count * self._slots.row_bytes)
            took_s = self._clock() - began_s
        self._pieces.append(address)
        self.locked_slots = first + count
        self._closing.wait(took_s)
