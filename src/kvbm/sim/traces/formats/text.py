"""Files of JSON, plain or gzip, and one-line errors that name the file, the line, the field and the value."""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from kvbm.errors import KvbmError

log = logging.getLogger("kvbm.sim")

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_GZIP_MAGIC = b"\x1f\x8b"
_LFS_START = b"version https://git-lfs"
_VALUE_CHARACTERS_MAX = 60
_PATH = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class TraceError(KvbmError, ValueError):
    """A trace that cannot be read: one line with the place, the value found there, and what is accepted."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, with their numbers from 1. Errors name the file, and the line reached."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line := line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        place = f"{path}:{number}" if number else str(path)
        raise TraceError(f"{place}: cannot be read: {_reason(error)}") from None


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The same without what follows the last line end, as a writer that was killed leaves it, and a warning then."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if line := line.strip():
                    yield number, line
            else:
                return
    except EOFError:
        number += 1
    except (OSError, zlib.error) as error:
        raise TraceError(f"{path}:{number}: cannot be read: {_reason(error)}") from None
    log.warning("%s ends in the middle of line %d: what is before it is read", path, number)


def whole(path: Path) -> bytes:
    """Everything in the file."""
    try:
        with _open(path) as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {_reason(error)}") from None


def starts_as_json(path: Path) -> bool:
    """The first character that is no space opens a JSON object."""
    for _, line in lines(path):
        return line.startswith(b"{")
    return False


def decode(place: str, text: bytes, kind: type[_Struct]) -> _Struct:
    """The struct that the text holds; `place` is FILE or FILE:LINE."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise TraceError(f"{place}: {_explain(text, str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise not_json(place, text, error) from None


def not_json(place: str, text: bytes, error: Exception) -> TraceError:
    """The error for text that is not JSON at all."""
    if text.startswith(_LFS_START):
        return TraceError(f"{place}: this is a Git LFS pointer, not the file: fetch it with `git lfs pull`")
    return TraceError(f"{place}: not JSON: {error}; it begins with {_shown(text[:_VALUE_CHARACTERS_MAX])}")


def unusable(place: str, field: str, value: object, accepted: str) -> TraceError:
    """The error for a value that JSON allows and we do not."""
    return TraceError(f"{place}: {field}={_shown(value)} cannot be used: {accepted}")


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if packed else path.open("rb")


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the gzip stream ends too early"
    return str(getattr(error, "strerror", None) or error)


def _explain(text: bytes, message: str) -> str:
    """`field=value cannot be used: what is accepted`, out of a message of msgspec and the text that it is about."""
    found = _PATH.fullmatch(message)
    reason, steps = (found[1], found[2]) if found else (message, "")
    if missing := _MISSING.search(reason):
        steps = f"{steps}.{missing[1]}" if steps else missing[1]
        return f"{steps} is missing"
    value: Any = msgspec.json.decode(text)
    for name, position in _STEP.findall(steps):
        value = value[name] if name else value[int(position)]
    field = f"{steps}={_shown(value)}" if steps else _shown(value)
    return f"{field} cannot be used: {reason[0].lower()}{reason[1:]}".replace("`", "")


def _shown(value: object) -> str:
    shown = repr(value.decode(errors="replace") if isinstance(value, bytes) else value)
    return shown if len(shown) <= _VALUE_CHARACTERS_MAX else shown[: _VALUE_CHARACTERS_MAX - 1] + "…"
