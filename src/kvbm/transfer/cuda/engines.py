"""Copies by the device's copy engines: they cost the running kernels nothing, and like large pieces.

Two ways to ask for the same copies: one call for thousands of pieces (a driver of CUDA 12.8 or later), and one call for
every run of pieces at a constant distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.device import Stream
from kvbm.transfer.cuda.driver import BATCH_PIECES_MAX, Driver
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, batches_of


class BatchCopy:
    """`cuMemcpyBatchAsync`: as many pieces of all pairs in one call as it may take."""

    name = "batch"

    def __init__(self, driver: Driver) -> None:
        assert driver.has_batch, driver.version
        self._driver = driver

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        """Begin the copies on the stream. Raises CudaError; those of earlier calls are begun then."""
        for batch in batches_of(pieces, pairs, slots, BATCH_PIECES_MAX):
            targets, sources = (batch.device, batch.host) if to_device else (batch.host, batch.device)
            # The source of a load is page-locked host memory that holds its content when the load is begun, and that
            # no work of the device still writes: a slot is loaded after its store is over, and the staging rows are
            # filled before, and refilled after the stream was waited for. The source of a store is what the engine's
            # stream may be writing yet: only the stream's order says when it may be read.
            self._driver.copy_batch(targets, sources, batch.size, stream.handle, read_early=to_device)


class _Comb(NamedTuple):
    """`teeth` pieces of a block from `first` on, `pitch` bytes apart on the device, side by side in the slot."""

    first: int
    teeth: int
    pitch: int
    width: int


class RowsCopy:
    """`cuMemcpy2DAsync` for every comb of pieces: with all layers in one allocation that is one call per block."""

    name = "rows"

    def __init__(self, driver: Driver, device: int, layouts: Sequence[Pieces]) -> None:
        self._driver = driver
        pitch_max = driver.pitch_max(device)
        # By identity, which the entry keeps alive.
        self._combs = {id(pieces): (pieces, _combs(pieces, pitch_max)) for pieces in layouts}

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        """Begin the copies on the stream. Raises CudaError."""
        combs = self._combs[id(pieces)][1]
        copy = self._driver.copy_rows
        device, stride = pieces.device.tolist(), pieces.block_stride.tolist()
        offset = pieces.slot_offset.tolist()
        for block, slot in pairs:
            row = slots.address + slot * slots.row_bytes
            for first, teeth, pitch, width in combs:
                on_device, on_host = device[first] + block * stride[first], row + offset[first]
                if to_device:
                    copy(on_device, pitch, on_host, width, width, teeth, stream.handle)
                else:
                    copy(on_host, width, on_device, pitch, width, teeth, stream.handle)


def _combs(pieces: Pieces, pitch_max: int) -> list[_Comb]:
    """Cut a block's pieces into the longest combs that one copy can take."""
    sizes, device = pieces.size.tolist(), pieces.device.tolist()
    combs: list[_Comb] = []
    # Regions may lie in allocations of their own, which no copy may cross, even where they are neighbours. In the
    # slot all pieces lie side by side.
    same_region = np.diff(pieces.region.astype(np.int64)) == 0
    for index, (start, width) in enumerate(zip(device, sizes, strict=True)):
        if combs:
            first, teeth, pitch, comb_width = combs[-1]
            step = start - device[index - 1]
            fits = same_region[index - 1] and width == comb_width and width <= step <= pitch_max
            if fits and (teeth == 1 or step == pitch):
                combs[-1] = _Comb(first, teeth + 1, step, width)
                continue
        combs.append(_Comb(index, 1, width, width))
    return combs
