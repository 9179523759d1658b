"""Disk tiers as tests open them, and directories that such tiers have left."""

from __future__ import annotations

import os
from pathlib import Path

from kvbm.layout import Namespace
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, OTHER_NAMESPACE
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier

SLOTS = 4


def open_tier(
    root: Path, namespace: Namespace = NAMESPACE, slots: int = SLOTS, **options: object
) -> DiskTier:
    return open_disk_tier(
        root,
        LAYOUT,
        namespace,
        capacity_blocks=slots,
        io_threads=1,
        **options,  # type: ignore[arg-type]
    )


def path_of(tier: DiskTier) -> Path:
    assert tier.path is not None
    return tier.path


def leave(root: Path, count: int, namespace: Namespace = OTHER_NAMESPACE, slots: int = SLOTS) -> list[Path]:
    """So many directories of tiers that have ended, the least recently used first."""
    tiers = [open_tier(root, namespace, slots, unowned_bytes=10**12) for _ in range(count)]
    paths = [path_of(tier) for tier in tiers]
    for age, tier in enumerate(tiers):
        tier.close(keep=True)
        os.utime(paths[age] / "journal", (1000.0 + age, 1000.0 + age))
    return paths
