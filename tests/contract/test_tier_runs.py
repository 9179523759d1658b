"""The public contract of runs, run on the disk tier, on the fake one, and on tiers that move single blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.host_arena_tier import HostArenaTier
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.run_tier_contract import PersistentRunTierContract, RunTierContract
from kvbm.tiers.contract import SlotTier
from kvbm.tiers.disk import geometry
from kvbm.tiers.disk.tier import open_disk_tier
from rigs.fake_tier import FakeMedium, FakeRunTier, FakeTier


class TestDiskRuns(PersistentRunTierContract):
    o_direct = True

    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> SlotTier:
        return open_disk_tier(
            tmp_path,
            layout,
            namespace,
            capacity_blocks=slot_count,
            io_threads=2,
            pending_limit=pending_limit,
            o_direct=self.o_direct,
        )


class TestDiskRunsBuffered(TestDiskRuns):
    o_direct = False


class TestDiskRunsOneShard(TestDiskRuns):
    layout = BlockLayout(block_tokens=64, shard_bytes=4096, shard_count=1)


class TestDiskRunsAcrossSlabs(TestDiskRuns):
    """Every run reaches over the end of a slab file."""

    @pytest.fixture(autouse=True)
    def small_slabs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(geometry, "SLAB_BYTES", 2 * self.layout.block_bytes)


class TestFakeRuns(PersistentRunTierContract):
    tier_type: type[FakeTier] = FakeRunTier

    @pytest.fixture(autouse=True)
    def media(self) -> Iterator[None]:
        self._media: dict[tuple[Path, bytes], FakeMedium] = {}
        yield
        for medium in self._media.values():
            medium.close()

    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> SlotTier:
        place = (tmp_path, namespace.fingerprint)
        if place not in self._media:
            self._media[place] = FakeMedium(layout, slot_count)
        return self.tier_type(self._media[place], pending_limit, by_hand=False)


class TestRunsOfSingleBlocks(TestFakeRuns):
    """A tier that knows of no runs, through the adapter."""

    tier_type = FakeTier


class TestRunsOfSingleBlocksInMemory(RunTierContract):
    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> SlotTier:
        return HostArenaTier(layout, slot_count, pending_limit)
