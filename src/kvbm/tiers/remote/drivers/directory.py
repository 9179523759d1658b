"""Blobs as files of a directory that several nodes mount: NFS, Lustre, CephFS, or a local one.

A blob is written to a file of another name beside its own, and gets its name by a hard link, which fails where there
is one already. Nothing is locked: servers that lose a lock, or clients that die with one, cannot hold anybody up.

Times are the server's, as far as it sets them: a touch asks it to set its own time. Lustre and CephFS take those of the
node that writes: there the nodes' clocks must agree.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import RESERVED, BlobInfo, Buffer, Put, StoreError, StoreTrouble, valid_name
from kvbm.tiers.remote.drivers.deadline import Deadline
from kvbm.tiers.remote.drivers.peculiarities import say_once
from kvbm.tiers.remote.drivers.store_clock import StoreClock

BLOB_BYTES_MAX = 64 << 20
THREADS = 16
LEFTOVER_S = 3600.0
"""A file that was not finished for so long belongs to nobody: its writer is dead."""

_IOV_MAX = 1024
_UNFINISHED = ".unfinished-"
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_TROUBLES: dict[int, StoreTrouble] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EACCES: "refused",
    errno.EPERM: "refused",
    errno.EROFS: "refused",
    errno.ELOOP: "refused",
    errno.ENOTDIR: "refused",
    errno.ETIMEDOUT: "slow",
    errno.EHOSTDOWN: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENOTCONN: "unreachable",
}

_Answer = TypeVar("_Answer")


class DirectoryBlobs:
    """See `kvbm.tiers.remote.blobs.BlobStore`. The directory must be there: what is not mounted is not made.

    `fsync`: a blob is on the server's disk before `put` returns. Without, a server that loses power may keep a blob
    cut short, which whoever reads it finds out.
    """

    def __init__(
        self,
        root: Path,
        clock: Clock,
        *,
        deadline_s: float = 10.0,
        fsync: bool = False,
        blob_bytes_max: int = BLOB_BYTES_MAX,
        thread_count: int = THREADS,
    ) -> None:
        self.place = f"file://{root}"
        self.blob_bytes_max = blob_bytes_max
        self.notes: tuple[str, ...] = ()
        self._root = root
        self._fsync = fsync
        self._deadline = Deadline(self.place, deadline_s, thread_count)
        self._clock = StoreClock(self._asked_s, clock)
        self._requests: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._uid: int | None = None
        """Who we are to the server: it may know us by another number. None before the first request."""

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        assert valid_name(name)
        return self._do("put", name, lambda given_up: self._put(name, parts, given_up))

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        assert 0 <= start < end

        def part(fd: int, size: int) -> Buffer:
            return _read(fd, min(start, size), min(end, size))

        return self._do("get", name, lambda _: self._opened(name, part))

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        assert length > 0

        def last(fd: int, size: int) -> tuple[Buffer, int]:
            return _read(fd, max(0, size - length), size), size

        return self._do("get", name, lambda _: self._opened(name, last))

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`. A page is a directory. Removes what dead writers left behind."""
        assert not prefix or prefix.endswith("/")
        blobs, below = self._do("list", prefix, lambda _: self._scanned(prefix))
        for name in sorted([*blobs, *below]):
            if name in blobs:
                yield blobs[name]
            else:
                yield from self.listing(name)

    def touch(self, name: str) -> None:
        """See `BlobStore`."""

        def now(_: object) -> None:
            with self._folder(name) as folder:
                if folder is not None:
                    os.utime(_last(name), None, dir_fd=folder, follow_symlinks=False)

        self._do("put", name, lambda given_up: _unless_missing(lambda: now(given_up)))

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`. Directories stay: another node may be about to write into them."""
        for name in names:
            self._do("delete", name, lambda _, name=name: self._delete(name))  # type: ignore[misc]  # its default

    def now_s(self) -> float:
        """See `BlobStore`."""
        return self._clock.now_s()

    def requests(self) -> dict[str, int]:
        """See `BlobStore`. Calls, each of which may be several requests of the file system."""
        with self._lock:
            return {kind: self._requests[kind] for kind in ("put", "get", "list", "delete")}

    def close(self) -> None:
        """See `BlobStore`."""
        self._deadline.close()

    def _put(self, name: str, parts: Sequence[Buffer], given_up: threading.Event) -> Put:
        with self._folder(name, make=True) as folder:
            assert folder is not None
            if _is_there(_last(name), folder):
                return Put.EXISTS
            unfinished = _UNFINISHED + secrets.token_hex(8)
            try:
                self._write(unfinished, folder, parts)
                if given_up.is_set():
                    # Whoever asked may have changed the bytes since.
                    raise StoreError("slow", f"{self.place}: {name} was given up")
                created = self._named(unfinished, _last(name), folder)
            finally:
                _unless_missing(lambda: os.unlink(unfinished, dir_fd=folder))
            if created is Put.CREATED and self._fsync:
                _fsync_directory(folder)
            return created

    def _write(self, unfinished: str, folder: int, parts: Sequence[Buffer]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600, dir_fd=folder)
        try:
            left = [memoryview(part).cast("B") for part in parts if len(part)]
            while left:
                written = os.writev(fd, left[:_IOV_MAX])
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
            if self._fsync:
                os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        # NFS says only here that there was no room.
        os.close(fd)

    def _named(self, unfinished: str, last: str, folder: int) -> Put:
        """Give a finished file its name, unless another has it."""
        try:
            os.link(unfinished, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return Put.EXISTS
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # One that another node has written since `_is_there` is replaced by the same bytes: names say what is in
            # a blob.
            os.rename(unfinished, last, src_dir_fd=folder, dst_dir_fd=folder)
            self.notes = ("has no hard links: a blob may be written twice",)
            say_once(self.place, self.notes[0])
        return Put.CREATED

    def _opened(self, name: str, use: Callable[[int, int], _Answer]) -> _Answer | None:
        """What `use` makes of the file and its size; None where there is none."""
        with self._folder(name) as folder:
            if folder is None:
                return None
            try:
                fd = os.open(_last(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            try:
                return use(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)

    def _delete(self, name: str) -> None:
        with self._folder(name) as folder:
            if folder is not None:
                _unless_missing(lambda: os.unlink(_last(name), dir_fd=folder))

    def _scanned(self, prefix: str) -> tuple[dict[str, BlobInfo], list[str]]:
        """The blobs of one directory by name, and the prefixes below it."""
        blobs: dict[str, BlobInfo] = {}
        below: list[str] = []
        with self._folder(prefix, os.O_RDONLY) as folder:
            if folder is None:
                return blobs, below
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        if entry.name.startswith(_UNFINISHED):
                            self._remove_if_old(entry, folder)
                        elif entry.name.startswith(".") or (not prefix and entry.name in RESERVED):
                            continue
                        elif entry.is_dir(follow_symlinks=False):
                            below.append(f"{prefix}{entry.name}/")
                        elif entry.is_file(follow_symlinks=False):
                            found = entry.stat(follow_symlinks=False)
                            name = prefix + entry.name
                            blobs[name] = BlobInfo(name, found.st_size, found.st_mtime)
                    except FileNotFoundError:
                        continue
        return blobs, below

    def _remove_if_old(self, entry: os.DirEntry[str], folder: int) -> None:
        with self._lock:
            now_s = self._time_of_a_new_file()
        if entry.stat(follow_symlinks=False).st_mtime < now_s - LEFTOVER_S:
            os.unlink(entry.name, dir_fd=folder)

    def _asked_s(self) -> float:
        return self._do("put", "", lambda _: self._time_of_a_new_file())

    def _time_of_a_new_file(self) -> float:
        with self._folder("") as root:
            assert root is not None
            return _new_file(root).st_mtime

    @contextmanager
    def _folder(self, name: str, flags: int = os.O_PATH, make: bool = False) -> Iterator[int | None]:
        """The directory that holds a name; None where there is none. Refuses links and what is not ours on the way.

        Every step is opened by itself: nobody can put a link in place of a directory that has been looked at.
        """
        words = name.split("/")[:-1]
        fd = self._opened_root(os.O_PATH if words else flags)
        try:
            for depth, word in enumerate(words):
                if make:
                    try:
                        os.mkdir(word, 0o700, dir_fd=fd)
                    except FileExistsError:
                        pass
                last = depth == len(words) - 1
                try:
                    inner = os.open(word, _DIRECTORY | (flags if last else os.O_PATH), dir_fd=fd)
                except FileNotFoundError:
                    yield None
                    return
                os.close(fd)
                fd = inner
                self._require_ours(fd, "/".join(words[: depth + 1]))
            yield fd
        finally:
            os.close(fd)

    def _opened_root(self, flags: int) -> int:
        try:
            fd = os.open(self._root, _DIRECTORY | flags)
        except FileNotFoundError:
            raise StoreError("unreachable", f"{self.place} is not there: is it mounted?") from None
        try:
            mode = os.fstat(fd).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise StoreError("refused", f"{self.place}: everybody may write there (chmod o-w, or +t)")
            if self._uid is None:
                self._uid = _new_file(fd).st_uid
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _require_ours(self, fd: int, path: str) -> None:
        if os.fstat(fd).st_uid != self._uid:
            raise StoreError("refused", f"{self.place}/{path} is another user's directory")

    def _do(self, kind: str, name: str, work: Callable[[threading.Event], _Answer]) -> _Answer:
        """One call, counted, within the deadline. Raises StoreError."""
        with self._lock:
            self._requests[kind] += 1
        try:
            return self._deadline.run(lambda given_up: _fresh(lambda: work(given_up)))
        except OSError as error:
            trouble = _TROUBLES.get(error.errno or 0, "failed")
            said = "a link lies in place of a directory" if error.errno == errno.ELOOP else error.strerror
            raise StoreError(trouble, f"{self.place}: {kind} {name}: {said}") from error


def _fresh(work: Callable[[], _Answer]) -> _Answer:
    """Once more where the client's memory of a directory was stale."""
    try:
        return work()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return work()


def _unless_missing(work: Callable[[], None]) -> None:
    try:
        work()
    except FileNotFoundError:
        pass


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _is_there(last: str, folder: int) -> bool:
    try:
        os.stat(last, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _new_file(folder: int) -> os.stat_result:
    """What the server says of a file that was just made."""
    name = _UNFINISHED + secrets.token_hex(8)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=folder)


def _read(fd: int, start: int, end: int) -> memoryview:
    """The bytes of a file; fewer where it has become shorter."""
    buffer = memoryview(bytearray(end - start))
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], start + done)
        if not count:
            break
        done += count
    return buffer[:done]


def _fsync_directory(folder: int) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
