"""NIXL without a GPU: plain memory as an end of transfers, and a model of an agent.

The model moves bytes between memory and files at once, unless a test tells it otherwise.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbm.layout import PAGE_BYTES
from kvbm.tiers.disk.block_io import Buffer
from kvbm.tiers.disk.page_sums import host_page_sums
from kvbm.tiers.nixl.agent import DONE, UNDER_WAY, Operation, Region, Segment

BEGIN_S_MAX = 30.0


class HostMemory:
    """Plain memory as an end of transfers, as `kvbm.tiers.nixl.block_io.TransferMemory`."""

    segment: Segment = "DRAM"
    device_index = 0

    def __init__(self, regions: Sequence[memoryview] = ()) -> None:
        """`regions` are registered once; a buffer outside of them is registered for each of its transfers."""
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self.probe: Buffer = page
        self._regions = [self.place(region) for region in (page, *regions)]

    def regions(self) -> list[tuple[int, int]]:
        return self._regions

    def place(self, buffer: Buffer) -> tuple[int, int]:
        assert isinstance(buffer, memoryview)
        return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data), buffer.nbytes

    def page_sums(self, buffer: Buffer) -> bytes:
        assert isinstance(buffer, memoryview)
        return host_page_sums(buffer)

    def put(self, buffer: Buffer, data: bytes) -> None:
        assert isinstance(buffer, memoryview)
        buffer[:] = data

    def get(self, buffer: Buffer) -> bytes:
        assert isinstance(buffer, memoryview)
        return bytes(buffer)


@dataclass(eq=False)
class Transfer:
    """One buffer on its way. `state` is what the agent answers."""

    operation: Operation
    memory: Region
    file: Region
    state: str = "NEW"

    def move(self) -> None:
        """Do it, as a device would at some time."""
        address, size, _ = self.memory
        offset, length, fd = self.file
        assert size == length
        with os.fdopen(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), "r+b", buffering=0) as file:
            file.seek(offset)
            if self.operation == "READ":
                ctypes.memmove(address, file.read(size), size)
            else:
                file.write(ctypes.string_at(address, size))
        self.state = DONE


@dataclass
class ModelAgent:
    """See `kvbm.tiers.nixl.agent.Agent`. `fate` decides what becomes of transfers that begin from now on."""

    fate: str = "done"
    """`done`, `endless`, `error`, `refused` (it cannot begin), `lies` (done, but other bytes)."""
    refused: tuple[Segment, ...] = ()
    """Kinds of registrations that fail."""
    registered: list[tuple[Segment, tuple[Region, ...]]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    """Those that are not released."""
    leaked: list[object] = field(default_factory=list)
    may_begin: threading.Event = field(default_factory=threading.Event)
    """Transfers wait for it before they begin; set unless a test clears it."""

    def __post_init__(self) -> None:
        self.may_begin.set()

    def register(self, segment: Segment, regions: Sequence[Region]) -> object:
        if segment in self.refused:
            raise OSError(errno.EIO, f"register {segment}: refused")
        registration = (segment, tuple(regions))
        self.registered.append(registration)
        return registration

    def deregister(self, registration: object) -> None:
        assert all(transfer.state != UNDER_WAY for transfer in self.transfers), "memory taken from a transfer"
        self.registered.remove(registration)  # type: ignore[arg-type]

    def prepare(self, operation: Operation, segment: Segment, memory: Region, file: Region) -> Transfer:
        assert self.covers(segment, memory)
        assert self.covers("FILE", file)
        self.transfers.append(Transfer(operation, memory, file))
        return self.transfers[-1]

    def begin(self, transfer: object) -> str:
        assert isinstance(transfer, Transfer)
        assert self.may_begin.wait(BEGIN_S_MAX)
        if self.fate == "refused":
            raise OSError(errno.EIO, "transfer: refused")
        if self.fate == "endless":
            transfer.state = UNDER_WAY
        elif self.fate == "error":
            transfer.state = "ERR"
        else:
            transfer.move()
            if self.fate == "lies":
                self.spoil(transfer)
        return transfer.state

    def state(self, transfer: object) -> str:
        assert isinstance(transfer, Transfer)
        return transfer.state

    def release(self, transfer: object) -> None:
        assert isinstance(transfer, Transfer)
        assert transfer.state not in ("NEW", UNDER_WAY), "released before its end"
        self.transfers.remove(transfer)

    def leak(self, *things: object) -> None:
        self.leaked += things

    def finish(self) -> None:
        """Endless transfers end after all."""
        for transfer in self.transfers:
            if transfer.state == UNDER_WAY:
                transfer.move()

    def covers(self, segment: Segment, region: Region) -> bool:
        """Whether a region lies in registered memory, or in a registered file."""
        start, size, device = region
        return any(
            kind == segment and device == owner and first <= start and start + size <= first + length
            for kind, regions in self.registered
            for first, length, owner in regions
        )

    def spoil(self, transfer: Transfer) -> None:
        """One bit of what arrived is another one."""
        address, _, _ = transfer.memory
        offset, _, fd = transfer.file
        if transfer.operation == "READ":
            ctypes.memmove(address, bytes([ctypes.string_at(address, 1)[0] ^ 1]), 1)
        else:
            with os.fdopen(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), "r+b", buffering=0) as file:
                file.seek(offset)
                first = file.read(1)
                file.seek(offset)
                file.write(bytes([first[0] ^ 1]))
