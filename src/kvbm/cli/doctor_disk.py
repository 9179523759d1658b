"""Checks of the disk tier's directory, and of the policy that guards it."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.cli.doctor_round_trip import SCRATCH_PREFIX
from kvbm.layout import PAGE_BYTES
from kvbm.present.numbers import format_bytes
from kvbm.settings import Settings, admission_notices, variable
from kvbm.tiers.disk.room import Room
from kvbm.tiers.disk.survey import directories_at
from kvbm.tiers.disk.syscalls import Syscalls

_IN_MEMORY = {"tmpfs", "ramfs"}
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs"}


def check_disk(settings: Settings, block_bytes: int) -> Iterator[Check]:
    """The directory, its room, O_DIRECT, and the admission policy."""
    field, root = variable("disk_dir"), Path(settings.disk_dir)
    if not settings.disk_on:
        yield ok("disk tier", f"off in these settings; {variable('disk_bytes')} turns it on")
        return
    there = existing_part(root)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        remedy = f"the disk tier cannot be opened: make it writable for user {os.geteuid()}, or set {field}"
        yield fault("disk directory", f"{there} is no directory that can be written", remedy)
        return
    yield _check_filesystem(root, there)
    yield _check_room(settings, block_bytes, there)
    yield _check_direct(settings, there)
    lines = admission_notices(settings, block_bytes)
    if lines:
        yield from (advice("disk admission", found, remedy) for found, remedy in lines)
    else:
        yield ok("disk admission", "the policy and the size of the disk tier go together")


def existing_part(path: Path) -> Path:
    """The path, or the deepest directory above it that is there: a manager makes the rest."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_filesystem(root: Path, there: Path) -> Check:
    name, kind = "disk directory", filesystem_kind(there)
    found = f"{root} on {kind or 'a filesystem of unknown kind'}"
    if there != root.absolute():
        found += " (it will be made)"
    field = variable("disk_dir")
    if kind in _IN_MEMORY:
        return advice(
            name, f"{found}, which is memory, not disk", f"set {field} to a directory on a local SSD"
        )
    if kind == "overlay":
        remedy = f"mount a volume of the host and set {field} to it"
        return advice(name, f"{found}, which goes with the container and is slow", remedy)
    if kind in _REMOTE:
        return advice(name, f"{found}, over the network", f"set {field} to a directory on a local SSD")
    return ok(name, found)


def filesystem_kind(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the filesystem that holds this directory; empty when that is not known."""
    kind, longest = "", -1
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    resolved = path.resolve()
    for line in lines:
        fields = line.split()
        point = Path(fields[1].replace("\\040", " "))
        if len(fields) > 2 and resolved.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = fields[2], len(point.parts)
    return kind


def _check_room(settings: Settings, block_bytes: int, there: Path) -> Check:
    name = "disk space"
    field = variable("disk_blocks" if settings.disk_blocks else "disk_bytes")
    wanted = settings.disk_blocks * block_bytes if settings.disk_blocks else settings.disk_bytes or 0
    try:
        free = Room(Syscalls(), there).free_bytes()
        ours = sum(_allocated_bytes(path) for path in directories_at(there))
    except OSError as error:
        return fault(name, f"{there}: {error.strerror}", "mend the filesystem, or use another directory")
    numbers = {"wanted_bytes": wanted, "free_bytes": free, "allocated_bytes": ours}
    found = f"{format_bytes(wanted)} wanted ({field}), {format_bytes(free)} free"
    if ours:
        found += f", {format_bytes(ours)} in cache directories"
    if free + ours < wanted:
        return fault(name, found, f"the disk tier cannot be opened: lower {field} or free space", **numbers)
    if free < wanted and ours:
        found += ", which a manager uses again or removes"
    return ok(name, found, **numbers)


def _allocated_bytes(directory: Path) -> int:
    """The bytes of a cache directory's files, as far as they can be read."""
    try:
        return sum(entry.lstat().st_blocks * 512 for entry in directory.iterdir())
    except OSError:
        return 0


def _check_direct(settings: Settings, there: Path) -> Check:
    name = "O_DIRECT"
    if not settings.disk_o_direct:
        found = f"switched off ({variable('disk_o_direct')}): blocks pass through the page cache"
        return advice(
            name, found, "leave it on unless the filesystem forbids it: the page cache takes memory and time"
        )
    trouble = direct_trouble(there)
    if not trouble:
        return ok(name, f"reads and writes in {there} bypass the page cache")
    remedy = (
        "it works, but through the page cache, which takes memory from the engine: use another filesystem "
        f"(ext4, xfs), or set {variable('disk_o_direct')}=true to say that this is meant"
    )
    return advice(name, f"{there} refuses it ({trouble})", remedy)


def direct_trouble(directory: Path) -> str:
    """Why a file in this directory cannot be written and read with O_DIRECT; empty when it can."""
    page = mmap.mmap(-1, PAGE_BYTES)
    path = ""
    try:
        handle, path = tempfile.mkstemp(prefix=SCRATCH_PREFIX, dir=directory)
        os.close(handle)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    finally:
        page.close()
        if path:
            os.unlink(path)
    return ""
