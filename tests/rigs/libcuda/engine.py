"""An engine that computes on a stream of its own on the stand-in for a device, and checks what it reads.

It writes and reads blocks in the order of its stream, as a scheduler does that is ahead of the device by two steps.
Every block's content is one of `PATTERNS` random ones, and what a read found is compared with it when all is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvbm.testing.kv_views import SIZES, Views, separate, stacked
from rigs.libcuda.library import Libcuda
from rigs.libcuda.torch_cuda import Event, Stream

BLOCKS = 24
PATTERNS = 64
STEPS_AHEAD = 2
ROW_BYTES = SIZES["C"]
LAYOUTS = ("LBNHC", "BLNHC", "LHBNC", "separate")

Addresses = npt.NDArray[np.uint64]


def make_views(layout: str) -> Views:
    """KV of one byte an element; `separate` is an allocation per layer."""
    if layout == "separate":
        return separate((BLOCKS, SIZES["H"], SIZES["N"], SIZES["C"]), torch.uint8)
    return stacked(layout, torch.uint8, {**SIZES, "B": BLOCKS})


class Read(NamedTuple):
    """A read by the engine's stream: where its bytes went, and which pattern they should be."""

    row: int
    layers: tuple[int, ...]
    pattern: int
    what: str


class Engine:
    """The engine's stream, which copies blocks within the device: patterns into blocks, and blocks into a log."""

    def __init__(self, libcuda: Libcuda, views: Views, reads_max: int) -> None:
        self._libcuda = libcuda
        self.stream, self._captured = Stream(libcuda), Stream(libcuda)
        self.broken_captures = 0
        self.lost = False
        """Its device is: it computes nothing any more."""
        layers, heads, tokens = len(views), SIZES["H"], SIZES["N"]
        generator = torch.Generator().manual_seed(1)
        shape = (PATTERNS, layers, heads, tokens, ROW_BYTES)
        self.patterns = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self._log = torch.zeros((reads_max, *shape[1:]), dtype=torch.uint8)
        libcuda.own([*views.values(), self.patterns, self._log])
        self._rows = np.stack(
            [[_row_addresses(view[block]) for view in views.values()] for block in range(BLOCKS)]
        )
        self._pattern_rows = np.stack([[_row_addresses(part) for part in one] for one in self.patterns])
        self._log_rows = np.stack([[_row_addresses(part) for part in one] for one in self._log])
        self._reads: list[Read] = []
        self._marks: deque[Event] = deque()
        self._all_layers = tuple(range(layers))

    def write_block(self, block: int, pattern: int) -> None:
        """Compute a block."""
        self._copy(self._rows[block], self._pattern_rows[pattern])

    def read_block(self, block: int, pattern: int, what: str, layers: tuple[int, ...] = ()) -> Read:
        """Attend to a block, or to some layers of it."""
        layers = layers or self._all_layers
        read = Read(len(self._reads), layers, pattern, what)
        self._reads.append(read)
        self._copy(self._log_rows[read.row][list(layers)], self._rows[block][list(layers)])
        return read

    def discard_read(self, read: Read) -> None:
        """Do not compare this read: the request that made it has failed."""
        self._reads[read.row] = read._replace(layers=())

    def end_step(self) -> None:
        """Go no further than `STEPS_AHEAD` steps ahead of the device."""
        self._marks.append(self.stream.record_event())
        if len(self._marks) > STEPS_AHEAD:
            self._marks.popleft().synchronize()

    @contextmanager
    def capture_graph(self) -> Iterator[None]:
        """Capture a graph meanwhile, in torch's default mode, in which calls of other threads can break it."""
        stream, graph = c_void_p(self._captured.cuda_stream), c_void_p()
        self._libcuda.call_runtime("cuStreamBeginCapture_v2", stream, c_int(0))
        yield
        ended = self._libcuda.cuda.cuStreamEndCapture(stream, byref(graph))
        self.broken_captures += self._libcuda.error_name(ended) == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"

    def wrong_reads(self) -> list[str]:
        """The reads that found other bytes than they should have, once all are over."""
        self.stream.synchronize()
        return [
            read.what
            for read in self._reads
            for layer in read.layers
            if not torch.equal(self._log[read.row, layer], self.patterns[read.pattern, layer])
        ]

    def _copy(self, targets: Addresses, sources: Addresses) -> None:
        """In one call, as a kernel does."""
        if self.lost:
            return
        targets, sources = np.ascontiguousarray(targets.ravel()), np.ascontiguousarray(sources.ravel())
        sizes = np.full(len(targets), ROW_BYTES, dtype=np.uint64)
        in_stream_order = np.array([1, 0, 0, 0, 0, 0], dtype=np.int32)
        self._libcuda.call_runtime(
            "cuMemcpyBatchAsync_v2",
            *(c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            c_size_t(len(targets)),
            c_void_p(in_stream_order.ctypes.data),
            byref(c_size_t(0)),
            c_size_t(1),
            c_void_p(self.stream.cuda_stream),
        )


def _row_addresses(part: torch.Tensor) -> Addresses:
    """The addresses of the rows of a block of one layer, `[heads, tokens, …]`."""
    return np.array([token.data_ptr() for head in part for token in head], dtype=np.uint64)
