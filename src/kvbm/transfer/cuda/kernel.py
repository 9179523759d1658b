"""Copies by a kernel that reads and writes page-locked host memory itself: for pieces too small for copy engines.

A copy engine takes about as long to start on 4 KiB as on 64 KiB. A kernel has thousands of small accesses under way
at once instead, at the price of a few of the device's processors while it runs. `PROGRAMS` keeps that price small:
so many programs share all work, however much there is.

Nothing is allocated when a copy is begun: tables of where pieces lie are on the device before the first copy, and the
pairs of a copy get there on the copy's own stream, through a ring of page-locked memory.

Triton compiles it for each size of piece and direction. vLLM watches compilers once it has warmed up
(`vllm.utils.jit_monitor`), and logs or raises for each later one, so all are compiled before the first copy.
`TRITON_INTERPRET=1` runs the kernel on a CPU, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvbm.errors import KvbmError
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.device import Device, Stream, first_line
from kvbm.transfer.cuda.driver import Driver
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, common_alignment

PROGRAMS = 16
"""vLLM 0.32's own tuning, of a kernel that moves as much at a time, is 12 on an H100 for pieces of 8 to 32 KiB. Smaller
ones leave each program less under way, so it is a few more here."""

CHUNK_BYTES = 8192
"""A program moves that much at a time, or a piece where that is less."""
WARPS = 4

PLACES = 128
"""Launches whose pairs may be on their way or in use: the layers of a deep model, begun at once. One more waits."""
PLACE_PAIRS = 512
"""Blocks that one launch copies at most. The ring takes 1 MiB of page-locked and as much device memory."""

_WORDS: dict[int, Any] = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_ROW_WORDS = 4
"""Words of a table's row, one of them unused: Triton compiles anew for a table that is aligned otherwise, and so all of
them lie at multiples of 32 bytes."""


@triton.jit(do_not_specialize=["pair_count", "piece_count"])  # type: ignore[untyped-decorator]
def copy_pieces(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    pairs,  # int64 [pair_count, 2]: block, address of the slot's first byte
    table,  # int64 [pieces, ROW_WORDS]: address in block 0, bytes from block to block, offset in the slot
    pair_count,
    piece_count,
    TO_DEVICE: tl.constexpr,  # noqa: N803
    PIECE_BYTES: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    ROW_WORDS: tl.constexpr,  # noqa: N803
):
    """Copy `pair_count × piece_count` pieces of `PIECE_BYTES`, each in chunks of up to `CHUNK` words."""
    words: tl.constexpr = PIECE_BYTES // WORD_BYTES
    chunks: tl.constexpr = (words + CHUNK - 1) // CHUNK
    within = tl.arange(0, CHUNK)
    units = pair_count * piece_count * chunks
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        chunk = unit % chunks
        piece = (unit // chunks) % piece_count
        pair = unit // (chunks * piece_count)
        block = tl.load(pairs + 2 * pair)
        slot = tl.load(pairs + 2 * pair + 1)
        origin = tl.load(table + ROW_WORDS * piece)
        stride = tl.load(table + ROW_WORDS * piece + 1)
        offset = tl.load(table + ROW_WORDS * piece + 2)
        start = chunk * (CHUNK * WORD_BYTES)
        on_device = tl.multiple_of((origin + block * stride + start).to(tl.pointer_type(WORD)), ALIGNMENT)
        on_host = tl.multiple_of((slot + offset + start).to(tl.pointer_type(WORD)), ALIGNMENT)
        if TO_DEVICE:
            source = on_host
            target = on_device
        else:
            source = on_device
            target = on_host
        if words % CHUNK == 0:
            tl.store(target + within, tl.load(source + within))
        else:
            inside = within < words - chunk * CHUNK
            tl.store(target + within, tl.load(source + within, mask=inside), mask=inside)


class KernelCopy:
    """`copy_pieces` between the blocks of `layouts` and `slots`, with the tables of all layouts on the device.

    That may be the CPU under the interpreter. Tables are sent on `stream`. Raises KvbmError without memory for them.
    """

    name = "kernel"

    def __init__(
        self, driver: Driver, device: Device, layouts: Sequence[Pieces], slots: SlotRows, stream: Stream
    ) -> None:
        self._slots = slots
        # One alignment for all layouts: each further one would be compiled too.
        self._alignment = common_alignment(
            slots.address, slots.row_bytes, *(pieces.alignment for pieces in layouts)
        )
        rows = [_rows_by_size(pieces) for pieces in layouts]
        table = np.concatenate([part for one in rows for part in one.values()])
        try:
            self._ring = _Ring(driver, device)
            self._host, self._memory = device.pinned(1, table.nbytes), device.scratch(table.nbytes)
            # It may have been the engine's a moment ago, with work under way that still uses it.
            stream.wait(device.mark())
            self._host.numpy()[0] = table.reshape(-1).view(np.uint8)
            driver.copy(self._memory.data_ptr(), self._host.data_ptr(), table.nbytes, stream.handle)
            self._sent = stream.record()
        except RuntimeError as error:
            raise KvbmError(f"memory for the copy kernel's tables: {first_line(error)}") from error
        on_device = self._memory.view(torch.int64).view(-1, _ROW_WORDS)
        self._tables: dict[int, tuple[Pieces, list[_Table]]] = {}  # by identity, which the entry keeps alive
        first = 0
        for pieces, by_size in zip(layouts, rows, strict=True):
            tables = []
            for size, part in by_size.items():
                tables.append(_Table(on_device[first : first + len(part)], size))
                first += len(part)
            self._tables[id(pieces)] = pieces, tables

    def compile(self, *, to_device: bool, stream: Stream) -> None:
        """Have Triton compile and load all that copies in this direction launch. Raises KvbmError where it cannot."""
        by_size = {table.piece_bytes: table for _, tables in self._tables.values() for table in tables}
        try:
            # A launch that copies nothing does all that is done once.
            stream.run(partial(self._launch, list(by_size.values()), self._ring.place, 0, to_device))
        except AssertionError:
            raise
        except Exception as error:  # compilers fail in many ways
            raise KvbmError(f"compiling the copy kernel: {first_line(error)}") from error

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        """Begin the copies on the stream. Raises KvbmError or RuntimeError; some of them may be begun then."""
        assert slots == self._slots, (slots, self._slots)
        tables = self._tables[id(pieces)][1]
        stream.wait(self._sent)
        for first in range(0, len(pairs), PLACE_PAIRS):
            some = pairs[first : first + PLACE_PAIRS]
            place = self._ring.send(some, slots, stream)
            try:
                stream.run(partial(self._launch, tables, place, len(some), to_device))
            finally:
                self._ring.used(stream)

    def _launch(self, tables: list[_Table], pairs: torch.Tensor, pair_count: int, to_device: bool) -> None:
        """Start the kernel on torch's current stream, for each size of piece."""
        for table in tables:
            table.launch(pairs, pair_count, self._alignment, to_device=to_device)


