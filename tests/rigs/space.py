"""A space over a tier that completes by hand, and the engines around it."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy, AdmitAll
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import HostArena
from rigs.fake_tier import FakeMedium, FakeTier

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096)
KEYS = chain_keys(bytes(32), range(400), LAYOUT.block_tokens)
OTHER = chain_keys(bytes(32), range(1000, 1400), LAYOUT.block_tokens)
ME, PEER = 1, 2


class Bench:
    """A space over a tier that completes by hand, and what it announced."""

    def __init__(
        self,
        host_slots: int = 8,
        disk_slots: int = 16,
        staging: bool = False,
        pending_limit: int = 8,
        admission: AdmissionPolicy | None = None,
        eviction: str = "lru",
        disk: bool = True,
        run_blocks_max: int = 1,
        brought_at_once: int = 512,
        layout: BlockLayout = LAYOUT,
    ):
        """`run_blocks_max`: the tier below moves runs of so many blocks."""
        self.clock = ManualClock(100.0)
        self.medium = FakeMedium(layout, disk_slots)
        self.tier = FakeTier(self.medium, pending_limit, run_blocks_max=run_blocks_max)
        self.metrics = Metrics()
        self.progress: list[tuple[int, int, bool]] = []
        self.arena = HostArena(layout, host_slots, touch_threads=0)
        self.space = Space(
            layout,
            self.arena,
            self.tier if disk else None,
            AdmitAll() if admission is None else admission,
            self.metrics,
            self.clock,
            self.progressed,
            SpaceOptions(
                staging=staging,
                eviction=eviction,
                in_flight_max=4 if run_blocks_max == 1 else 16,
                brought_at_once=brought_at_once,
            ),
        )
        self.numbers = iter(range(1, 1000))
        self.open = True

    def progressed(self, lease: Lease) -> None:
        self.progress.append((lease.number, lease.ready, lease.final))

    def fill(self, slot: int, key: BlockKey) -> None:
        self.arena.slot_views(slot)[0][:] = block_bytes(key, 0, LAYOUT.slot_bytes)

    def content(self, slot: int) -> bytes:
        return bytes(self.arena.slot_views(slot)[0])

    def store(self, keys: list[BlockKey], parent: BlockKey | None = None, tenant: str = "") -> list[int]:
        """Reserve, fill and commit."""
        number = next(self.numbers)
        slots = self.space.reserve(ME, number, parent, keys, tenant=tenant)
        for key, slot in zip(keys, slots, strict=True):
            if slot >= 0:
                self.fill(slot, key)
        self.space.commit(ME, number)
        return slots

    def finish_all(self) -> None:
        """Every read and write ends."""
        self.space.pump()
        while self.tier.release():
            self.space.pump()

    def only_on_disk(self, keys: list[BlockKey]) -> None:
        self.store(keys)
        self.finish_all()
        self.space.clear("host")
        assert self.space.disk is not None
        assert all(
            self.space.host_pool.find(key) is None and self.space.disk.pool.find(key) is not None
            for key in keys
        )

    def stop(self) -> None:
        """An orderly end; the medium stays."""
        self.space.close(keep=True)
        self.open = False

    def close(self) -> None:
        if self.open:
            self.space.close(keep=False)
        self.medium.close()
