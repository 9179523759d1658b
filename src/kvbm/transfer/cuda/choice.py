"""Which way of copying a layout gets on this device: measured where it will run, or named by the user.

Which copy engines' way is fastest, and whether the kernel is faster for loads, depends on the size of the pieces, the
card, the link and the driver. All ways that may be chosen copy the same few megabytes a few times, once the engine
runs, and the table goes to the log. The kernel may be chosen for loads of small pieces alone: for stores and for large
pieces vLLM found copy engines to be faster, and they leave all compute units to the step beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.errors import KvbmError, SettingsError
from kvbm.strict import record_swallowed
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.device import LOAD_PRIORITY, Device, Stream, first_line
from kvbm.transfer.cuda.driver import Addresses, CudaError, Driver
from kvbm.transfer.cuda.engines import BatchCopy, EachCopy, RowsCopy
from kvbm.transfer.cuda.pieces import Pieces, SlotRows

_log = logging.getLogger(__name__)

AUTO = "auto"

SAMPLE_BYTES = 16 << 20
SAMPLE_BLOCKS_MAX = 64
ROUNDS = 3
COPIES_A_ROUND = 4
"""One behind the other: the earlier copies hide the cost of beginning the later ones, as in a long copy."""
KERNEL = "kernel"
ENGINE_LEAD = 1.05
"""So much faster must another way of asking the copy engines be than the first: two measurements of one way differ by
less."""
KERNEL_LEAD = 1.2
"""So much faster must the kernel be than the copy engines: it takes compute units from the step beside it, which the
measurement does not show, and which slows every request while a faster load helps one."""
KERNEL_PIECE_BYTES = 28 << 10
"""Pieces must be smaller for the kernel to be tried. vLLM 0.32's own tuning (`THRESHOLD_BYTES`, on an H100)."""
KERNEL_PIECES_MIN = 16
"""A load of fewer pieces, over all its blocks, goes by the copy engines: it is over before starting a kernel has paid.
vLLM 0.32's own tuning (`MIN_N`, of the pieces of one call)."""
_GAP_BYTES = 64


class Method(Protocol):
    """One way to begin copies; see the classes for each."""

    name: str

    def learn(self, layouts: Sequence[Pieces], stream: Stream) -> None:
        """Prepare for these pieces, once, before any of them is copied; `stream` may be used. Raises KvbmError."""

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        """Begin copying the pieces, which it has learned, of all pairs on that stream.

        Raises KvbmError or RuntimeError; the caller waits for the stream then.
        """


class Choice(NamedTuple):
    """The way to store, the way to load, and the way to load fewer than `KERNEL_PIECES_MIN` pieces."""

    store: Method
    load: Method
    load_few: Method

    def of(self, piece_count: int, *, to_device: bool) -> Method:
        """The way for a copy of so many pieces, over all its blocks."""
        if not to_device:
            return self.store
        return self.load if piece_count >= KERNEL_PIECES_MIN else self.load_few


class Measured(NamedTuple):
    """One line of the table: a method's bytes per second in both directions, None for one it cannot be chosen for."""

    method: Method
    store_bytes_per_s: float | None
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
            offered[KERNEL] = KernelCopy(driver, device)
    return offered


def everywhere(method: Method) -> Choice:
    """One way for all copies."""
    return Choice(method, method, method)


def named(name: str, offered: Mapping[str, Method]) -> Choice:
    """The way that the user forces, for both directions. Raises SettingsError where this machine lacks it."""
    method = offered.get(name)
    if method is None:
        from kvbm.settings import variable  # here, because copies are measured where only torch is installed

        accepted = f"{AUTO}, {', '.join(offered)} (what this driver and installation offer)"
        raise SettingsError(variable("cuda_copy"), name, accepted)
    return everywhere(method)


def candidates(offered: Mapping[str, Method], pieces: Pieces) -> dict[str, Method]:
    """Those of the ways offered that can be chosen for these pieces."""
    small = pieces.largest < KERNEL_PIECE_BYTES
    return {name: method for name, method in offered.items() if name != KERNEL or small}


