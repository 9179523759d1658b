"""The directories of the disk tier: their owners, their namespaces, and how they are removed.

`DIR/dynamo-kvbm-disk-cache-<fingerprint, 12 digits>-<n>/` (0700) holds `lock`, `meta.json`, `journal`, `slab-000`, …
An owner holds an exclusive flock on `lock`, which ends with the process however it ends; a directory whose lock is
free was left behind, and the process that gets the lock may take it over or remove it. A shared flock means only "a
process is looking" (`is_locked`), and a claim waits until it ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from pathlib import Path

from kvbm.errors import SettingsError, TierError
from kvbm.peers import nameless_as
from kvbm.tiers.disk.directory_meta import (
    FORMAT_VERSION,
    META_NAME,
    DirectoryMeta,
    encode_meta,
    open_to_read,
    read_meta,
)
from kvbm.tiers.disk.syscalls import Syscalls, write_fully

log = logging.getLogger("kvbm.tiers.disk.tier")

DIRECTORY_PREFIX = "dynamo-kvbm-disk-cache-"
INDEX_COUNT_MAX = 256
_PID_BYTES_MAX = 32
LOCK_NAME, JOURNAL_NAME = "lock", "journal"
NEW_SUFFIX = ".new"
_CLAIM_ATTEMPTS = 200
_LOOKERS_PAUSE_S = 0.001
_UNWRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENOENT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


class ClaimedDirectory:
    """A directory whose lock we hold. `found` is the meta that was in it, None when there was none that can be read."""

    def __init__(self, syscalls: Syscalls, path: Path, dir_fd: int, lock_fd: int, created: bool) -> None:
        self._syscalls = syscalls
        self.path = path
        self.dir_fd = dir_fd
        self._lock_fd = lock_fd
        self.created = created
        self.found = None if created else read_meta(META_NAME, dir_fd)
        self.meta = self.found
        """What is in it now."""

    def write_meta(self, meta: DirectoryMeta) -> None:
        """Replace `meta.json` as a whole. Raises OSError."""
        text = encode_meta(meta)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = self._syscalls.open(META_NAME + NEW_SUFFIX, flags, dir_fd=self.dir_fd)
        try:
            write_fully(self._syscalls, fd, [memoryview(text)], 0, alignment=1)
        finally:
            self._syscalls.close(fd)
        self._syscalls.rename(META_NAME + NEW_SUFFIX, META_NAME, dir_fd=self.dir_fd)
        self.meta = meta

    def vanished(self) -> str:
        """Empty, or one phrase saying that the path no longer leads to this directory."""
        try:
            there = os.stat(self.path)
        except OSError as error:
            return f"the directory is gone ({error.strerror})"
        here = os.fstat(self.dir_fd)
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            return "the directory was replaced or another filesystem was mounted over it"
        return "lock was removed" if os.fstat(self._lock_fd).st_nlink == 0 else ""

    def release(self, remove: bool) -> None:
        """Give the directory up, and with `remove` delete it first. Never raises."""
        if remove and not self.vanished():
            shutil.rmtree(self.path, ignore_errors=True)
        for fd in (self.dir_fd, self._lock_fd):
            os.close(fd)


def claim_directory(
    root: Path, wanted: DirectoryMeta, syscalls: Syscalls, before: Path | None = None, field: str = "root"
) -> ClaimedDirectory:
    """Take one of the namespace's directories that has no owner.

    One with blocks that can be used comes first, of those the one that was held `before`, then those of the wanted
    size, then the one used last. So replicas that come back, in whatever order, find what they left, all together.
    Where there is none it is a new one, or one that nobody can read any more. A tier that does not persist always makes
    its own: it would empty another's and remove it. All others stay, but for those that were not meant to outlive their
    owner.

    Raises SettingsError, which names `field`, when `root` cannot be used, TierError when all are taken or the medium
    fails, or where it cannot be known which directories are ours.
    """
    if nameless := nameless_as():
        raise TierError(
            f"disk tier: the owners of directories in {root} cannot be known: we are user {nameless}"
        )
    short = wanted.namespace.short
    try:
        root.mkdir(parents=True, exist_ok=True)
        claimed = _claim_usable(root, wanted, syscalls, before) if wanted.persist else None
        claimed = claimed or _claim_index(root, wanted, syscalls)
        if claimed is None:
            raise TierError(f"disk tier: all {INDEX_COUNT_MAX} directories of {short} in {root} are taken")
    except OSError as error:
        if error.errno in _UNWRITABLE or isinstance(error, FileExistsError):
            raise SettingsError(
                field,
                str(root),
                f"a directory that this user can write to ({error.strerror})",
            ) from error
        raise TierError(f"disk tier: cannot make a directory in {root}: {error.strerror}") from error
    for path in list_directories(root):
        if path != claimed.path and _is_passing(path) and remove_directory(path):
            log.warning("disk tier: removed %s, left behind by a process that has ended", path)
    return claimed


def _claim_usable(
    root: Path, wanted: DirectoryMeta, syscalls: Syscalls, before: Path | None
) -> ClaimedDirectory | None:
    """The best of the directories whose blocks can be used; None when there is none that is free. Raises OSError."""
    found: list[tuple[bool, int, float, int, Path]] = []
    for path in list_directories(root, wanted.namespace.short):
        meta = read_meta(path / META_NAME)
        if meta is None or not meta.persist or not meta.same_blocks(wanted):
            continue
        # Shrinking one gives up blocks that a replica of that size would have found.
        fit = 0 if meta.slot_count == wanted.slot_count else 1 if meta.slot_count < wanted.slot_count else 2
        found.append((path != before, fit, -last_used_s(path), _index(path), path))
    for *_, path in sorted(found):
        claimed = _claim(path, syscalls, create=False)
        if claimed is None:
            continue
        if claimed.found is not None and claimed.found.same_blocks(wanted):
            return claimed
        claimed.release(remove=False)  # another process had it since we looked
    return None


def _claim_index(root: Path, wanted: DirectoryMeta, syscalls: Syscalls) -> ClaimedDirectory | None:
    """The first index without a directory, or with one whose blocks are of no use; None when all are taken.

    One with other blocks (another size of slab, say) is an engine's that may come back, and is emptied only when no
    index is left. A tier that does not persist takes nothing that it did not make. Raises OSError.
    """
    paths = [root / f"{DIRECTORY_PREFIX}{wanted.namespace.short}-{index}" for index in range(INDEX_COUNT_MAX)]
    for spare_blocks in (True, False) if wanted.persist else (True,):
        for path in paths:
            if spare_blocks and os.path.lexists(path):  # without a lock: its owner may be about to come
                meta = read_meta(path / META_NAME)
                if not wanted.persist or (meta is not None and meta.format == FORMAT_VERSION):
                    continue
            claimed = _claim(path, syscalls)
            if claimed is None:
                continue
            found = claimed.found
            holds_blocks = found is not None and found.format == FORMAT_VERSION
            if claimed.created or (wanted.persist and not (spare_blocks and holds_blocks)):
                return claimed
            claimed.release(remove=False)
    return None


def list_directories(root: Path, short: str = "") -> list[Path]:
    """The cache directories in `root`, of one namespace when `short` is given; by namespace and index."""
    try:
        found = [path for path in root.glob(f"{DIRECTORY_PREFIX}{short}*-*") if _index(path) >= 0]
    except OSError:
        return []
    return sorted(found, key=lambda path: (path.name.rpartition("-")[0], _index(path)))


def is_locked(path: Path) -> bool:
    """True while a process owns the directory. Looking never makes a claim fail."""
    try:
        fd = open_to_read(path / LOCK_NAME)
    except OSError:
        return False
    try:
        return not _flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def owner_pid(path: Path) -> int | None:
    """The process that wrote itself into the lock file last: the owner, while `is_locked`."""
    try:
        with open(open_to_read(path / LOCK_NAME), "rb") as file:
            return int(file.read(_PID_BYTES_MAX))
    except (OSError, ValueError):
        return None


def last_used_s(path: Path) -> float:
    """When it was opened, written or closed last, in seconds of the filesystem's clock; 0 where that is not known.

    Reading leaves no trace: a process that was killed had it in use until then, but is known only by the other three.
    """
    try:
        return (path / JOURNAL_NAME).lstat().st_mtime
    except OSError:
        return 0.0


def remove_directory(path: Path) -> bool:
    """Delete a directory without an owner. False when it is owned, another user's, or could not be deleted."""
    try:
        claimed = _claim(path, Syscalls(), create=False)
    except OSError:
        return False
    if claimed is None:
        return False
    claimed.release(remove=True)
    return not path.exists()


