"""A model of a CUDA device behind the two boundaries `Driver` and `Device`: streams, events, page locks, memory.

Nothing runs when it is put in. The model advances one step of one randomly chosen stream at a time, where a step is
a few pieces of a copy, in any order: whatever a program leaves to chance goes every way for some seed. A source that
may be read early is read at some time from the call on. Copies are real ones, between CPU tensors that stand for device
memory and host memory; an address that a real device could not reach is a failure of the test, not a segmentation
fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from kvbm import pages
from kvbm.transfer.cuda.driver import Addresses, CudaError
from rigs.cuda_streams import Call, ModelEvent, ModelStream, Operation

PAGE = mmap.PAGESIZE
DEADLINE_S = 30
LOST_TEXT = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


@dataclass
class Piece:
    """A copy of `size` bytes. `content` are those that were read from the source already."""

    target: int
    source: int
    size: int
    content: bytes | None = None


class Model:
    """One device. What a test sets to make it fail or differ is public; `complaints` must stay empty."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[ModelStream] = []
        self.memory: set[tuple[int, int]] = set()
        self.pinned: set[tuple[int, int]] = set()
        self.locked: dict[int, int] = {}
        self.calls: list[Call] = []
        self.pieces_copied = 0
        self.complaints: list[str] = []
        self.early: list[Piece] = []
        """Their sources may be read from now on."""
        self.lost = False
        self.engine_waits: threading.Event | None = None
        """Set when the engine, which `hold_up` has stopped, goes on."""
        self.capturing = False
        """The engine captures a graph, in the mode that forbids all threads what might be unsafe."""
        self.unsafe_calls: dict[str, int] = {}
        self.failing: dict[str, int] = {}
        """Per copy call, how many pieces still go well."""
        self.fails_with = (1, "CUDA_ERROR_INVALID_VALUE")
        self.refuse_locks_from: int | None = None
        self.refuse_locks_with = (2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.lock_gate: threading.Semaphore | None = None
        self.lock_calls = 0
        self.lock_called = threading.Condition()
        self.refuse_pinned = False
        self.pinned_asked: list[int] = []
        self.batch_pieces_max = 4096
        """One batch call takes no more."""
        self._threads = threading.local()
        self._threads.stream = self.engine = self.new_stream()
        self.driver = ModelDriver(self)
        self.device = ModelDevice(self)

    def new_stream(self) -> ModelStream:
        """A stream that the model advances."""
        with self.lock:
            self.streams.append(ModelStream(self, 100 + len(self.streams)))
            return self.streams[-1]

    def current(self) -> ModelStream:
        """The calling thread's current stream; the engine's for the thread that made the model."""
        if not hasattr(self._threads, "stream"):
            self._threads.stream = self.new_stream()
        stream: ModelStream = self._threads.stream
        return stream

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the tensors' storages be device memory, an allocation each."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.memory.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def lend(self, ranges: set[tuple[int, int]], tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's memory among `ranges` for as long as the tensor lives."""
        place = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        ranges.add(place)
        weakref.finalize(tensor, ranges.discard, place)
        return tensor

    def use(self) -> None:
        """A call of torch's, which makes the context current in the calling thread."""
        self._threads.has_context = True
        if self.lost:
            raise RuntimeError(LOST_TEXT)

    def relax(self, relaxed: bool) -> bool:
        """Exchange the calling thread's mode: whether it is CU_STREAM_CAPTURE_MODE_RELAXED."""
        before, self._threads.relaxed = getattr(self._threads, "relaxed", False), relaxed
        return before

    def unsafe(self, call: str) -> None:
        """A call that is potentially unsafe: made in the default mode it ends the capture that somebody runs."""
        with self.lock:
            self.unsafe_calls[call] = self.unsafe_calls.get(call, 0) + 1
        if self.capturing and not getattr(self._threads, "relaxed", False):
            self.complain(f"{call} by {threading.current_thread().name} ends the engine's capture of a graph")

    def enter(self, call: str) -> None:
        """A call to the driver, which does nothing of the kind."""
        if not getattr(self._threads, "has_context", False):
            raise CudaError(call, 201, "CUDA_ERROR_INVALID_CONTEXT")
        if self.lost:
            raise CudaError(call, 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def complain(self, text: str) -> NoReturn:
        """Fail the test, even where somebody catches the error."""
        self.complaints.append(text)
        raise AssertionError(text)

    def advance(self) -> bool:
        """One step of one stream; False when none can go on."""
        with self.lock:
            able = [stream for stream in self.streams if stream.queue and stream.queue[0].ready()]
            if not able:
                return False
            if self.early and self.random.random() < 0.5:
                place = self.random.randrange(len(self.early))
                self.early[place], self.early[-1] = self.early[-1], self.early[place]
                self._read(self.early.pop())
            stream = self.random.choice(able)
            if stream.queue[0].step():
                stream.queue.popleft()
            return True

    def hold_up(self) -> threading.Event:
        """The engine's stream gets no further until that event is set; who waits for it sleeps meanwhile."""
        gate = self.engine_waits = threading.Event()
        self.engine.put(Operation("work", lambda: True, gate.is_set))
        return gate

    def engine_goes_on(self) -> bool:
        """Whether the engine was held up, and goes on by now; sleeps until then."""
        gate = self.engine_waits
        if gate is None or gate.is_set():
            return False
        return gate.wait(DEADLINE_S)

    def drain(self) -> None:
        """Run everything that was put in."""
        while self.advance():
            pass
        if any(stream.queue for stream in self.streams):
            self.complain("deadlock: streams wait for what never comes")

    def copies_under_way(self) -> bool:
        """Whether any stream has a copy that is not over."""
        return any(operation.kind in ("copy", "run") for stream in self.streams for operation in stream.queue)

    def reached_as(self, address: int, size: int) -> str:
        """`device` or `host`, by the one allocation or locked range that holds all those bytes."""
        locked = {(start, start + length) for start, length in self.locked.items()}
        for kind, ranges in (("device", self.memory), ("host", self.pinned | locked)):
            if any(start <= address and address + size <= end for start, end in ranges):
                return kind
        return self.complain(f"a copy of {size} bytes reaches beyond device memory and locked pages")

    def begin_copies(
        self, name: str, pieces: list[Piece], handle: int, pitch: int = 0, read_early: bool = False
    ) -> None:
        """Put one call's copies on a stream, as many as go well."""
        self.enter(name)
        with self.lock:
            kinds = {(self.reached_as(p.target, p.size), self.reached_as(p.source, p.size)) for p in pieces}
            if kinds not in ({("device", "host")}, {("host", "device")}):
                self.complain(f"{name} copies {kinds}")
            (stream,) = (stream for stream in self.streams if stream.handle == handle)
            call = Call(name, kinds == {("device", "host")}, len(pieces), pitch, read_early)
            self.calls.append(call)
            stream.calls.append(call)
            room = self.failing.get(name, len(pieces))
            if name in self.failing:
                self.failing[name] = max(0, room - len(pieces))
            begun = pieces[:room]
            if read_early:
                self.early += begun
                for piece in begun:
                    if self.random.random() < 0.5:
                        self._read(piece)
            if begun:
                left = list(begun)
                stream.put(Operation("copy", lambda: self._copy_some(left, self.random.randint(1, 8))))
            if len(begun) < len(pieces):
                self.lost = self.fails_with[0] == 700
                raise CudaError(name, *self.fails_with)

    def _copy_some(self, left: list[Piece], count: int) -> bool:
        for _ in range(min(count, len(left))):
            piece = left.pop(self.random.randrange(len(left)))
            self._read(piece)
            # Again: what is freed or unlocked by now must not be touched any more.
            self.reached_as(piece.target, piece.size)
            ctypes.memmove(piece.target, piece.content, piece.size)
            self.pieces_copied += 1
        return not left

    def _read(self, piece: Piece) -> None:
        """Once: a piece may still be among those to be read early when it is copied."""
        if piece.content is not None:
            return
        self.reached_as(piece.source, piece.size)
        piece.content = ctypes.string_at(piece.source, piece.size)


class ModelDriver:
    """See `Driver`."""

    version = 13000

    def __init__(self, model: Model) -> None:
        self._model = model
        self.has_batch = True
        self.pitch_limit = (1 << 31) - 1
        self.host_pointers = True

    def adopt_thread(self, device: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._model.use()
        self._model.enter("cuCtxSetCurrent")
        self._model.relax(True)

    @contextlib.contextmanager
    def beside_captures(self, device: int) -> Iterator[None]:
        with contextlib.suppress(RuntimeError):
            self._model.use()
        before = self._model.relax(True)
        try:
            yield
        finally:
            self._model.relax(before)

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, read_early: bool
    ) -> None:
        assert self.has_batch
        if len(sizes) > self._model.batch_pieces_max:
            self._model.complain(f"a call with {len(sizes)} pieces, which ends the process on real devices")
        pieces = list(map(Piece, targets.tolist(), sources.tolist(), sizes.tolist()))
        self._model.begin_copies("batch", pieces, stream, read_early=read_early)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._model.begin_copies("copy", [Piece(target, source, size)], stream)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        model = self._model
        if (
            not width
            <= min(target_pitch, source_pitch)
            <= max(target_pitch, source_pitch)
            <= self.pitch_limit
        ):
            model.complain(f"rows of {width} bytes at {target_pitch} and {source_pitch}")
        # A driver looks up where the whole copy lies: it must not cross allocations, even between rows.
        model.reached_as(target, (rows - 1) * target_pitch + width)
        model.reached_as(source, (rows - 1) * source_pitch + width)
        pieces = [
            Piece(target + row * target_pitch, source + row * source_pitch, width) for row in range(rows)
        ]
        model.begin_copies("rows", pieces, stream, max(target_pitch, source_pitch))

    def pitch_max(self, device: int) -> int:
        return self.pitch_limit

    def can_use_host_pointers(self, device: int) -> bool:
        return self.host_pointers

    def lock_pages(self, address: int, size: int) -> None:
        """Waits at the gate, where there is one."""
        model = self._model
        with model.lock_called:
            model.lock_calls += 1
            model.lock_called.notify_all()
        if model.lock_gate is not None:
            assert model.lock_gate.acquire(timeout=DEADLINE_S)
        model.enter("cuMemHostRegister")
        model.unsafe("cuMemHostRegister")
        with model.lock:
            page = pages.MEMORY_PAGE_BYTES
            first, last = address // page, (address + size - 1) // page
            if any(first <= (a + s - 1) // page and a // page <= last for a, s in model.locked.items()):
                already = (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
                raise CudaError(f"cuMemHostRegister of {size} bytes", *already)
            if model.refuse_locks_from is not None and len(model.locked) >= model.refuse_locks_from:
                raise CudaError(f"cuMemHostRegister of {size} bytes", *model.refuse_locks_with)
            model.locked[address] = size

    def unlock_pages(self, address: int) -> None:
        self._model.enter("cuMemHostUnregister")
        self._model.unsafe("cuMemHostUnregister")
        with self._model.lock:
            if self._model.locked.pop(address, None) is None:
                raise CudaError("cuMemHostUnregister", 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")

    def pci_bus_id(self, device: int) -> str:
        return "0000:00:00.0"


class ModelDevice:
    """See `Device`."""

    torch_device = torch.device("cpu")
    index = 0

    def __init__(self, model: Model) -> None:
        self._model = model

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def new_stream(self, priority: int) -> ModelStream:
        self._model.use()
        self._model.unsafe("cudaStreamCreate")
        return self._model.new_stream()

    def mark(self) -> ModelEvent:
        return self._model.current().record()

    def hold(self, event: Any) -> None:
        self._model.current().wait(event)

    def pinned(self, row_count: int, row_bytes: int) -> torch.Tensor:
        """Full of what must not be taken for KV."""
        self._model.use()
        self._model.unsafe("cudaHostAlloc")
        self._model.pinned_asked.append(row_count * row_bytes)
        if self._model.refuse_pinned:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        rows = torch.full((row_count, row_bytes), 0xEE, dtype=torch.uint8)
        return self._model.lend(self._model.pinned, rows)

    def scratch(self, size: int) -> torch.Tensor:
        self._model.use()
        self._model.unsafe("cudaMalloc")
        return self._model.lend(self._model.memory, torch.full((size,), 0xDD, dtype=torch.uint8))