def learned(offered: Mapping[str, Method], layouts: Sequence[Pieces], stream: Stream) -> dict[str, Method]:
    """Those of the ways offered that know the layouts now; one that fails is left out and logged."""
    able = {}
    for name, method in offered.items():
        try:
            method.learn(layouts, stream)
            able[name] = method
        except KvbmError as error:
            _not_used(method, error)
    return able


def unmeasured(offered: Mapping[str, Method]) -> Choice:
    """The method until there is a measurement: the copy engines need no preparation."""
    method = offered.get("batch") or offered["rows"]
    return everywhere(method)


def measure(pieces: Pieces, offered: Mapping[str, Method], device: Device) -> list[Measured]:
    """Time every method on scratch memory with pieces of these sizes; one that fails is left out and logged.

    The kernel is timed for loads alone: it is chosen for nothing else. Raises RuntimeError where the scratch memory
    cannot be had, CudaError for a lost device.
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
    moved = COPIES_A_ROUND * blocks * block_bytes
    times: dict[tuple[str, bool], list[float]] = {}
    able = dict(offered)
    # By turns: the engine's own traffic, which grows and falls meanwhile, meets all of them alike.
    for number in range(ROUNDS + 1):
        for name, method in list(able.items()):

            def begin(to_device: bool, method: Method = method) -> None:
                for _ in range(COPIES_A_ROUND):
                    method.begin(sample, pairs, slots, to_device=to_device, stream=stream)

            try:
                if number == 0:
                    method.learn([sample], stream)
                for to_device in _directions(name):
                    taken_s = device.seconds(stream, partial(begin, to_device))
                    if number:  # the first round pays for what is made once
                        times.setdefault((name, to_device), []).append(taken_s)
            except Exception as error:
                if isinstance(error, CudaError) and error.lost:
                    raise
                # A compiler that is missing shows here in many ways; copies then go without that method.
                record_swallowed(error)
                _not_used(method, error)
                del able[name]
                # Copies that it began before it failed must not outlive the scratch.
                stream.record().synchronize()

    def bytes_per_s(name: str, to_device: bool) -> float | None:
        taken_s = times.get((name, to_device))
        return moved / min(taken_s) if taken_s else None

    return [
        Measured(method, bytes_per_s(name, False), bytes_per_s(name, True) or 0.0)
        for name, method in able.items()
    ]


def _directions(name: str) -> tuple[bool, ...]:
    return (True,) if name == KERNEL else (False, True)


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
    """The copy engines asked in the first way, or in the one that is clearly faster, for each direction; the kernel for
    loads where it leads clearly."""
    engines = [line for line in table if line.method.name != KERNEL]
    if not engines:
        return otherwise
    store = _leading(engines, lambda line: line.store_bytes_per_s or 0.0)
    load = _leading(engines, lambda line: line.load_bytes_per_s)
    kernel = next((line for line in table if line.method.name == KERNEL), load)
    leads = kernel.load_bytes_per_s >= KERNEL_LEAD * load.load_bytes_per_s
    return Choice(store.method, kernel.method if leads else load.method, load.method)


def _leading(lines: Sequence[Measured], speed: Callable[[Measured], float]) -> Measured:
    """The fastest, if it leads the first one by more than measurements differ."""
    fastest = max(lines, key=speed)
    return fastest if speed(fastest) >= ENGINE_LEAD * speed(lines[0]) else lines[0]


def describe(table: Sequence[Measured], pieces: Pieces) -> str:
    """The table in one line for the log."""
    lines = (
        f"{line.method.name} {_gigabytes(line.store_bytes_per_s)}/{_gigabytes(line.load_bytes_per_s)}"
        for line in table
    )
    return f"pieces from {pieces.smallest} bytes on, GB/s down/up: {', '.join(lines)}"


def _gigabytes(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f}"


def _not_used(method: Method, error: Exception) -> None:
    _log.warning("copies by %s are not used: %s", method.name, first_line(error))