class _Table:
    """The pieces of one size: `rows` is int64 `[pieces, _ROW_WORDS]` on the device, see `copy_pieces`."""

    def __init__(self, rows: torch.Tensor, piece_bytes: int) -> None:
        self._rows = rows
        self.piece_bytes = piece_bytes

    def launch(self, pairs: torch.Tensor, pair_count: int, alignment: int, *, to_device: bool) -> None:
        word_bytes = min(alignment, 8)
        words = self.piece_bytes // word_bytes
        chunk = min(CHUNK_BYTES // word_bytes, triton.next_power_of_2(words))
        units = pair_count * len(self._rows) * triton.cdiv(words, chunk)
        copy_pieces[(max(1, min(PROGRAMS, units)),)](
            pairs,
            self._rows,
            pair_count,
            len(self._rows),
            TO_DEVICE=to_device,
            PIECE_BYTES=self.piece_bytes,
            CHUNK=chunk,
            WORD=_WORDS[word_bytes],
            WORD_BYTES=word_bytes,
            ALIGNMENT=alignment,
            ROW_WORDS=_ROW_WORDS,
            num_warps=WARPS,
        )


class _Ring:
    """Places for the pairs of launches: page-locked rows that the host writes, and device rows that the kernel reads.

    A place is used again when the launch that read it is over, on whatever stream it was.
    """

    def __init__(self, driver: Driver, device: Device) -> None:
        place_bytes = PLACE_PAIRS * 2 * 8
        self._driver = driver
        self._host = device.pinned(PLACES, place_bytes)
        self._memory = device.scratch(PLACES * place_bytes)
        self._written = self._host.numpy().view(np.int64).reshape(PLACES, PLACE_PAIRS, 2)
        self._read = self._memory.view(torch.int64).view(PLACES, PLACE_PAIRS, 2)
        self._over: list[Any] = [None] * PLACES
        self._place = 0

    @property
    def place(self) -> torch.Tensor:
        """int64 `[PLACE_PAIRS, 2]` on the device: where the next pairs go."""
        return self._read[self._place]

    def send(self, pairs: Pairs, slots: SlotRows, stream: Stream) -> torch.Tensor:
        """`place`, see `copy_pieces`; later work of the stream finds `pairs` in front.

        Waits, asleep, where all places are in use. Call `used` next, whatever happened to the launch.
        """
        if (over := self._over[self._place]) is not None:
            over.synchronize()
        rows = self._written[self._place]
        rows[: len(pairs)] = pairs
        rows[: len(pairs), 1] = slots.address + rows[: len(pairs), 1] * slots.row_bytes
        host, place = self._host[self._place], self.place
        self._driver.copy(place.data_ptr(), host.data_ptr(), len(pairs) * 16, stream.handle)
        return place

    def used(self, stream: Stream) -> None:
        """The work on that stream up to now is all that reads the place which was sent last."""
        self._over[self._place] = stream.record()
        self._place = (self._place + 1) % PLACES


def _rows_by_size(pieces: Pieces) -> dict[int, npt.NDArray[np.int64]]:
    """The rows of a layout's tables, by the size of the pieces: a kernel is compiled for a size."""
    rows = np.zeros((len(pieces.size), _ROW_WORDS), dtype=np.int64)
    for column, values in enumerate((pieces.device, pieces.block_stride, pieces.slot_offset)):
        rows[:, column] = values
    return {size: rows[pieces.size == size] for size in sorted(set(pieces.size.tolist()))}
