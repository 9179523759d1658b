"""The public tier contract, run on the disk tier: with O_DIRECT, without it, across slabs, and on tmpfs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.tier_contract import PersistentTierContract
from kvbm.tiers.disk import geometry
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier


class TestDiskTier(PersistentTierContract):
    o_direct = True

    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> DiskTier:
        return open_disk_tier(
            tmp_path,
            layout,
            namespace,
            capacity_blocks=slot_count,
            io_threads=2,
            pending_limit=pending_limit,
            o_direct=self.o_direct,
        )


class TestDiskTierBuffered(TestDiskTier):
    o_direct = False


class TestDiskTierInMemory(TestDiskTier):
    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        if not Path("/dev/shm").is_dir():
            pytest.skip("no /dev/shm here")
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbm-test-") as path:
            yield Path(path)


class TestDiskTierOneShard(TestDiskTier):
    layout = BlockLayout(block_tokens=64, shard_bytes=4096, shard_count=1)


class TestDiskTierAcrossSlabs(TestDiskTier):
    """Every run reaches over the end of a slab file."""

    @pytest.fixture(autouse=True)
    def small_slabs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(geometry, "SLAB_BYTES", 2 * self.layout.block_bytes)
