"""NIXL as the disk tier uses it: a few calls, each of which ends. Tests put an agent of their own in its place.

Facts about NIXL 1.5, taken from its source, that shape `block_io`:

- To release a transfer that is under way cancels nothing: POSIX frees what its queue still points to, GDS_MT waits for
  the end, however long. So a transfer is released only once it has ended; others are leaked on purpose.
- The requests of one POSIX backend share a queue, and an I/O error is reported to whichever request polls first. So one
  request is under way at a time, with one buffer.
- POSIX registers any address and any descriptor; GDS_MT takes memory that cuFile refused and only warns. So a
  registration is believed only after bytes went both ways.
- No UCX backend is ever made: a process that has made one may crash when it ends.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from kvbm.tiers.disk.block_io import DirectRefused
from kvbm.tiers.nixl.package import import_nixl

Region = tuple[int, int, int]
"""(address or file offset, bytes, device number or file descriptor)."""

Segment = Literal["DRAM", "VRAM", "FILE"]
Operation = Literal["READ", "WRITE"]
"""READ: from the file into memory."""

UNDER_WAY, DONE = "PROC", "DONE"


class Agent(Protocol):
    """One NIXL agent with one backend. Every method may be called by several threads; all raise OSError."""

    def register(self, segment: Segment, regions: Sequence[Region]) -> object:
        """Make memory or files known to the backend; the result is for `deregister`."""

    def deregister(self, registration: object) -> None:
        """The counterpart of `register`; nothing of it is under way."""

    def prepare(self, operation: Operation, segment: Segment, memory: Region, file: Region) -> object:
        """A transfer between registered memory and a registered file that has not begun."""

    def begin(self, transfer: object) -> str:
        """Begin it: the state it is in then."""

    def state(self, transfer: object) -> str:
        """UNDER_WAY, DONE, or anything else for a failure."""

    def release(self, transfer: object) -> None:
        """Free a transfer that has ended, or never began."""

    def leak(self, *things: object) -> None:
        """Keep these, and the agent, until the process ends, without cleaning up even then."""


class NixlAgent:
    """See `Agent`."""

    def __init__(self, backend: str, parameters: dict[str, str]) -> None:
        """Raises DirectRefused where NIXL or its backend cannot be used."""
        package = import_nixl()
        self._backend = backend
        self._name = "kvbm-disk"
        try:
            # STRICT: several threads call it. No progress thread: file backends have nothing to do in it.
            config = package.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=package.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent: Any = package.nixl_agent(self._name, config)
            self._agent.create_backend(backend, parameters)
        except Exception as error:
            raise DirectRefused(f"NIXL cannot start its backend {backend} ({error})") from error

    def register(self, segment: Segment, regions: Sequence[Region]) -> object:
        described = [(*region, "") for region in regions]
        return self._call("register_memory", described, segment, [self._backend])

    def deregister(self, registration: object) -> None:
        self._call("deregister_memory", registration, [self._backend])

    def prepare(self, operation: Operation, segment: Segment, memory: Region, file: Region) -> object:
        ours = self._call("get_xfer_descs", [memory], segment)
        theirs = self._call("get_xfer_descs", [file], "FILE")
        return self._call("initialize_xfer", operation, ours, theirs, self._name, b"", [self._backend])

    def begin(self, transfer: object) -> str:
        return str(self._call("transfer", transfer))

    def state(self, transfer: object) -> str:
        return str(self._call("check_xfer_state", transfer))

    def release(self, transfer: object) -> None:
        self._call("release_xfer_handle", transfer)

    def leak(self, *things: object) -> None:
        # A reference that is never given back: their destructors would wait for a transfer that does not end.
        for thing in (self._agent, *things):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def _call(self, name: str, *arguments: object) -> object:
        """One call of the agent; all that its bindings raise becomes an OSError. NIXL gives no errno."""
        try:
            return getattr(self._agent, name)(*arguments)
        except Exception as error:
            raise OSError(errno.EIO, f"NIXL {self._backend}: {name}: {error}") from error
