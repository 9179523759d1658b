"""Settings of tiers, as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HOST_BLOCKS = 600
"""Holds all of the workload."""
SMALL_HOST_BLOCKS = 40
"""Holds two of the longest requests."""
TINY_HOST_BLOCKS = 10
"""Holds about half of the longest request."""
BLOCK_BYTES = 65_536


def host(blocks: int = HOST_BLOCKS) -> dict[str, str]:
    """A host tier alone."""
    return {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(blocks)}


def remote(store: Mapping[str, str], host_blocks: int = HOST_BLOCKS) -> dict[str, str]:
    """A host tier above a store that others use too. What is computed is written to it without much waiting."""
    return {**host(host_blocks), **store, "DYN_KVBM_REMOTE_LINGER_SECS": "1"}


def disk(directory: Path, host_blocks: int = 0) -> dict[str, str]:
    """A disk tier that holds everything, below a host tier of some blocks or none."""
    settings = {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "800",
        "DYN_KVBM_DISK_CACHE_DIR": str(directory),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    if host_blocks:
        return {**settings, **host(host_blocks)}
    # By default the way to this disk would be wider than the disk itself.
    return {**settings, "DYN_KVBM_DISK_STAGING_GB": str(SMALL_HOST_BLOCKS * BLOCK_BYTES / 1e9)}
