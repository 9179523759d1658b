"""A block as the pieces that it is copied in: where each lies on the device, and where in the slot.

A piece is a run of bytes that is contiguous on both sides. Which pieces a block has depends on the layout alone, so
their table is made once; a batch of pairs is then three arrays of addresses, made by numpy without a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.driver import Addresses
from kvbm.transfer.device_cache import Region


class Pieces(NamedTuple):
    """All pieces of a block, `[pieces]` each, in slot order. Device addresses are those in block 0."""

    device: Addresses
    block_stride: Addresses
    slot_offset: Addresses
    size: Addresses
    region: Addresses
    """Which region each piece is of: different ones may lie in different allocations."""

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return int(self.size.max())

    @property
    def slot_span(self) -> slice:
        """The bytes of a slot from the first piece to the last."""
        return slice(int(self.slot_offset[0]), int(self.slot_offset[-1] + self.size[-1]))

    @property
    def alignment(self) -> int:
        """`common_alignment` of all addresses and sizes."""
        return common_alignment(int(np.bitwise_or.reduce(np.concatenate(self[:4]))))


class SlotRows(NamedTuple):
    """Host memory that holds slots, or stands for them: `address` of slot 0, and from one slot to the next."""

    address: int
    row_bytes: int


class Batch(NamedTuple):
    """The pieces of some pairs as `[pairs × pieces]` addresses, ready for the driver."""

    device: Addresses
    host: Addresses
    size: Addresses


def common_alignment(*places: int) -> int:
    """The largest power of two, up to 16, that every place is a multiple of."""
    bits = 16
    for place in places:
        bits |= place
    return bits & -bits


def pieces_of(regions: Iterable[Region]) -> Pieces:
    """The pieces of the blocks that `regions` describe."""
    device: list[Addresses] = []
    stride: list[Addresses] = []
    offset: list[Addresses] = []
    size: list[Addresses] = []
    owner: list[Addresses] = []
    for index, region in enumerate(regions):
        view = region.device
        word = view.element_size()
        run_bytes = view.shape[-1] * word
        starts = np.zeros(1, dtype=np.uint64)
        for axis in range(1, view.dim() - 1):
            steps = np.arange(view.shape[axis], dtype=np.uint64) * np.uint64(view.stride(axis) * word)
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        count = len(starts)
        device.append(starts + np.uint64(view.data_ptr()))
        stride.append(np.full(count, view.stride(0) * word, dtype=np.uint64))
        offset.append(_ramp(count, run_bytes) + np.uint64(region.slot_offset_bytes))
        size.append(np.full(count, run_bytes, dtype=np.uint64))
        owner.append(np.full(count, index, dtype=np.uint64))
    return Pieces(*(np.concatenate(column) for column in (device, stride, offset, size, owner)))


def batch_of(pieces: Pieces, pairs: Pairs, slots: SlotRows) -> Batch:
    """Every piece of every pair."""
    table: npt.NDArray[np.uint64] = np.array(pairs, dtype=np.uint64).reshape(-1, 2)
    device = pieces.device[None, :] + table[:, :1] * pieces.block_stride[None, :]
    rows = np.uint64(slots.address) + table[:, 1:] * np.uint64(slots.row_bytes)
    host = rows + pieces.slot_offset[None, :]
    size = np.broadcast_to(pieces.size, host.shape)
    return Batch(device.reshape(-1), host.reshape(-1), np.ascontiguousarray(size).reshape(-1))


def batches_of(pieces: Pieces, pairs: Pairs, slots: SlotRows, pieces_max: int) -> Iterator[Batch]:
    """The same in batches of at most `pieces_max` pieces; of two pieces of a pair the first comes no later."""
    pairs_each = max(1, pieces_max // len(pieces.size))
    for first in range(0, len(pairs), pairs_each):
        batch = batch_of(pieces, pairs[first : first + pairs_each], slots)
        for start in range(0, len(batch.size), pieces_max):
            yield Batch(*(column[start : start + pieces_max] for column in batch))


def _ramp(count: int, step: int) -> Addresses:
    return np.arange(count, dtype=np.uint64) * np.uint64(step)
