"""A digest of a model's weights: with it, KV of other weights under the same path never hits.

The digest covers content: of safetensors every tensor with its name, type and shape, however the tensors are spread
over files; of everything else that shapes KV the file. Paths, the number of shards and names of a model do not count.
The whole content is read, once: results are remembered by the file's identity (device, inode, size, modification and
change time), as a version control system remembers files it has seen.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from kvbm.errors import SettingsError
from kvbm.runtime_dir import is_ours, make_own_dir, read_private, replace_private

log = logging.getLogger("kvbm.weights")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
CONFIG_FILES = (
    "adapter_config.json",
    "config.json",
    "hf_quant_config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "quant_config.json",
    "quantize_config.json",
    "video_preprocessor_config.json",
)
"""The other files that shape a loaded model; without those of tokenizers, of sampling and of shards."""
_CODE_SUFFIX = ".py"
_SCALES = "scales"

PRESENTATION_KEYS = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Entries of a model's configuration that name it or its authors, and do not change its results."""

_MEMO_ENTRIES_MAX = 10_000
_MEMO_VERSION = "2"
_SETTLED_S = 2.0
_HEADER_BYTES_MAX = 100 << 20
_THREADS_FROM_BYTES = 1 << 20
_SUM_BITS = 256
_DIGEST = re.compile("[0-9a-f]{64}")


class WeightsMemo:
    """Digests already known, in one small file. A file that cannot be read or written only costs hashing again.

    A user who can write to it can give other weights the name of ours. So it is used only where no other user can: a
    memo or a directory of another user's, one that others can write to, or a link, is not used, and one line says so.
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
        """Hex digest of the file's content (`_content_digest`)."""
        status = path.stat()
        parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        identity = ":".join(map(str, (_MEMO_VERSION, *parts)))
        known = self._known.get(identity, "")
        if _DIGEST.fullmatch(known):
            return known
        value = _content_digest(path)
        # A file changed a moment ago could change again without its times moving: hash it again next time.
        if time.time() - max(status.st_ctime, status.st_mtime) > _SETTLED_S:
            self._known[identity] = value
            self._changed = True
        return value

    def save(self) -> None:
        """Write the new digests, replacing the file as a whole."""
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
    """The files that determine a model's results, sorted by name: one file, or those of a directory's top level."""
    if location.is_file():
        return [location]
    return sorted(path for path in location.iterdir() if _computed_with(path.name) and path.is_file())


def local_files(name: str, revision: str | None, downloads: str | None) -> Path | None:
    """The local files of a model given by path or by hub name."""
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json", cache_dir=downloads, revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(config).parent if isinstance(config, str) else None


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
    """Hex digest over the content of the locations; None when one of them holds no weights. Raises OSError."""
    memo = WeightsMemo(memo_path)
    digest = hashlib.sha256()
    for location in locations:
        if not location.exists():
            return None
        files = weight_files(location)
        if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
            return None
        # A sum: in which file a tensor lies, and in which order the files come, makes no difference.
        total = sum(int(memo.digest(path), 16) for path in files) % (1 << _SUM_BITS)
        digest.update(total.to_bytes(_SUM_BITS // 8, "little"))
    memo.save()
    return digest.hexdigest()


def canonical_config(config: dict[str, Any]) -> str:
    """A model's configuration as text, equal for configurations that compute the same: without names, in order."""
    return json.dumps(_without_names(config), sort_keys=True, default=str)


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items() if key not in PRESENTATION_KEYS}
    if isinstance(value, list | tuple):
        return [_without_names(item) for item in value]
    return value


def _computed_with(name: str) -> bool:
    if name.endswith(".json"):
        return name in CONFIG_FILES or _SCALES in name
    return name.endswith((*WEIGHT_SUFFIXES, _CODE_SUFFIX))


def _content_digest(path: Path) -> str:
    """32 bytes in hex: of safetensors the sum of their tensors' digests, of other files the digest of name and bytes.

    A configuration counts without the entries that only name the model.
    """
    if path.name == "config.json":
        try:
            config = json.loads(path.read_bytes())
        except ValueError:
            config = None
        if isinstance(config, dict):
            return blake3(b"config\0" + canonical_config(config).encode()).hexdigest()
    if path.stat().st_size == 0:
        return blake3(f"file\0{path.name}\0".encode()).hexdigest()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        data = memoryview(content)
        try:
            tensors = list(_tensors(data)) if path.suffix == ".safetensors" else []
            if not tensors:
                return _digest(f"file\0{path.name}\0", data).hex()
            total = 0
            for header, start, end in tensors:
                total += int.from_bytes(_digest(header, data[start:end]), "big")
            return (total % (1 << _SUM_BITS)).to_bytes(_SUM_BITS // 8, "big").hex()
        finally:
            data.release()


def _digest(header: str, data: memoryview) -> bytes:
    digest = blake3(max_threads=blake3.AUTO if len(data) >= _THREADS_FROM_BYTES else 1)
    digest.update(header.encode())
    with data:
        digest.update(data)
    return digest.digest()


def _tensors(data: memoryview) -> Iterator[tuple[str, int, int]]:
    """Each tensor of a safetensors file: what it is, in one line, and where its bytes begin and end.

    The format is an 8-byte little-endian length, a JSON object of that length, and the tensors' bytes. Nothing for a
    file that is not of this form, or whose tensors do not lie in it.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < size <= min(len(data) - 8, _HEADER_BYTES_MAX):
        return
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        entries = [
            (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    base = 8 + size
    if not all(0 <= start <= end <= len(data) - base for *_, start, end in entries):
        return
    for name, dtype, shape, start, end in entries:
        yield f"tensor\0{name}\0{dtype}\0{shape}\0", base + start, base + end
