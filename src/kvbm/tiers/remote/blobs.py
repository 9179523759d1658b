"""The contract of a store of named blobs: what a driver (objects, a directory, Redis) has to be able to do.

A blob is written once, under a name that says what is in it, and never changed; it has at least one byte. Names are
relative to the store's own prefix, of `a-z`, `0-9`, `-`, `_`, `.` and `/`, at most 200 characters; no part between
slashes is empty or begins with a dot, and the first part is none of `RESERVED`, which drivers keep for themselves.
Methods block, are called by several threads at once, and give up after the request deadline that the driver was made
with (`listing`: of each page). `kvbm.testing.blob_contract` checks a driver.

Nothing that a store answers is believed: whoever reads a blob verifies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from kvbm.errors import KvbmError

Buffer = bytes | bytearray | memoryview

RESERVED = ("used", "now", "probe")
"""First parts of names that a driver has for itself: its marks of what is in use, its clock, its trials."""

_PART = "[a-z0-9_-][a-z0-9._-]*"
_NAME = re.compile(rf"(?!(?:{'|'.join(RESERVED)})(?:/|$))(?:{_PART}/)*{_PART}")


def valid_name(name: str) -> bool:
    """Whether a blob may have this name."""
    return len(name) <= 200 and _NAME.fullmatch(name) is not None


StoreTrouble = Literal["unreachable", "slow", "refused", "full", "throttled", "failed"]
"""`refused`: the credentials or their rights; `throttled`: too many requests; `failed`: it answers with an error."""


class StoreError(KvbmError):
    """A store did not do what it was asked: one line for people, without credentials, and its kind."""

    def __init__(self, trouble: StoreTrouble, line: str) -> None:
        super().__init__(line)
        self.trouble: StoreTrouble = trouble


class Put(Enum):
    """How a put ended."""

    CREATED = "created"
    EXISTS = "exists"
    """There is a blob of this name: it was left as it is."""


class BlobInfo(NamedTuple):
    """A blob's name, its bytes, and when it was written or last touched: seconds by the store's own clock."""

    name: str
    size: int
    modified_s: float


class BlobStore(Protocol):
    """A store of named blobs. The module's text has its contract."""

    place: str
    """What it is, for people: a URL without credentials."""
    blob_bytes_max: int
    """Blobs shall not be larger: what the store takes well. May get smaller with the first request, never larger."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What it was found to do otherwise than others, a line each, e.g. that it ignores ranges. None before the
        first request."""

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """Write a blob of these parts, whole or not at all, unless there is one. Raises StoreError.

        After an error the blob may be there all the same. A store that cannot refuse overwrites it, with CREATED.
        """

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """The bytes from `start` to before `end`; fewer, or none, where the blob ends before; None where there is none.

        0 <= `start` < `end`. Raises StoreError.
        """

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """The last `length` bytes, at least 1 (all of a smaller blob), and the blob's size; None where there is none.

        Raises StoreError.
        """

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """The blobs whose names begin so, in the order of their names; pages are asked for as they are needed.

        `prefix` is empty or ends with `/`. What comes or goes meanwhile may be there or missing; whatever was there all
        the time is listed once. Raises StoreError, also in the middle.
        """

    def touch(self, name: str) -> None:
        """The blob is in use: from now on `listing` says that it was modified now. Nothing where there is none.

        Raises StoreError.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Remove blobs; those that are not there are no error. Raises StoreError."""

    def now_s(self) -> float:
        """What the store's clock says, the one of `BlobInfo.modified_s`. Raises StoreError."""

    def requests(self) -> dict[str, int]:
        """How many requests went to the store so far, by kind: `put`, `get`, `list`, `delete`.

        As they are billed, as far as a driver sees them: repetitions by a client library are not counted.
        """

    def close(self) -> None:
        """Let it go. Requests under way may fail."""
