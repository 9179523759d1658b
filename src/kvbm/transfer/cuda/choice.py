"""Which way of copying a layout gets on this device: measured where it will run, or named by the user.

Whether copy engines or the kernel are faster depends on the size of the pieces, the direction, the card, the link and
the driver. All ways copy the same few megabytes a few times, beside the engine's start, and the table goes to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.errors import SettingsError
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.device import LOAD_PRIORITY, Device, first_line
from kvbm.transfer.cuda.driver import Addresses, CudaError, Driver
from kvbm.transfer.cuda.engines import BatchCopy, EachCopy, RowsCopy
from kvbm.transfer.cuda.pieces import Pieces, SlotRows

_log = logging.getLogger(__name__)

AUTO = "auto"
METHODS = ("batch", "rows", "each", "kernel")

SAMPLE_BYTES = 16 << 20
SAMPLE_BLOCKS_MAX = 64
ROUNDS = 3
COPIES_A_ROUND = 4
"""One behind the other: the earlier copies hide the cost of beginning the later ones, as in a long copy."""
KERNEL_LEAD = 1.05
"""So much faster must the kernel be than the copy engines: it takes compute units from the step beside it."""
_GAP_BYTES = 64


class Method(Protocol):
    """One way to begin copies; see the classes for each."""

    name: str

    def begin(self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: int) -> None:
        """Begin copying the pieces of all pairs on that stream. Raises CudaError or RuntimeError."""


class Choice(NamedTuple):
    """The way to store and the way to load."""

    store: Method
    load: Method


class Measured(NamedTuple):
    """One line of the table: a method's bytes per second in both directions."""

    method: Method
    store_bytes_per_s: float
    load_bytes_per_s: float


def methods(driver: Driver, device: Device) -> dict[str, Method]:
    """The ways that this driver and installation offer, most general first."""
    offered: dict[str, Method] = {}
    if driver.has_batch:
        offered["batch"] = BatchCopy(driver)
    else:
        version = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
        _log.info("the driver is of CUDA %s: copies in batches need 12.8, others are used", version)
    offered["rows"] = RowsCopy(driver, device.index)
    offered["each"] = EachCopy(driver)
    if driver.reads_host_pointers(device.index):
        try:
            from kvbm.transfer.cuda.kernel import KernelCopy
        except ImportError as error:
            _log.info("copies by a kernel are not offered: %s", error)
        else:
            offered["kernel"] = KernelCopy(device.torch_device)
    return offered


def named(name: str, offered: Mapping[str, Method]) -> Choice:
    """The way that the user forces, for both directions. Raises SettingsError where this machine lacks it."""
    method = offered.get(name)
    if method is None:
        from kvbm.settings import variable  # here, because copies are measured where only torch is installed

        accepted = f"{AUTO}, {', '.join(offered)} (what this driver and installation offer)"
        raise SettingsError(variable("cuda_copy"), name, accepted)
    return Choice(method, method)


def unmeasured(offered: Mapping[str, Method]) -> Choice:
    """The method until there is a measurement: the copy engines need no preparation."""
    method = offered.get("batch") or offered["rows"]
    return Choice(method, method)


def measure(pieces: Pieces, offered: Mapping[str, Method], device: Device) -> list[Measured]:
    """Time every method on scratch memory with pieces of these sizes; one that fails is left out and logged.

    Raises RuntimeError where the scratch memory cannot be had, CudaError for a lost device.
    """
    block_bytes = pieces.block_bytes
    blocks = max(1, min(SAMPLE_BLOCKS_MAX, SAMPLE_BYTES // block_bytes))
    places, extent = _spaced(pieces)
    memory, host = device.scratch(blocks * extent), device.pinned(blocks, block_bytes)
    sample = pieces._replace(
        device=places + np.uint64(memory.data_ptr()),
        block_stride=np.full_like(pieces.block_stride, extent),
    )
    slots = SlotRows(host.data_ptr(), block_bytes)
    pairs = [(index, index) for index in range(blocks)]
    stream = device.new_stream(LOAD_PRIORITY)
    # The scratch may have been the engine's a moment ago, with work under way that still uses it.
    stream.wait(device.mark())
    table = []
    for method in offered.values():

        def copy(to_device: bool, method: Method = method) -> float:
            def begin() -> None:
                for _ in range(COPIES_A_ROUND):
                    method.begin(sample, pairs, slots, to_device=to_device, stream=stream.handle)

            times = [device.seconds(stream, lambda: stream.run(begin)) for _ in range(ROUNDS + 1)]
            return COPIES_A_ROUND * blocks * block_bytes / min(times[1:])

        try:
            table.append(Measured(method, copy(False), copy(True)))
        except Exception as error:
            if isinstance(error, CudaError) and error.lost:
                raise
            # A compiler that is missing shows here in many ways; copies then go without that method.
            _log.warning("copies by %s are not used: %s", method.name, first_line(error))
            # Copies that it began before it failed must not outlive the scratch.
            stream.record().synchronize()
    return table


def _spaced(pieces: Pieces) -> tuple[Addresses, int]:
    """Places for a block's pieces in scratch memory, and the bytes that they take, gaps included.

    Pieces lie apart, and at a constant distance only where the real ones do: else a copy by rows would be one
    contiguous copy here, and many small ones there.
    """
    steps = np.diff(pieces.device.astype(np.int64))
    changes = np.cumsum(np.diff(steps, prepend=steps[:1]) != 0) % 2
    gaps = np.append(_GAP_BYTES * (1 + changes.astype(np.uint64)), np.uint64(_GAP_BYTES))
    ends = np.cumsum(pieces.size + gaps)
    return ends - pieces.size - gaps, int(ends[-1])


def best(table: Sequence[Measured], otherwise: Choice) -> Choice:
    """The fastest method for each direction; the kernel only where it is clearly so."""
    if not table:
        return otherwise
    handicap = {line.method.name: KERNEL_LEAD if line.method.name == "kernel" else 1.0 for line in table}
    return Choice(
        max(table, key=lambda line: line.store_bytes_per_s / handicap[line.method.name]).method,
        max(table, key=lambda line: line.load_bytes_per_s / handicap[line.method.name]).method,
    )


def describe(table: Sequence[Measured], pieces: Pieces) -> str:
    """The table in one line for the log."""
    lines = (
        f"{line.method.name} {line.store_bytes_per_s / 1e9:.1f}/{line.load_bytes_per_s / 1e9:.1f}"
        for line in table
    )
    return f"pieces from {pieces.smallest} bytes on, GB/s down/up: {', '.join(lines)}"
