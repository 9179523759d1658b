"""Where the master keys for sealing come from: a file that nobody else can read but root and a group of ours, or what a
command prints.

Either has a line `id:base64` for each key, 32 bytes each, the one that seals first; empty lines and lines that begin
with `#` are left out. No error shows any part of a line.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence

from kvbm.clock import Clock, monotonic
from kvbm.errors import SettingsError
from kvbm.runtime_dir import read_provided
from kvbm.tiers.remote.sealing import ID_PATTERN, MASTER_BYTES, MasterKey

KEYS_MAX = 16
TEXT_BYTES_MAX = 16 << 10
"""Sixteen keys and some comments are a fraction of it."""

_REAPING_S = 1.0
_ACCEPTED = "lines of id:base64, the key 32 bytes, the id 1 to 16 of a-z, A-Z, 0-9, - and _"


def keys_in(text: bytes, field: str, place: str) -> list[MasterKey]:
    """The keys of these lines. Raises SettingsError that names the line; `place` is where they come from."""
    if len(text) > TEXT_BYTES_MAX:
        raise SettingsError(
            field, place, f"it has more than {TEXT_BYTES_MAX} bytes; accepted are {_ACCEPTED}"
        )
    keys: list[MasterKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith(b"#"):
            continue
        key = _key_in(line)
        if isinstance(key, str):
            raise SettingsError(field, place, f"line {number} {key}; accepted are {_ACCEPTED}")
        if any(each.key_id == key.key_id for each in keys):
            raise SettingsError(
                field, place, f"line {number} has the id of a line before; each key has its own"
            )
        keys.append(key)
    if not 0 < len(keys) <= KEYS_MAX:
        raise SettingsError(
            field, place, f"it has {len(keys)} keys; 1 to {KEYS_MAX} are accepted, as {_ACCEPTED}"
        )
    return keys


def _key_in(line: bytes) -> MasterKey | str:
    """The key, or what is wrong with the line."""
    key_id, colon, coded = line.partition(b":")
    if not colon:
        return "has no colon"
    name = key_id.strip().decode("ascii", "replace")
    if not ID_PATTERN.fullmatch(name):
        return "has no id that can be used"
    try:
        secret = base64.b64decode(coded.strip(), validate=True)
    except binascii.Error:
        return "has no base64 behind its colon"
    if len(secret) != MASTER_BYTES:
        return f"has a key of {len(secret)} bytes"
    return MasterKey(name, secret)


def keys_from_file(path: str, field: str) -> list[MasterKey]:
    """The keys in a file of ours, 0600 or stricter, or of root's for our group. Raises SettingsError for `field`."""
    try:
        # A secret that Kubernetes mounts is a link; what counts is whose the file is that it leads to.
        text = read_provided(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise SettingsError(
            field,
            path,
            f"{error}; accepted is a file that nobody else owns, reads or writes (0600 or stricter), or root's that "
            "a group of ours may read (0640 or stricter), as Kubernetes mounts a Secret",
        ) from None
    return keys_in(text, field, path)


def keys_from_command(
    command: Sequence[str], timeout_s: float, field: str, clock: Clock = monotonic
) -> list[MasterKey]:
    """The keys that a command prints within `timeout_s` seconds. It is run as it is, by no shell.

    What it writes to standard error is dropped: it may have secrets. Raises SettingsError that names `field`.
    """
    assert command
    place = command[0]  # its arguments may have secrets
    try:
        text = _printed(command, clock() + timeout_s, clock)
    except TimeoutError:
        raise SettingsError(
            field,
            place,
            f"it has not ended within {timeout_s:g} s; accepted is a command that prints its keys",
        ) from None
    except (OSError, ValueError) as error:
        raise SettingsError(field, place, f"{error}; accepted is a command that prints its keys") from None
    return keys_in(text, field, place)


def _printed(command: Sequence[str], deadline_s: float, clock: Clock) -> bytes:
    """What it prints until it ends well; a byte more than accepted where it does not stop. Raises OSError, ValueError,
    and TimeoutError. The command and all that it started have ended afterwards, unless they left its process group."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout as pipe:
            text = _read(pipe.fileno(), deadline_s, clock)
        if len(text) > TEXT_BYTES_MAX:
            return text
        status = process.wait(max(0.0, deadline_s - clock()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel does not let it end: it stays
                process.wait(_REAPING_S)
    if status:
        raise OSError(f"it ended with status {status}")
    return text


def _read(fd: int, deadline_s: float, clock: Clock) -> bytes:
    """All that comes until the other end closes, or one byte more than accepted. Raises TimeoutError."""
    text = b""
    poll = select.poll()  # unlike `select`, it takes descriptors of any number
    poll.register(fd, select.POLLIN)
    while len(text) <= TEXT_BYTES_MAX:
        if not poll.poll(max(0.0, deadline_s - clock()) * 1000):
            raise TimeoutError
        more = os.read(fd, TEXT_BYTES_MAX + 1 - len(text))
        if not more:
            break
        text += more
    return text
