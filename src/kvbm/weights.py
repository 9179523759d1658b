"""A digest of a model's weights: what makes KV of other weights under the same path never hit.

The whole content of every weight file is hashed, once: results are remembered by the file's identity (device,
inode, size, modification and change time), as a version control system remembers files it has seen.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from kvbm.errors import SettingsError
from kvbm.runtime_dir import is_ours, make_own_dir, read_private, replace_private

log = logging.getLogger("kvbm.weights")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
CONFIG_SUFFIXES = (".json", ".py", ".model")
_MEMO_ENTRIES_MAX = 10_000
_SETTLED_S = 2.0


class WeightsMemo:
    """Digests already known, in one small file. A file that cannot be read or written only costs hashing again.

    Who can write to it can give other weights the name of ours. So it is used only where nobody else can: a memo or a
    directory of another user's, one that others can write to, or a link, is left alone, with one line that says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._changed = False
        self._in_use = True
        try:
            if is_ours(str(path.parent)):
                self._known = msgspec.json.decode(read_private(str(path)), type=dict[str, str])
        except FileNotFoundError:
            pass  # nothing was digested yet
        except msgspec.MsgspecError:
            pass  # of another version, or cut short: it is replaced
        except (OSError, SettingsError) as error:
            self._in_use = False
            _tell_unused(str(path), str(error))

    def digest(self, path: Path) -> str:
        """Hex blake3 of the file's content."""
        status = path.stat()
        identity = (
            f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
        )
        known = self._known.get(identity)
        if known is not None:
            return known
        value = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        # A file changed a moment ago could change again without its times moving: hash it again next time.
        if time.time() - max(status.st_ctime, status.st_mtime) > _SETTLED_S:
            self._known[identity] = value
            self._changed = True
        return value

    def save(self) -> None:
        """Write what was learnt, replacing the file as a whole."""
        if not self._changed or not self._in_use:
            return
        newest = dict(list(self._known.items())[-_MEMO_ENTRIES_MAX:])
        try:
            make_own_dir(str(self._path.parent), "the directory")
            replace_private(str(self._path), msgspec.json.encode(newest))
        except (OSError, SettingsError):
            return


@functools.cache
def _tell_unused(path: str, why: str) -> None:
    """Once in a process."""
    log.warning("digests of weights are not remembered in %s, and are made anew each time: %s", path, why)


def weight_files(location: Path) -> list[Path]:
    """The files that make a model what it is, sorted by name: one file, or those of a directory's top level."""
    if location.is_file():
        return [location]
    suffixes = WEIGHT_SUFFIXES + CONFIG_SUFFIXES
    return sorted(p for p in location.iterdir() if p.suffix in suffixes and p.is_file())


def changed_since(locations: Iterable[Path], moment_s: float) -> Path | None:
    """The first weight file that was written, replaced or touched after `moment_s` (seconds of the system's clock)."""
    for location in locations:
        for path in weight_files(location):
            status = path.stat()
            if max(status.st_ctime, status.st_mtime) >= moment_s:
                return path
    return None


def process_start_s() -> float:
    """When this process began, in seconds of the system's clock, up to a second early (proc_pid_stat(5))."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    for line in Path("/proc/stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "btime":
            return int(value) + ticks / os.sysconf("SC_CLK_TCK")
    raise OSError("/proc/stat has no btime")


def weights_digest(locations: Iterable[Path], memo_path: Path) -> str | None:
    """Hex digest over names and contents at the locations; None when one of them holds no weights."""
    memo = WeightsMemo(memo_path)
    digest = hashlib.sha256()
    for location in locations:
        if not location.exists():
            return None
        files = weight_files(location)
        if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
            return None
        for path in files:
            digest.update(f"{path.name}\0{memo.digest(path)}\0".encode())
    memo.save()
    return digest.hexdigest()