def _is_passing(path: Path) -> bool:
    """No process but its owner can ever ask for its blocks, or its owner wanted nothing left behind."""
    meta = read_meta(path / META_NAME)
    return meta is not None and (meta.namespace.ephemeral or not meta.persist)


def _index(path: Path) -> int:
    digits = path.name.rpartition("-")[2]
    return (
        int(digits)
        if digits.isascii() and digits.isdigit() and not path.is_symlink() and path.is_dir()
        else -1
    )


def _claim(path: Path, syscalls: Syscalls, create: bool = True) -> ClaimedDirectory | None:
    """Lock the directory, made if need be. None when another process has it or we may not use it. Raises OSError."""
    for _ in range(_CLAIM_ATTEMPTS):
        created = create and _make(path, syscalls)
        try:
            dir_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if not create:
                return None
            continue  # removed by its last owner since we looked
        except OSError as error:
            if created or error.errno not in (errno.EACCES, errno.ENOTDIR, errno.ELOOP):
                raise
            return None  # another user's, or no directory: the next index will do
        lock_fd = -1
        try:
            if not _private(dir_fd):
                os.close(dir_fd)
                return None
            lock_fd = syscalls.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, dir_fd=dir_fd)
            locked = _flock(lock_fd, fcntl.LOCK_EX)
            if locked and _still_leads(path, dir_fd, lock_fd):
                os.ftruncate(lock_fd, 0)
                os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
                return ClaimedDirectory(syscalls, path, dir_fd, lock_fd, created)
            # An owner excludes even a shared lock; a process that only looks does not.
            owned = not locked and not _flock(lock_fd, fcntl.LOCK_SH)
        except FileNotFoundError:
            owned = False  # removed under our hands: try again
        except OSError:
            _close_all(dir_fd, lock_fd)
            raise
        _close_all(dir_fd, lock_fd)
        if owned:
            return None
        time.sleep(_LOOKERS_PAUSE_S)
    return None


def _make(path: Path, syscalls: Syscalls) -> bool:
    try:
        syscalls.mkdir(str(path), 0o700)
    except FileExistsError:
        return False
    return True


def _private(dir_fd: int) -> bool:
    """Ours alone: in a directory that others may write to, another user could put false KV."""
    status = os.fstat(dir_fd)
    if status.st_uid != os.geteuid():
        return False
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        return False
    if mode & 0o077:
        os.fchmod(dir_fd, 0o700)
    return True


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_leads(path: Path, dir_fd: int, lock_fd: int) -> bool:
    """False when the directory was removed, or removed and made anew, between our opening and our locking it."""
    here, lock = os.fstat(dir_fd), os.fstat(lock_fd)
    try:
        there = os.stat(path, follow_symlinks=False)
        named = os.stat(LOCK_NAME, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return there.st_ino == here.st_ino and named.st_ino == lock.st_ino


def _close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
