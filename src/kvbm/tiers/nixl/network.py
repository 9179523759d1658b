"""NIXL as the mover uses it: memory of this process written into memory of another one, by UCX.

Facts about NIXL 1.5 and its UCX, tried out, that shape `peers.mover_process` and the way managers use it:

- A process that has made a UCX backend may crash when it ends (in libnl, with Debian's ibverbs providers). So no
  manager makes one, and a process that does ends by `os._exit`.
- Whoever reaches the ports of a UCX worker can write to any address of its process: what metadata allows is checked by
  the end that writes. So a mover maps nothing but memory whose bytes are verified afterwards.
- Bytes move only while both ends look (there is no progress thread), but for RDMA and shared memory.
- Metadata of one agent is merged into what is known of it, and stays until all of the agent is forgotten. So each piece
  of memory that others write to has an agent of its own.
- A transfer that is under way cannot be released; one to a process that died ends with an error at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvbm.tiers.disk.block_io import DirectRefused
from kvbm.tiers.nixl.agent import DONE, UNDER_WAY
from kvbm.tiers.nixl.package import import_nixl

Span = tuple[int, int, int]
"""(address here, address there, bytes)."""

_BACKEND = "UCX"


class NetworkAgent(Protocol):
    """One agent. Everything raises OSError."""

    def register(self, address: int, size: int) -> object:
        """Make memory known; the result is for `metadata` and `deregister`."""

    def deregister(self, registration: object) -> None:
        """The counterpart of `register`; nothing of it is under way."""

    def metadata(self, registration: object) -> bytes:
        """What another agent needs to write to that memory."""

    def meet(self, metadata: bytes) -> str:
        """Know the agent that this metadata is of: its name."""

    def forget(self, name: str) -> None:
        """The counterpart of `meet`."""

    def begin(self, spans: Sequence[Span], name: str) -> object:
        """Begin to write to that agent's memory: a transfer for `ended`."""

    def ended(self, transfer: object) -> bool:
        """Whether all bytes have arrived. Raises OSError when the transfer has failed. To be called until it ends."""

    def progress(self) -> None:
        """Let those who write to this agent's memory go on."""

    def close(self) -> None:
        """Nothing is under way."""


class UcxAgent:
    """See `NetworkAgent`."""

    def __init__(self, name: str) -> None:
        """Raises OSError where NIXL or its UCX cannot be used."""
        try:
            package = import_nixl()
        except DirectRefused as error:
            raise OSError(str(error)) from None
        try:
            config = package.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = package.nixl_agent(name, config)
            self._agent.create_backend(_BACKEND, {})
        except Exception as error:
            raise OSError(f"NIXL cannot start its backend {_BACKEND} ({error})") from error

    def register(self, address: int, size: int) -> object:
        return self._call("register_memory", [(address, size, 0, "")], "DRAM", [_BACKEND])

    def deregister(self, registration: object) -> None:
        self._call("deregister_memory", registration, [_BACKEND])

    def metadata(self, registration: object) -> bytes:
        data = self._call("get_partial_agent_metadata", registration, True, [_BACKEND])
        assert isinstance(data, bytes)
        return data

    def meet(self, metadata: bytes) -> str:
        name = self._call("add_remote_agent", metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        self._call("remove_remote_agent", name)

    def begin(self, spans: Sequence[Span], name: str) -> object:
        ours = self._call("get_xfer_descs", [(here, size, 0) for here, _, size in spans], "DRAM")
        theirs = self._call("get_xfer_descs", [(there, size, 0) for _, there, size in spans], "DRAM")
        transfer = self._call("initialize_xfer", "WRITE", ours, theirs, name, b"", [_BACKEND])
        self._looked(transfer, self._call("transfer", transfer))
        return transfer

    def ended(self, transfer: object) -> bool:
        if not self._looked(transfer, self._call("check_xfer_state", transfer)):
            return False
        self._call("release_xfer_handle", transfer)
        return True

    def progress(self) -> None:
        self._call("get_new_notifs")

    def close(self) -> None:
        self._agent = None

    def _looked(self, transfer: object, state: object) -> bool:
        """Whether it has ended well. Raises OSError where it has failed."""
        if state in (DONE, UNDER_WAY):
            return state == DONE
        self._call("release_xfer_handle", transfer)
        raise OSError(f"NIXL {_BACKEND}: the transfer ended with {state}")

    def _call(self, name: str, *arguments: object) -> object:
        """One call of the agent; all that its bindings raise becomes an OSError."""
        try:
            return getattr(self._agent, name)(*arguments)
        except Exception as error:
            raise OSError(f"NIXL {_BACKEND}: {name}: {type(error).__name__} {error}") from error
