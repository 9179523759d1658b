"""Copies by a kernel that reads and writes page-locked host memory itself: for pieces too small for copy engines.

A copy engine takes about as long to start on 4 KiB as on 64 KiB. A kernel has thousands of small accesses under way
at once instead, at the price of a few of the device's processors while it runs. `PROGRAMS` keeps that price small:
so many programs share all work, however much there is.

Triton compiles it at first use; `TRITON_INTERPRET=1` runs it on a CPU, which is how it is tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvbm.errors import KvbmError
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda.device import first_line
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, common_alignment

PROGRAMS = 64
"""Each moves `CHUNK_BYTES` at a time, so that 512 KiB are under way: several times the need of a full link."""

CHUNK_BYTES = 8192
WARPS = 4
_WORDS: dict[int, Any] = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["pair_count", "piece_count"])  # type: ignore[untyped-decorator]
def copy_pieces(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    pairs,  # int64 [pair_count, 2]: block, address of the slot's first byte
    table,  # int64 [pieces, 3]: address in block 0, bytes from block to block, offset in the slot
    pair_count,
    piece_count,
    TO_DEVICE: tl.constexpr,  # noqa: N803
    PIECE_BYTES: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
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
        origin = tl.load(table + 3 * piece)
        stride = tl.load(table + 3 * piece + 1)
        offset = tl.load(table + 3 * piece + 2)
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
    """`copy_pieces`, with each layout's tables kept on the device. `device` may be the CPU under the interpreter."""

    name = "kernel"

    def __init__(self, device: torch.device, programs: int = PROGRAMS) -> None:
        self._device = device
        self._programs = programs
        self._tables: dict[int, tuple[Pieces, list[_Table]]] = {}  # by identity, which the entry keeps alive

    def begin(self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: int) -> None:
        """Begin the copies on torch's current stream, which must be the one of that handle."""
        del stream  # Triton launches on the current one
        if id(pieces) not in self._tables:
            self._tables[id(pieces)] = pieces, _tables(pieces, self._device)
        placed = [(block, slots.address + slot * slots.row_bytes) for block, slot in pairs]
        on_device = _sent(torch.tensor(placed, dtype=torch.int64), self._device)
        alignment = common_alignment(pieces.alignment, slots.address, slots.row_bytes)
        try:
            for table in self._tables[id(pieces)][1]:
                table.launch(on_device, len(placed), self._programs, alignment, to_device=to_device)
        except (RuntimeError, AssertionError):
            raise
        except Exception as error:
            # Compilers fail in many ways; callers expect only those that copies have.
            raise KvbmError(f"starting the copy kernel: {first_line(error)}") from error


class _Table:
    """The pieces of one size: `rows` is int64 `[pieces, 3]`, see `copy_pieces`."""

    def __init__(self, rows: torch.Tensor, piece_bytes: int) -> None:
        self._rows = rows
        self._piece_bytes = piece_bytes

    def launch(
        self, pairs: torch.Tensor, pair_count: int, programs: int, alignment: int, *, to_device: bool
    ) -> None:
        word_bytes = min(alignment, 8)
        words = self._piece_bytes // word_bytes
        chunk = min(CHUNK_BYTES // word_bytes, triton.next_power_of_2(words))
        units = pair_count * len(self._rows) * triton.cdiv(words, chunk)
        copy_pieces[(min(programs, units),)](
            pairs,
            self._rows,
            pair_count,
            len(self._rows),
            TO_DEVICE=to_device,
            PIECE_BYTES=self._piece_bytes,
            CHUNK=chunk,
            WORD=_WORDS[word_bytes],
            WORD_BYTES=word_bytes,
            ALIGNMENT=alignment,
            num_warps=WARPS,
        )


def _tables(pieces: Pieces, device: torch.device) -> list[_Table]:
    """One table per size of piece: a kernel is compiled for a size."""
    tables = []
    for size in sorted(set(pieces.size.tolist())):
        chosen = pieces.size == size
        columns = (pieces.device[chosen], pieces.block_stride[chosen], pieces.slot_offset[chosen])
        rows = torch.stack([torch.from_numpy(column.astype("int64")) for column in columns], dim=1)
        tables.append(_Table(rows.contiguous().to(device), size))
    return tables


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small table on the device, sent ahead of the kernel on the same stream without waiting for it."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
