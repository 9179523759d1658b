"""Blocks between a GPU (or any memory that NIXL knows) and slab files without host memory in between.

Memory and files are registered once, and believed only after a page went both ways and arrived as it left. Every
transfer has a deadline and is polled with short sleeps. A transfer that fails or does not end is an OSError like any
other, so that the tier turns off; buffers that the device may still touch are not used meanwhile.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from kvbm.block import BlockKey
from kvbm.layout import PAGE_BYTES
from kvbm.tiers.disk.block_io import PAGE_SUMS, Buffer, BufferStillInUse, DirectRefused
from kvbm.tiers.disk.page_sums import block_page_checksum, host_page_sums
from kvbm.tiers.nixl.agent import DONE, UNDER_WAY, Agent, NixlAgent, Operation, Segment

log = logging.getLogger("kvbm.tiers.disk.tier")

TRANSFER_LIMIT_S = 10.0
"""A transfer of one buffer that takes longer has failed."""

_POLL_S = 0.0001
_POLL_LATER_S = 0.001
_POLLED_OFTEN_S = 0.02
_SHARED_QUEUE = ("POSIX",)
"""Backends that may report one request's error to another: their transfers go one after the other."""

_NEEDS_DIRECT = ("GDS", "GDS_MT")
PROBE_NAME = "probe"


class TransferMemory(Protocol):
    """The memory that one end of every transfer lies in."""

    segment: Segment
    device_index: int
    probe: Buffer
    """A page for the start's own test."""

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of the memory that is registered at the start, the probe's page included."""

    def place(self, buffer: Buffer) -> tuple[int, int]:
        """(address, bytes) of a buffer."""

    def page_sums(self, buffer: Buffer) -> bytes:
        """The sums of its pages (`page_sums`). Raises OSError when the device cannot read them."""

    def put(self, buffer: Buffer, data: bytes) -> None:
        """Write the probe's page. Raises OSError."""

    def get(self, buffer: Buffer) -> bytes:
        """Read the probe's page. Raises OSError."""


