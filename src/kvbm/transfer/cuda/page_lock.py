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
import math
import threading

from kvbm import pages
from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError
from kvbm.transfer.cuda.device import Device, first_line
from kvbm.transfer.cuda.driver import CudaError, Driver
from kvbm.transfer.cuda.lock_turns import LockTurns
from kvbm.transfer.cuda.pieces import SlotRows

_log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Locked in one call; other calls into the driver wait that long at most."""

RETRY_S = (10.0, 30.0, 60.0, 120.0, 300.0)
"""Pauses after a refusal that may pass; the refusal after the last one is final."""

_OUT_OF_MEMORY, _ALREADY, _NOT_PERMITTED, _NOT_SUPPORTED = 2, 712, 800, 801
_MEANINGS = {
    _OUT_OF_MEMORY: "the machine, or the container, may have no memory left for it (a locked page counts in full), "
    "the device none for the tables that map it, or the IOMMU no addresses",
    _ALREADY: "another library of this process has locked some of it",
    _NOT_PERMITTED: "this driver does not let this process lock memory, as under WSL2 and on some virtual GPUs",
    _NOT_SUPPORTED: "this driver cannot lock memory that processes share, as under WSL2 and on some virtual GPUs",
}
"""Results of `cuMemHostRegister` (`cuda.h`). The limit of `ulimit -l` is none of the reasons: the driver pins pages
without counting them there."""
_UNUSABLE = "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0, as under WSL2"


class PageLocks:
    """The page locks of `slot_count` slots. `locked_slots` of them, from the first on, are locked by now.

    `run` belongs to one thread of the caller's, and waits for `begin`; `close` may be called from another one, once.
    With `turns` pieces are locked while no other process of the node locks any.
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
        # A copy may not reach from one locked piece into the next, and no page may be locked twice: so pieces meet
        # where a slot ends with a page.
        page_bytes = pages.MEMORY_PAGE_BYTES
        slots_to_page_end = page_bytes // math.gcd(slots.row_bytes, page_bytes)
        self._piece_slots = slots_to_page_end * max(1, PIECE_BYTES // (slots.row_bytes * slots_to_page_end))
        self._clock = clock
        self._begun = threading.Event()
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._pieces: list[int] = []
        self.locked_slots = 0
        self.refusal = ""
        self.settled = threading.Event()
        """All slots are locked, or the driver has refused."""

    def begin(self) -> None:
        """The engine runs: pages may be locked from now on."""
        self._begun.set()

    def run(self) -> None:
        """Lock all that can be locked; returns early when `close` was called."""
        self._begun.wait()
        try:
            self._lock_all()
        finally:
            self.settled.set()
            self._ended.set()

    def stop(self) -> None:
        """Lock no further piece; `run` ends."""
        self._closing.set()
        self._begun.set()

    def close(self, unlock: bool = True) -> None:
        """Stop locking, and unlock unless the device is lost. Waits for `run` to end."""
        self.stop()
        self._ended.wait()
        locked, self._pieces, self.locked_slots = self._pieces, [], 0
        if not unlock:
            return
        with self._device.active():
            for address in locked:
                try:
                    self._driver.unlock_pages(address)
                except CudaError as error:
                    _log.warning("unlocking the host arena: %s", error)
                    if error.lost:
                        return

    def _lock_all(self) -> None:
        for pause_s in (*RETRY_S, 0.0):
            try:
                with self._device.active():
                    self._lock_pieces()
                return
            except (KvbmError, RuntimeError) as error:
                result = getattr(error, "result", 0)
                wait_s = pause_s if result == _OUT_OF_MEMORY else 0.0
                self._log_refusal(error, result, wait_s)
            self.settled.set()
            if not wait_s or self._closing.wait(wait_s):
                return

    def _lock_pieces(self) -> None:
        """Lock what is not locked yet, up to the first refusal."""
        if self._closing.is_set():
            return
        self._driver.adopt_thread(self._device.index)
        if not self._driver.can_use_host_pointers(self._device.index):
            raise KvbmError(_UNUSABLE)
        while self.locked_slots < self._slot_count and not self._closing.is_set():
            self._lock_piece()
        if self.refusal and self.locked_slots == self._slot_count:
            _log.info("all %d slots of the host arena are page-locked now", self._slot_count)

    def _lock_piece(self) -> None:
        first = self.locked_slots
        count = min(self._piece_slots, self._slot_count - first)
        address, size = self._slots.address + first * self._slots.row_bytes, count * self._slots.row_bytes
        # Where the kernel cannot, locking brings the pages forth.
        pages.populate_at(address, size)
        with self._turns.turn(self._closing) if self._turns is not None else contextlib.nullcontext():
            if self._closing.is_set():
                return
            began_s = self._clock()
            self._driver.lock_pages(address, size)
            took_s = self._clock() - began_s
            self._pieces.append(address)
            self.locked_slots = first + count
            self._closing.wait(took_s)

    def _log_refusal(self, error: Exception, result: int, retry_s: float) -> None:
        """A warning for the first refusal, and for the final one (`retry_s` is 0)."""
        first, self.refusal = not self.refusal, first_line(error)
        if not first and retry_s:
            return
        left = self._slot_count - self.locked_slots
        meaning = _MEANINGS.get(result, "")
        again = (
            f"at most {len(RETRY_S)} more tries follow within {sum(RETRY_S) / 60:.0f} minutes"
            if retry_s
            else ""
        )
        _log.warning(
            "%d of %d slots (%.2f GB) of the host arena could not be page-locked (%s): copies of them go through "
            "a small buffer and are slower%s",
            left,
            self._slot_count,
            left * self._slots.row_bytes / 1e9,
            self.refusal,
            "".join(f"; {part}" for part in (meaning, again) if part),
        )
