"""Room on the filesystem: which directories without an owner are kept, and how much is left to other programs.

A directory without an owner is the cache of a process that has ended. It stays, within a bound over all of them,
because its owner may come back: replicas of one model restart one after the other. And no tier of ours fills a
filesystem: the last part of it belongs to logs and to other programs.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

from kvbm.errors import TierError
from kvbm.tiers.disk.directory import (
    JOURNAL_NAME,
    LOCK_NAME,
    ClaimedDirectory,
    is_locked,
    last_used_s,
    list_directories,
    remove_directory,
)
from kvbm.tiers.disk.geometry import DiskGeometry, DiskSetting
from kvbm.tiers.disk.slabs import slab_name
from kvbm.tiers.disk.syscalls import Syscalls

log = logging.getLogger("kvbm.tiers.disk.tier")

UNOWNED_TIERS = 8
"""By default so many tiers of the size of the largest one there are kept without an owner, however old."""

UNOWNED_S = 7 * 86400.0
"""By default directories used within so many seconds stay, however large: the first of many replicas to
come back cannot know how many follow, and must leave all of them what they left."""

LEFT_SHARE = 100
LEFT_BYTES_MAX = 1 << 30
"""A hundredth of a filesystem is left to others, but no more than this: enough for logs and pid files on a large one,
and in proportion on a small one."""


class UnownedDirectory(NamedTuple):
    """A directory of this user's without an owner, and the bytes that it takes on the medium."""

    path: Path
    medium_bytes: int
    used_s: float


class NoRoom(OSError):
    """The request would go into the part of the filesystem that is left to others."""


def list_unowned(root: Path, ours: Path) -> list[UnownedDirectory]:
    """Those in `root`, but for `ours`, that this user could remove; the least recently used first."""
    found = [
        path for path in list_directories(root) if path != ours and _is_ours(path) and not is_locked(path)
    ]
    left = [UnownedDirectory(path, _medium_bytes(path), last_used_s(path)) for path in found]
    return sorted(left, key=lambda directory: directory.used_s)


def bound_unowned(
    root: Path, ours: Path, tier_bytes: int, limit_bytes: int | None, setting: DiskSetting
) -> None:
    """Remove unowned directories of any namespace, the least recently used first, until they take `limit_bytes`.

    None is UNOWNED_TIERS times the size of the largest of them and of ours, which may take `tier_bytes`; `tier_count`
    such tiers share one setting. Directories used within UNOWNED_S stay then, also beyond that.
    """
    left = list_unowned(root, ours)
    removable = left
    if limit_bytes is None:
        recent_s = _claimed_s(ours) - UNOWNED_S
        removable = [directory for directory in left if directory.used_s < recent_s]
        largest_bytes = max([tier_bytes, *(directory.medium_bytes for directory in left)])
        limit_bytes = UNOWNED_TIERS * setting.tier_count * largest_bytes
    total_bytes = sum(directory.medium_bytes for directory in left)
    for directory in removable:
        if total_bytes <= limit_bytes:
            return
        removed = remove_directory(directory.path)
        if removed:
            log.warning(
                "disk tier: removed %s, the least recently used that nobody owns: such directories may take %.3f GB "
                "together%s",
                directory.path,
                limit_bytes / 1e9,
                f" ({setting.unowned})" if setting.unowned else "",
            )
        if removed or is_locked(directory.path) or not directory.path.exists():
            total_bytes -= directory.medium_bytes  # else it could not be removed, and others have to go


def require_space(
    directory: ClaimedDirectory, root: Path, geometry: DiskGeometry, syscalls: Syscalls, field: str
) -> None:
    """Raise TierError unless the filesystem has room for all that is not allocated yet, and something is left.

    Directories without an owner are removed where that makes the room, the least recently used first: they would
    otherwise keep the space for an owner that may never come back. Where it would not, none is removed. To be called
    before the directory is trimmed: when it raises nothing was changed in it.
    """
    needed, excess = _needed_bytes(directory, geometry)
    if needed <= 0:
        return
    room = Room(syscalls, directory.path)
    unowned = list_unowned(root, directory.path)
    while (free := room.free_bytes() + excess) < needed:
        if free + sum(each.medium_bytes for each in unowned) < needed:
            raise TierError(
                f"disk tier: {directory.path} needs {needed / 1e9:.3f} GB more and {root} has "
                f"{free / 1e9:.3f} GB free, beside {room.left_bytes / 1e9:.3f} GB that are left to others: "
                f"lower {field} or free some space"
            )
        path = unowned.pop(0).path
        if remove_directory(path):
            log.warning("disk tier: removed %s, which nobody owns, to make room", path)


def _needed_bytes(directory: ClaimedDirectory, geometry: DiskGeometry) -> tuple[int, int]:
    """(bytes that the geometry's files have yet to allocate, bytes that will be given back). Raises OSError."""
    wanted = {slab_name(slab): geometry.slab_bytes(slab) for slab in range(geometry.slab_count)}
    wanted[JOURNAL_NAME] = geometry.journal_bytes
    needed, excess = sum(wanted.values()), 0
    for name in os.listdir(directory.dir_fd):
        allocated = os.stat(name, dir_fd=directory.dir_fd, follow_symlinks=False).st_blocks * 512
        kept = min(allocated, wanted.get(name, 0))
        needed -= kept
        if name in wanted or name.startswith("slab-"):
            excess += allocated - kept
    return needed, excess


class Room:
    """The filesystem under a directory, and the part of it, `left_bytes`, that is left to others."""

    def __init__(self, syscalls: Syscalls, path: Path) -> None:
        """Raises OSError."""
        self._syscalls = syscalls
        self._path = str(path)
        self.left_bytes = min(syscalls.filesystem_bytes(self._path) // LEFT_SHARE, LEFT_BYTES_MAX)

    def free_bytes(self) -> int:
        """The bytes that may still be written, 0 or more. Raises OSError."""
        return max(0, self._syscalls.free_bytes(self._path) - self.left_bytes)

    def require(self, size_bytes: int) -> None:
        """Raise NoRoom (ENOSPC) unless so much may still be written, OSError when that cannot be known."""
        if size_bytes > 0 and self.free_bytes() < size_bytes:
            text = f"the last {self.left_bytes / 1e9:.3f} GB of the filesystem are left to others"
            raise NoRoom(errno.ENOSPC, text)


def _claimed_s(ours: Path) -> float:
    """Now, by the clock that the other directories' times are of: the claim has just written the lock file."""
    try:
        return (ours / LOCK_NAME).lstat().st_mtime
    except OSError:
        return 0.0  # all others count as recent


def _is_ours(path: Path) -> bool:
    """This user's alone, as a directory that is claimed must be."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022


def _medium_bytes(path: Path) -> int:
    """The bytes that the directory takes, as far as it can be read."""
    try:
        return sum(entry.lstat().st_blocks * 512 for entry in (path, *path.iterdir()))
    except OSError:
        return 0
