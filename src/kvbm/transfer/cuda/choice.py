"""Which way each copy takes.

| copy | way |
| --- | --- |
| loads of at least 16 pieces, all under 28 KiB and multiples of 8 bytes | `kernel`, if Triton can compile it |
| all others, from CUDA 12.8 on | `batch` |
| all others | `rows` |

Source: the tuning of vLLM 0.32 on an H100 (`vllm.v1.kv_offload.cpu`: `gpu_worker._select_swap_blocks_fn`,
`swap_blocks_triton`). Stores never take the kernel: copy engines are faster there, and leave all compute units to the
step beside them. `batch` takes the least time of the interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvbm.errors import KvbmError, SettingsError
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.device import Device, Stream
from kvbm.transfer.cuda.driver import Driver
from kvbm.transfer.cuda.engines import BatchCopy, RowsCopy
from kvbm.transfer.cuda.pieces import Pieces, SlotRows

_log = logging.getLogger(__name__)

AUTO, BATCH, ROWS, KERNEL = "auto", "batch", "rows", "kernel"

KERNEL_PIECE_BYTES = 28 << 10
"""Pieces of loads by the kernel are smaller. vLLM's `THRESHOLD_BYTES`."""
KERNEL_PIECES_MIN = 16
"""Fewest pieces of a load by the kernel, over all its blocks. vLLM's `MIN_N`."""
KERNEL_ALIGNMENT = 8
"""Addresses and sizes of pieces of loads by the kernel are multiples of so many bytes. vLLM's `s % 8`."""


class Method(Protocol):
    """One way to begin copies; see the classes for each."""

    name: str

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        """Begin copying the pieces of all pairs on that stream; `pieces` are of a layout that it was made for.

        Raises KvbmError or RuntimeError; the caller waits for the stream then.
        """


class Choice(NamedTuple):
    """The copy engines' way, and the kernel for loads of many pieces where it is used; with `kernel_only` for all."""

    engines: Method
    kernel: Method | None = None
    kernel_only: bool = False

    def choose_method(self, piece_count: int, *, to_device: bool) -> Method:
        """The way for a copy of so many pieces, over all its blocks."""
        many = to_device and piece_count >= KERNEL_PIECES_MIN
        return self.kernel if self.kernel is not None and (many or self.kernel_only) else self.engines

    def __str__(self) -> str:
        store, load = (
            self.choose_method(KERNEL_PIECES_MIN, to_device=to_device) for to_device in (False, True)
        )
        return f"stores by {store.name}, loads by {load.name}"


def list_methods(driver: Driver, device: Device) -> list[str]:
    """The ways of copying that this driver and installation have."""
    names = [BATCH, ROWS] if driver.has_batch else [ROWS]
    if driver.can_use_host_pointers(device.index):
        try:
            import kvbm.transfer.cuda.kernel  # noqa: F401
        except ImportError as error:
            _log.info("copies by the kernel are not offered: %s", error)
        else:
            names.append(KERNEL)
    return names


def choose_methods(
    name: str, driver: Driver, device: Device, layouts: Sequence[Pieces], slots: SlotRows, stream: Stream
) -> Choice:
    """The ways of copying these layouts: by the rule, or always the one of that name.

    All that Triton may have to compile is compiled. Raises SettingsError for a way that is not offered here, KvbmError
    where the kernel is named and cannot be used.
    """
    names = list_methods(driver, device)
    if name not in (AUTO, *names):
        from kvbm.settings import variable  # here, because copies are measured where only torch is installed

        accepted = f"{AUTO}, {', '.join(names)} (offered by this driver and installation)"
        raise SettingsError(variable("cuda_copy"), name, accepted)
    if BATCH in names and name != ROWS:
        engines: Method = BatchCopy(driver)
    else:
        engines = RowsCopy(driver, device.index, layouts)
    if name == KERNEL or (name == AUTO and KERNEL in names and _is_for_kernel(layouts)):
        try:
            return Choice(engines, _make_kernel(name, driver, device, layouts, slots, stream), name == KERNEL)
        except KvbmError as error:
            if name == KERNEL:
                raise
            _log.warning("loads of small pieces go by %s, which is slower: %s", engines.name, error)
    return Choice(engines)


def _is_for_kernel(layouts: Sequence[Pieces]) -> bool:
    """Whether the pieces are those that the kernel copies faster than copy engines."""
    return all(
        pieces.largest < KERNEL_PIECE_BYTES and pieces.alignment >= KERNEL_ALIGNMENT for pieces in layouts
    )


def _make_kernel(
    name: str, driver: Driver, device: Device, layouts: Sequence[Pieces], slots: SlotRows, stream: Stream
) -> Method:
    from kvbm.transfer.cuda.kernel import KernelCopy  # here, because Triton need not be installed

    kernel = KernelCopy(driver, device, layouts, slots, stream)
    for to_device in (True, False) if name == KERNEL else (True,):
        kernel.compile(to_device=to_device, stream=stream)
    return kernel
