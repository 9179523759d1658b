"""A space over a remote tier that completes by hand; several may share one store."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.layout import BlockLayout
from kvbm.manager.host_side import DEFAULT_OPTIONS, SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.space import Space
from kvbm.manager.write_behind import RemoteRules
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy, AdmitAll
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import HostArena
from rigs.fake_remote import FakeRemote, FakeStore
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.space import LAYOUT, ME

OPTIONS = RemoteRules(linger_s=10.0)


class RemoteBench:
    """One node: a space over `store`, with or without a disk."""

    def __init__(
        self,
        store: FakeStore,
        host_slots: int = 32,
        disk_slots: int = 0,
        options: RemoteRules = OPTIONS,
        admission: AdmissionPolicy | None = None,
        sealed: bool = False,
        layout: BlockLayout = LAYOUT,
        space_options: SpaceOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.store, self.layout = store, layout
        self.remote = FakeRemote(store, sealed=sealed)
        self.metrics = Metrics()
        self.progress: list[tuple[int, int, bool]] = []
        self.arena = HostArena(layout, host_slots, touch_threads=0)
        self.medium = FakeMedium(layout, disk_slots) if disk_slots else None
        self.disk = FakeTier(self.medium) if self.medium is not None else None
        self.space = Space(
            layout,
            self.arena,
            self.disk,
            AdmitAll(),
            self.metrics,
            self.clock,
            lambda lease: self.progress.append((lease.number, lease.ready, lease.final)),
            space_options,
            [(self.remote, options, AdmitAll() if admission is None else admission)],
        )
        self._numbers = iter(range(1000, 2000))

    def compute(self, keys: list[BlockKey], parent: BlockKey | None = None, tenant: str = "") -> None:
        """Store blocks as an engine does."""
        number = next(self._numbers)
        slots = self.space.reserve(ME, number, parent, keys, tenant=tenant)
        for key, slot in zip(keys, slots, strict=True):
            if slot >= 0:
                self.arena.slot_views(slot)[0][:] = block_bytes(key, 0, self.layout.slot_bytes)
        self.space.commit(ME, number)

    def settle(self, seconds: float = 0.0) -> None:
        """So much time goes by, and all reads and writes end."""
        self.clock.advance(seconds)
        self.space.below.tick()
        self.space.pump()
        while self.remote.release() + (self.disk.release() if self.disk is not None else 0):
            self.space.pump()

    def shares(self, keys: list[BlockKey], parent: BlockKey | None = None, tenant: str = "") -> None:
        """Compute blocks that reach the store."""
        self.compute(keys, parent, tenant)
        self.settle(10.0)

    def look(self, number: int, keys: list[BlockKey], skip: int = 0) -> Lease | None:
        """Look a chain up; reads are begun, and do not end."""
        lease = self.space.lookup(ME, number, keys, skip)
        self.space.pump()
        return lease

    def right(self, lease: Lease) -> bool:
        """Whether the ready blocks of a lease have the bytes that belong to their keys."""
        return all(
            bytes(self.arena.slot_views(slot)[0]) == block_bytes(key, 0, self.layout.slot_bytes)
            for key, slot in zip(lease.keys[: lease.ready], lease.slots, strict=False)
        )

    def close(self) -> None:
        """An orderly end; the store stays."""
        self.space.close(keep=True)
        if self.medium is not None:
            self.medium.close()
