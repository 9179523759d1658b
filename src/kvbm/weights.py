"""A digest of a model's weights: with it, KV of other weights under the same path never hits.

The digest covers content: of safetensors every tensor with its name, type and shape, however the tensors are spread
over files; of everything else that shapes KV the file. Paths, the number of shards and names of a model do not count.
The whole content is read, once on a node: results are remembered (`weights_memo`).
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from kvbm.weights_memo import WeightsMemo

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

_HEADER_BYTES_MAX = 100 << 20
_THREADS_FROM_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
_SUM_BITS = 256


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
    return digest_by(open_memo(memo_path), locations)


def open_memo(path: Path, beside: Callable[[], bool] = lambda: False) -> WeightsMemo:
    """The memo of digests of files' contents. While `beside` answers True, others on this machine have work to do:
    digests are made in the calling thread alone, without mapping files (`_digest_of`). It is asked for each piece."""
    return WeightsMemo(path, functools.partial(_content_digest, beside=beside))


def digest_by(memo: WeightsMemo, locations: Iterable[Path]) -> str | None:
    """`weights_digest` with a memo that is there."""
    digest = hashlib.sha256()
    for location in locations:
        if not location.exists():
            return None
        files = weight_files(location)
        if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
            return None
        # A sum: in which file a tensor lies, and in which order the files come, makes no difference.
        total = sum(int(each, 16) for each in memo.digests(files)) % (1 << _SUM_BITS)
        digest.update(total.to_bytes(_SUM_BITS // 8, "little"))
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


def _content_digest(file: BinaryIO, name: str, beside: Callable[[], bool]) -> str:
    """32 bytes in hex: of safetensors the sum of their tensors' digests, of other files the digest of name and bytes.

    A configuration counts without the entries that only name the model.
    """
    if name == "config.json":
        try:
            config = json.loads(file.read())
        except ValueError:
            config = None
        if isinstance(config, dict):
            return blake3(b"config\0" + canonical_config(config).encode()).hexdigest()
    size = os.fstat(file.fileno()).st_size
    tensors = list(_tensors(file, size)) if name.endswith(".safetensors") else []
    if not tensors:
        return _digest_of(file, (f"file\0{name}\0", 0, size), beside).hex()
    total = sum(int.from_bytes(_digest_of(file, tensor, beside), "big") for tensor in tensors)
    return (total % (1 << _SUM_BITS)).to_bytes(_SUM_BITS // 8, "big").hex()


def _digest_of(file: BinaryIO, part: tuple[str, int, int], beside: Callable[[], bool]) -> bytes:
    """The digest of some text, and of the file's bytes from one place to another.

    Beside a load one thread reads them piece by piece. A digest that was begun by one thread cannot go on with several:
    when the load ends, all processors begin anew with this part, if they are done sooner than the thread would be.
    """
    text, start, end = part
    digest = blake3(max_threads=1)
    digest.update(text.encode())
    buffer = memoryview(bytearray(min(_PIECE_BYTES, end - start)))
    at = start
    while at < end:
        sooner_anew = end - start < (end - at) * _processors()
        if end - start >= _THREADS_FROM_BYTES and not beside() and sooner_anew:
            return _digest_by_all_processors(file, part)
        count = os.preadv(file.fileno(), [buffer[: end - at]], at)
        if count == 0:
            raise OSError(errno.EIO, f"{file.name} was cut off while it was read")
        digest.update(buffer[:count])
        at += count
    return digest.digest()


def _digest_by_all_processors(file: BinaryIO, part: tuple[str, int, int]) -> bytes:
    """The same digest, of bytes that are mapped.

    Beside a load that would not do: its threads want the processors, mapped pages count as this process's memory, from
    which vLLM computes the size of a CPU's KV cache, and a file that is cut off meanwhile would end the process
    (SIGBUS) where reading it is an error.
    """
    text, start, end = part
    digest = blake3(max_threads=blake3.AUTO)
    digest.update(text.encode())
    base = start - start % mmap.ALLOCATIONGRANULARITY
    with (
        mmap.mmap(file.fileno(), end - base, prot=mmap.PROT_READ, offset=base) as mapped,
        memoryview(mapped) as content,
        content[start - base :] as wanted,
    ):
        digest.update(wanted)
    return digest.digest()


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _tensors(file: BinaryIO, file_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Each tensor of a safetensors file: what it is, in one line, and where its bytes begin and end.

    The format is an 8-byte little-endian length, a JSON object of that length, and the tensors' bytes. Nothing for a
    file that is not of this form, or whose tensors do not lie in it.
    """
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    base = 8 + size
    if file_bytes < 8 or not 0 < size <= min(file_bytes - 8, _HEADER_BYTES_MAX):
        return
    try:
        header = json.loads(file.read(size))
        entries = [
            (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    if not all(0 <= start <= end <= file_bytes - base for *_, start, end in entries):
        return
    for name, dtype, shape, start, end in entries:
        yield f"tensor\0{name}\0{dtype}\0{shape}\0", base + start, base + end
