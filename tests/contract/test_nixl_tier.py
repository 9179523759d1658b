"""The public tier contract, run on the disk tier whose bytes NIXL moves: its POSIX plugin and plain memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.tier_contract import PersistentTierContract
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from kvbm.tiers.nixl.block_io import open_nixl
from kvbm.tiers.nixl.package import PACKAGES
from rigs.nixl_model import HostMemory

pytestmark = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, PACKAGES)), reason="NIXL is not installed (the extra `nixl`)"
)


class TestNixlTier(PersistentTierContract):
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
            io=open_nixl("POSIX", HostMemory(), 2),
        )


class TestNixlTierBuffered(TestNixlTier):
    o_direct = False
