"""Movers for tests: the real one with NIXL, and one in a thread, whose agents copy in this process as a test says."""

from __future__ import annotations

import ctypes
import json
import socket
import threading
from collections.abc import Sequence

import pytest

from kvbm.tiers.nixl.network import NetworkAgent, Span
from kvbm.tiers.nixl.package import is_installed
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.mover_process import MoverLoop
from kvbm.tiers.peers.tier import PeerTier
from rigs.peers import LendingNode, wait_until

needs_nixl = pytest.mark.skipif(
    not is_installed(), reason="NIXL is not installed (pip install --no-deps nixl-cu12)"
)
PATIENT_S = 30.0
"""For a write of the real one on a machine that is busy."""


class ModelNetwork:
    """What agents of a test know of one another, and what goes wrong.

    `hang`: transfers do not end. `refuse`: none begins. `spoil`: wrong bytes arrive. `broken`: no agent can be made.
    """

    def __init__(self) -> None:
        self.hang = self.refuse = self.spoil = self.broken = False
        self.writes = 0
        self.agents: list[ModelAgent] = []

    def make_agent(self, name: str) -> NetworkAgent:
        if self.broken:
            raise OSError("no network here")
        self.agents.append(ModelAgent(self, name))
        return self.agents[-1]


class ModelAgent:
    """See `NetworkAgent`."""

    def __init__(self, network: ModelNetwork, name: str) -> None:
        self.network, self.name = network, name
        self.regions: list[tuple[int, int]] = []
        self.known: dict[str, tuple[int, int]] = {}
        self.expected = 0
        self.closed = False

    def register(self, address: int, size: int) -> object:
        self.regions.append((address, size))
        return (address, size)

    def deregister(self, registration: object) -> None:
        self.regions.remove(registration)  # type: ignore[arg-type]

    def metadata(self, registration: object) -> bytes:
        return json.dumps([self.name, registration]).encode()

    def meet(self, metadata: bytes) -> str:
        try:
            name, (address, size) = json.loads(metadata)
        except ValueError as error:
            raise OSError(f"no metadata: {error}") from None
        self.known[name] = address, size
        return str(name)

    def forget(self, name: str) -> None:
        if self.known.pop(name, None) is None:
            raise OSError("not known")

    def begin(self, spans: Sequence[Span], name: str) -> object:
        network = self.network
        if name not in self.known:
            raise OSError("not known")
        address, size = self.known[name]
        network.writes += 1
        if network.refuse:
            raise OSError("the other end is gone")
        for here, there, count in spans:
            assert address <= there and there + count <= address + size, "beyond what was offered"
            assert any(own <= here and here + count <= own + held for own, held in self.regions)
            if not network.hang:
                ctypes.memmove(there, here, count)
                if network.spoil:
                    ctypes.memset(there + count // 2, 0x5A, 1)
                    ctypes.memset(there + count // 2 + 1, 0xA5, 1)
        return object()

    def ended(self, transfer: object) -> bool:
        return not self.network.hang

    def progress(self) -> None:
        self.expected += 1

    def close(self) -> None:
        self.closed = True


class ThreadChild:
    """A mover's loop in a thread, in place of a process."""

    def __init__(self, network: ModelNetwork, control: socket.socket) -> None:
        self._control = control.dup()
        self.loop = MoverLoop(self._control, network.make_agent)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except OSError:
            pass
        # What the kernel does for a process.
        for memory in self.loop._all():
            memory.connection.close()
        self._control.close()

    def kill(self) -> None:
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def wait(self) -> int:
        self._thread.join(20.0)
        return 0


def model_mover(network: ModelNetwork, write_limit_s: float = PATIENT_S) -> Mover:
    """One whose agents are those of the network."""
    return ready(Mover(lambda control: ThreadChild(network, control), write_limit_s))


def nixl_mover(write_limit_s: float = PATIENT_S) -> Mover:
    """The real one."""
    return ready(Mover(write_limit_s=write_limit_s))


def ready(mover: Mover) -> Mover:
    wait_until(lambda: mover.running or "no network" in mover.trouble, f"a mover: {mover.trouble}")
    return mover


def moves(lender: LendingNode, tier: PeerTier) -> bool:
    """Whether all readers of the lender have memory that it knows; the tier is theirs."""
    tier.tick()
    readers: list[dict[str, object]] = lender.server.describe()["readers"]  # type: ignore[assignment]
    return bool(readers) and all(reader["transport"] == "nixl" for reader in readers)
