"""Real filesystems that are too small, fill up, or are unmounted under a running tier."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.clock import ManualClock
from kvbm.errors import TierError
from kvbm.testing.stored_runs import DEADLINE_S, LAYOUT, NAMESPACE, by_slot, heal, load, make_key, store
from kvbm.tiers.disk.tier import WATCH_PERIOD_S, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of one MiB."""
    path = tmp_path / "mount"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvbm-test", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small filesystem needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill_up(path: Path) -> None:
    """Write until the filesystem refuses."""
    with path.open("wb", 0) as file:
        while True:
            file.write(bytes(4096))


def test_a_real_filesystem_that_is_too_small_is_refused(small_mount: Path) -> None:
    with pytest.raises(TierError, match=r"needs .* GB more and .* has .* GB free"):
        open_disk_tier(small_mount, LAYOUT, NAMESPACE, capacity_bytes=5_000_000)
    assert os.listdir(small_mount) == []


def test_a_real_filesystem_that_fills_up_refuses_new_blocks_until_there_is_room(small_mount: Path) -> None:
    sparse = FaultySyscalls(0, FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP))
    tier = open_disk_tier(small_mount, LAYOUT, NAMESPACE, capacity_blocks=20, syscalls=sparse)
    store(tier, LAYOUT, make_key(0), 0)
    with pytest.raises(OSError, match="No space left"):
        fill_up(small_mount / "other")
    for _ in range(2):
        refused = store(tier, LAYOUT, make_key(1), 1)
        assert refused.outcome is Outcome.RETRY
        assert "of the filesystem are left to others" in refused.error
        assert tier.fault == ""
        assert load(tier, LAYOUT, make_key(0), 0).outcome is Outcome.HIT
        tier.close(keep=True)
        tier = open_disk_tier(small_mount, LAYOUT, NAMESPACE, capacity_blocks=20, syscalls=sparse)
        assert sorted(by_slot(tier.recovered())) == [0], "found again in a full filesystem"
    assert store(tier, LAYOUT, make_key(2), 0).outcome is Outcome.HIT, "these bytes it has"
    (small_mount / "other").unlink()
    assert store(tier, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    tier.close(keep=False)


def test_a_filesystem_unmounted_under_a_running_tier_turns_it_off(small_mount: Path) -> None:
    clock = ManualClock()
    tier = open_disk_tier(small_mount, LAYOUT, NAMESPACE, capacity_blocks=4, clock=clock)
    store(tier, LAYOUT, make_key(0), 0)
    subprocess.run(["umount", "-l", str(small_mount)], check=True)
    clock.advance(WATCH_PERIOD_S)
    tier.poll()
    assert tier.drain(DEADLINE_S)
    assert "gone" in tier.fault
    assert heal(tier), "the directory below the mount point is writable here"
    assert list(tier.recovered()) == []
    tier.close(keep=False)
    subprocess.run(["mount", "-t", "tmpfs", "kvbm-test", str(small_mount)], check=True)