class NixlBlockIo:
    """See `BlockIo`. One agent, one backend, one kind of memory."""

    checksum_kind = PAGE_SUMS

    def __init__(
        self, backend: str, agent: Agent, memory: TransferMemory, limit_s: float = TRANSFER_LIMIT_S
    ) -> None:
        """Registers the memory. Raises DirectRefused."""
        self._backend = backend
        self._agent = agent
        self._memory = memory
        self._limit_s = limit_s
        self._one_by_one = threading.Lock() if backend in _SHARED_QUEUE else None
        self._file_registration: object | None = None
        self._file_bytes: dict[int, int] = {}
        self._closed = False
        # Guarded by the lock:
        self._lock = threading.Lock()
        # Each with its buffer, whose memory must not go while the device may touch it.
        self._running: list[tuple[object, Buffer]] = []
        self._lost: list[tuple[object, Buffer]] = []
        self._moving = 0
        self._lent: Counter[tuple[int, int]] = Counter()
        self._lent_registrations: dict[tuple[int, int], object] = {}
        try:
            self._memory_registration = agent.register(memory.segment, self._described(memory.regions()))
        except OSError as error:
            raise DirectRefused(f"{backend} refused the registration of memory ({error.strerror})") from error

    def attach(self, dir_fd: int, files: Sequence[tuple[int, int]], direct: bool) -> None:
        if self._backend in _NEEDS_DIRECT and not direct:
            raise DirectRefused(f"{self._backend} needs files that bypass the page cache (O_DIRECT)")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        probe_fd = os.open(PROBE_NAME, flags | (os.O_DIRECT if direct else 0), 0o600, dir_fd=dir_fd)
        try:
            os.ftruncate(probe_fd, PAGE_BYTES)
            with self._registered_files([(probe_fd, PAGE_BYTES)]), ThreadPoolExecutor(1) as ours:
                # In a thread of ours, as all later transfers: the caller's may be the engine's.
                ours.submit(self._prove, probe_fd).result()
        finally:
            os.close(probe_fd)
            os.unlink(PROBE_NAME, dir_fd=dir_fd)
        self._file_registration = self._register_files(files)

    def detach(self) -> None:
        self._file_bytes.clear()
        registration, self._file_registration = self._file_registration, None
        if registration is not None:
            self._deregister(registration)

    def read(self, fd: int, targets: Sequence[Buffer], offset: int) -> None:
        self._move("READ", fd, targets, offset)

    def write(self, fd: int, sources: Sequence[Buffer], offset: int) -> None:
        self._move("WRITE", fd, sources, offset)

    def checksum(self, fingerprint: bytes, key: BlockKey, buffers: Sequence[Buffer]) -> bytes:
        length = sum(buffer.nbytes for buffer in buffers)
        return block_page_checksum(fingerprint, key, length, map(self._memory.page_sums, buffers))

    def idle(self) -> bool:
        with self._lock:
            self._running = [failed for failed in self._running if not self._has_ended(failed[0])]
            return not self._running and not self._lost

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.idle() and not self._moving:
            self._deregister(self._memory_registration)
        else:
            self._agent.leak(self._memory, *self._running, *self._lost)

    def _described(self, regions: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        return [(address, size, self._memory.device_index) for address, size in regions]

    def _register_files(self, files: Sequence[tuple[int, int]]) -> object:
        try:
            registration = self._agent.register("FILE", [(0, size, fd) for fd, size in files])
        except OSError as error:
            raise DirectRefused(
                f"{self._backend} refused the registration of files ({error.strerror})"
            ) from error
        self._file_bytes.update(files)
        return registration

    @contextmanager
    def _registered_files(self, files: Sequence[tuple[int, int]]) -> Iterator[None]:
        registration = self._register_files(files)
        try:
            yield
        finally:
            if self.idle():
                self._deregister(registration)
            for fd, _ in files:
                self._file_bytes.pop(fd, None)

    def _prove(self, fd: int) -> None:
        """Move bytes both ways, or raise DirectRefused with the reason: a registration alone proves nothing."""
        probe, page = self._memory.probe, memoryview(mmap.mmap(-1, PAGE_BYTES))
        try:
            sent = os.urandom(PAGE_BYTES)
            self._memory.put(probe, sent)
            self.write(fd, [probe], 0)
            written = os.preadv(fd, [page], 0) == PAGE_BYTES and page == sent
            page[:] = expected = os.urandom(PAGE_BYTES)
            os.pwritev(fd, [page], 0)
            self.read(fd, [probe], 0)
            got = self._memory.get(probe)
            summed = self._memory.page_sums(probe) == host_page_sums(page)
        except OSError as error:
            raise DirectRefused(f"{self._backend} moved no page ({error.strerror or error})") from error
        if not (written and got == expected and summed):
            which = (
                "wrote other bytes" if not written else "read other bytes" if got != expected else "summed up"
            )
            raise DirectRefused(f"{self._backend} {which} than it was given")

    def _move(self, operation: Operation, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """One transfer per buffer, so that a failure is that buffer's own and nothing of it is left under way."""
        assert offset + sum(buffer.nbytes for buffer in buffers) <= self._file_bytes[fd]
        moved_bytes = 0
        for buffer in buffers:
            try:
                with self._turn():
                    end_s = time.monotonic() + self._limit_s
                    self._transfer(operation, fd, buffer, offset + moved_bytes, end_s)
            except BufferStillInUse as error:
                error.moved_bytes, error.buffer_bytes = moved_bytes, buffer.nbytes
                raise
            moved_bytes += buffer.nbytes

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """May move one buffer now. Raises OSError."""
        if self._one_by_one is not None and not self._one_by_one.acquire(timeout=self._limit_s):
            raise TimeoutError(errno.ETIMEDOUT, f"NIXL {self._backend}: no turn in {self._limit_s:g} s")
        try:
            with self._lock:
                if self._running or self._lost or self._closed:
                    # Not EIO: nothing is wrong with this block.
                    raise OSError(errno.ECANCELED, f"NIXL {self._backend}: another transfer failed")
                self._moving += 1
            try:
                yield
            finally:
                with self._lock:
                    self._moving -= 1
        finally:
            if self._one_by_one is not None:
                self._one_by_one.release()

    def _transfer(self, operation: Operation, fd: int, buffer: Buffer, offset: int, end_s: float) -> None:
        address, size = self._memory.place(buffer)
        with self._lent_to_agent(address, size):
            memory, file = (address, size, self._memory.device_index), (offset, size, fd)
            transfer = self._agent.prepare(operation, self._memory.segment, memory, file)
            try:
                state = self._agent.begin(transfer)
            except OSError as error:
                # It may sit in a queue of the backend's, and there is no way to know when it has left that.
                with self._lock:
                    self._lost.append((transfer, buffer))
                raise BufferStillInUse(error.errno or errno.EIO, error.strerror) from error
            try:
                self._await(transfer, state, end_s)
            except OSError as error:
                with self._lock:
                    self._running.append((transfer, buffer))
                raise BufferStillInUse(error.errno or errno.EIO, error.strerror) from error
            self._agent.release(transfer)

    def _await(self, transfer: object, state: str, end_s: float) -> None:
        """Until it is done. Raises OSError."""
        often_until_s = time.monotonic() + _POLLED_OFTEN_S
        while state == UNDER_WAY:
            now_s = time.monotonic()
            if now_s >= end_s:
                what = f"NIXL {self._backend}: a transfer did not end in {self._limit_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, what)
            time.sleep(_POLL_S if now_s < often_until_s else _POLL_LATER_S)
            state = self._agent.state(transfer)
        if state != DONE:
            raise OSError(errno.EIO, f"NIXL {self._backend}: a transfer ended as {state}")

    def _has_ended(self, transfer: object) -> bool:
        """Whether a transfer that failed has left its buffer alone; it is released then."""
        try:
            if self._agent.state(transfer) == UNDER_WAY:
                return False
        except OSError as error:  # it ended with an error
            log.debug("a transfer that failed says: %s", error)
        try:
            self._agent.release(transfer)
        except OSError as error:
            log.warning("disk tier: %s", error.strerror)
        return True

    def _deregister(self, registration: object) -> None:
        try:
            self._agent.deregister(registration)
        except OSError as error:
            log.warning("disk tier: %s", error.strerror)

    @contextmanager
    def _lent_to_agent(self, address: int, size: int) -> Iterator[None]:
        """Memory that was not registered at the start is registered while it is in use.

        Memory that a failed transfer may still touch stays registered.
        """
        if any(
            start <= address and address + size <= start + length for start, length in self._memory.regions()
        ):
            yield
            return
        place = (address, size)
        with self._lock:
            if place not in self._lent_registrations:
                regions = self._described([place])
                self._lent_registrations[place] = self._agent.register(self._memory.segment, regions)
            self._lent[place] += 1
        yield
        with self._lock:
            self._lent[place] -= 1
            if not self._lent[place]:
                del self._lent[place]
                self._deregister(self._lent_registrations.pop(place))


def open_nixl(backend: str, memory: TransferMemory, threads: int) -> NixlBlockIo:
    """A way to move blocks through this NIXL backend. Raises DirectRefused where that cannot be."""
    parameters = {"thread_count": str(threads)} if backend == "GDS_MT" else {}
    return NixlBlockIo(backend, NixlAgent(backend, parameters), memory)
