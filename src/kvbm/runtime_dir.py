"""The directory of sockets, locks and memos, and which of its files may be believed.

It often lies at a path that anybody can guess (`/tmp/kvbm-<uid>`) and that another user may have made first. So the
directory is checked before a file in it is read or written: it must be no link, it must be ours, and no other user may
write to it. Its files are never reached through a link either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from kvbm.errors import SettingsError
from kvbm.peers import ROOT, is_ourselves, nameless_as
from kvbm.settings import variable

FIELD = variable("runtime_dir")
_ACCEPTED = "a directory that only you own and can write to (at most 0755), not through a link"
_READ_BYTES_MAX = 64 << 20


def make_runtime_dir(path: str) -> None:
    """Make the directory, 0700, unless it is there. Raises SettingsError as `check_runtime_dir` does."""
    make_own_dir(path, FIELD)


def check_runtime_dir(path: str) -> bool:
    """Whether the directory is there. Raises SettingsError, in one line, for one that may not be used.

    One that others can read or enter is left as it is: somebody may have named his home directory, and every file of
    ours has a mode of its own (0600).
    """
    return _check(path, FIELD) >= 0


def check_own_dir(path: str, field: str) -> None:
    """Raise SettingsError, which names `field`, for a directory of another user, or one that others can write to."""
    _check(path, field)


def make_own_dir(path: str, field: str, mode: int = 0o700) -> None:
    """Make a directory that the user named, with this mode, whatever the umask. One that is there keeps its own.

    Missing directories above it are made as the umask says, or with this mode too where others are to enter it.
    Raises SettingsError, which names `field`, when it is not ours or others can write to it.
    """
    if _check(path, field) >= 0:
        return
    try:
        _make(os.path.join(os.getcwd(), _bare(path)), mode)
    except OSError as error:
        raise SettingsError(field, path, f"a directory that can be made ({error.strerror})") from None
    # Another process may have been faster.
    if _check(path, field) < 0:
        raise SettingsError(field, path, f"{_ACCEPTED}; it was removed at once")


def is_ours(path: str) -> bool:
    """Whether the files in this directory were written by us; False where there is none.

    Raises SettingsError, in one line, when somebody else could have written it.
    """
    return _check(path, "the directory") >= 0


def read_private(path: str, secret: bool = False) -> bytes:
    """The content of a file of ours.

    Raises OSError for a link, for anything but a plain file, and for a file that others own or can write to; also for
    one that others can read, if it has a secret.
    """
    # A pipe or a device must not hold us up.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        refuse_foreign(os.fstat(fd), secret)
        return file.read(_READ_BYTES_MAX)


def read_provided(path: str) -> bytes:
    """The content of a file with a secret that an operator put there.

    It may be ours, as for `read_private`; or root's, for a group of ours to read: so Kubernetes mounts a Secret where
    the pod has an `fsGroup`. Raises OSError for all else.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not _is_roots_for_our_group(status):
            refuse_foreign(status, secret=True)
        return file.read(_READ_BYTES_MAX)


def _is_roots_for_our_group(status: os.stat_result) -> bool:
    """Whether root alone writes to a plain file, and a group of ours alone reads it."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != ROOT or stat.S_IMODE(status.st_mode) & 0o037:
        return False
    return status.st_gid in (os.getegid(), *os.getgroups())


def refuse_foreign(status: os.stat_result, secret: bool = False) -> None:
    """Raises OSError for an open file that others own or can write to, or read if it has a secret, and for anything but
    a plain file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EPERM, "it is no plain file")
    refused = 0o077 if secret else 0o022
    if not is_ourselves(status.st_uid) or stat.S_IMODE(status.st_mode) & refused:
        group = f", group {status.st_gid}" if secret else ""
        said = f"user {status.st_uid} owns it, mode {stat.S_IMODE(status.st_mode):o}{group}"
        raise OSError(errno.EPERM, said)


def replace_private(path: str, content: bytes) -> None:
    """Write a file of ours, 0600, as a whole: a reader finds the old content or the new. Raises OSError."""
    scratch = f"{path}.{os.getpid()}-{secrets.token_hex(4)}"
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised
            os.unlink(scratch)
        raise


def open_lock(path: str) -> int:
    """The descriptor of a lock file of ours, made 0600 when it is not there. Raises OSError, for a link too."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make(path: str, mode: int) -> None:
    """A directory and those above it. Only directories that we make get the mode."""
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        if mode & 0o077:
            _make(above, mode)
        else:
            os.makedirs(above, exist_ok=True)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _check(path: str, field: str) -> int:
    """The mode of a directory that is ours; -1 where there is none."""
    try:
        status = os.lstat(_bare(path))
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise SettingsError(field, path, f"{_ACCEPTED} ({error.strerror})") from None
    mode = stat.S_IMODE(status.st_mode)
    found = ""
    if stat.S_ISLNK(status.st_mode):
        found = f"this is a link that user {status.st_uid} made"
    elif not stat.S_ISDIR(status.st_mode):
        found = "this is no directory"
    elif not is_ourselves(status.st_uid):
        found = f"this is user {status.st_uid}'s, and you are user {nameless_as() or os.geteuid()}"
    elif mode & 0o022:
        found = f"this has mode {mode:o}"
    if found:
        raise SettingsError(field, path, f"{_ACCEPTED}; {found}")
    return mode


def _bare(path: str) -> str:
    """The path without the slashes that would make the kernel follow a link at its end."""
    while len(path) > 1 and path.endswith(("/", "/.")):
        path = path[:-1]
    return path
