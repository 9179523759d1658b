"""Our own recordings of requests: hashes, lengths and times, never a token.

JSON Lines, plain or gzip. The first line is the header, every other one a request::

    {"kvbm_trace": 1, "block_tokens": 16, "namespace": "9f2c51d0a1b2c3d4"}
    {"at_s": 0.0, "keys": "q83vEjRWeJA…", "prompt_tokens": 70, "output_tokens": 12, "seconds": 1.5}
    {"at_s": 4.2, "after": "q83vEjRWeJA", "keys": "…", "prompt_tokens": 118, "output_tokens": 30, "seconds": 2.0}

`keys` is unpadded base64 of 8 bytes for each full block of the prompt: its block key, which says the whole prefix up to
there, hashed with a salt that the file does not hold and cut. So equal keys mean equal prefixes inside one file, and
nobody who guesses a text can look for it. With `after`, the chain begins with that key and all before it, as an earlier
line had them: a conversation's history is written once. `namespace` is a digest of the fingerprint.
A recording that was cut short is one up to its last line end.
Requests may be in any order but for that; a reader sorts them by `at_s`, which counts from wherever the writer began.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
from blake3 import blake3

from kvbm.sim.traces.formats.records import Count, Positive, Time
from kvbm.sim.traces.formats.sessions import RecordedRequest, Source
from kvbm.sim.traces.formats.text import TraceError, decode, unusable

VERSION = 1
KEY_BYTES = 8
SALT_BYTES = 32
KNOWN_KEYS_MAX = 1_000_000
_DECIMALS = 6


class RecordingHeader(msgspec.Struct):
    """The first line. `namespace` is hexadecimal."""

    kvbm_trace: int
    block_tokens: Positive
    namespace: str = ""


class RecordingLine(msgspec.Struct, omit_defaults=True):
    """One request."""

    at_s: Time
    keys: str
    prompt_tokens: Count
    output_tokens: Count
    seconds: Time | None = None
    after: str = ""


class RecordingWriter:
    """Writes requests to an open file as they end. Memory is bounded: some 200 MB at most.

    `salt` is fresh for every recording unless given; files with the same salt show which prompts they share.
    """

    def __init__(
        self, file: IO[bytes], block_tokens: int, fingerprint: bytes = b"", salt: bytes | None = None
    ) -> None:
        self._file = file
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        assert len(self._salt) == SALT_BYTES
        self._known: set[bytes] = set()
        namespace = self._cut(fingerprint).hex() if fingerprint else ""
        self._write(RecordingHeader(VERSION, block_tokens, namespace))

    def add(
        self,
        at_s: float,
        keys: Sequence[bytes],
        prompt_tokens: int,
        output_tokens: int,
        seconds: float | None = None,
    ) -> None:
        """One request: when it came, the chained keys of its prompt's full blocks, and how long it took."""
        cut = [self._cut(key) for key in keys]
        known = 0
        while known < len(cut) and cut[known] in self._known:
            known += 1
        after = _text(cut[known - 1]) if known else ""
        if len(self._known) + len(cut) > KNOWN_KEYS_MAX:
            # The next line of each conversation is written in full again.
            self._known.clear()
        self._known.update(cut)
        took_s = None if seconds is None else round(seconds, _DECIMALS)
        line = RecordingLine(
            round(at_s, _DECIMALS), _text(b"".join(cut[known:])), prompt_tokens, output_tokens, took_s, after
        )
        self._write(line)

    def _cut(self, key: bytes) -> bytes:
        return blake3(key, key=self._salt).digest(KEY_BYTES)

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def read_recording(path: Path, numbered: Iterator[tuple[int, bytes]]) -> Source:
    """The recording in the lines of `path`. `TraceError` where it is not one, or has no whole line."""
    number, text = next(numbered, (1, b""))
    header = decode(f"{path}:{number}", text, RecordingHeader)
    if header.kvbm_trace != VERSION:
        raise unusable(f"{path}:{number}", "kvbm_trace", header.kvbm_trace, f"version {VERSION}")
    chains = _Chains()
    found = []
    for number, text in numbered:
        place = f"{path}:{number}"
        line = decode(place, text, RecordingLine)
        prefixes = chains.extend(
            _keys(place, "after", line.after), _keys(place, "keys", line.keys), place, line.after
        )
        found.append(
            RecordedRequest(line.at_s, prefixes, line.prompt_tokens, line.output_tokens, line.seconds)
        )
    return Source(header.block_tokens, [found])


class _Chains:
    """Every prefix seen so far: a number, and the number of the prefix one block shorter (0 for none)."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._parent = array("q", [0])

    def extend(self, after: list[bytes], keys: list[bytes], place: str, shown: str) -> array[int]:
        """The chain up to `after` (empty, or one known key), and `keys` behind it."""
        last = 0
        if after:
            last = self._number.get(after[-1], 0)
            if not last:
                raise unusable(place, "after", shown, "a key of an earlier line")
        chain = array("q")
        number = last
        while number:
            chain.append(number)
            number = self._parent[number]
        chain.reverse()
        for key in keys:
            number = self._number.setdefault(key, len(self._parent))
            if number == len(self._parent):
                self._parent.append(last)
            elif self._parent[number] != last:
                raise TraceError(
                    f"{place}: keys: {_text(key)!r} follows another block than in an earlier line"
                )
            chain.append(number)
            last = number
        return chain


def _text(keys: bytes) -> str:
    return base64.b64encode(keys).rstrip(b"=").decode()


def _keys(place: str, field: str, text: str) -> list[bytes]:
    try:
        joined = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise unusable(place, field, text, "base64") from None
    if len(joined) % KEY_BYTES:
        raise unusable(place, field, text, f"{KEY_BYTES} bytes for each key; these are {len(joined)}")
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
