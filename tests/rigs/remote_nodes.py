"""Nodes with a `BlobTier` over one store in memory, and one clock that stands still for all."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable

from kvbm.clock import ManualClock
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE
from kvbm.tiers.remote.blob_tier import BlobTier, open_blob_tier
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.sealing import Seal
from rigs.faulty_blobs import MemoryBlobs

WAIT_S = 20.0
PREFIX = f"{NAMESPACE.fingerprint.hex()}/"


class KeptOpen(MemoryBlobs):
    """Nodes share it: one that closes takes it from no other."""

    def close(self) -> None:
        pass


class Nodes:
    """Nodes over one store, all with one clock that stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.blobs = KeptOpen(self.clock)
        self.made: list[BlobTier] = []

    def make(self, blobs: BlobStore | None = None, seal: Seal | None = None, **options: object) -> BlobTier:
        chosen = RemoteOptions(**{"collect": False, **options})  # type: ignore[arg-type]
        jitter = random.Random(len(self.made) + 1)
        node = open_blob_tier(blobs or self.blobs, LAYOUT, NAMESPACE, chosen, self.clock, jitter, seal)
        self.made.append(node)
        return settled(node)

    def packs(self) -> list[str]:
        return [name for name in self.blobs.blobs if name.startswith(f"{PREFIX}packs/")]

    def pass_on(self, *nodes: BlobTier, seconds: float = 60.0) -> None:
        """Time goes by, and each node does what is due."""
        self.clock.advance(seconds)
        for node in nodes:
            node.tick()
            settled(node)


def settled(node: BlobTier) -> BlobTier:
    """The node, when nothing of it is under way."""
    assert node.settle(WAIT_S)
    assert node.poll() == []
    return node


def until(node: BlobTier, true: Callable[[], bool]) -> None:
    """Wait until it is true; the node polls nothing meanwhile."""
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        select.select([node.fileno()], [], [], 0.005)
