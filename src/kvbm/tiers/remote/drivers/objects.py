"""Blobs as objects of S3, GCS, Azure, or whatever else `obstore` speaks to.

An object's time of modification cannot be changed without writing it again, so a blob in use has a *mark* beside it: an
object of no bytes, `used/<name>`, whose own time is the later one. Marks are listed in step with the blobs.

What a store can do is not known before the first request, which makes a few trials (`probing.find_traits`): some
servers ignore If-None-Match, and some answer to a range with the whole object.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import RESERVED, BlobInfo, Buffer, Put, StoreError, valid_name
from kvbm.tiers.remote.drivers.object_troubles import ignores_ranges, is_no_store, status_of, trouble_of
from kvbm.tiers.remote.drivers.peculiarities import say_once
from kvbm.tiers.remote.drivers.store_clock import StoreClock

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BLOB_BYTES_MAX = 64 << 20
WHOLE_BYTES_MAX = 4 << 20
"""Of a blob where the store ignores ranges: each read of a part brings all of it."""
PAGE = 1000
"""Objects of one page of a listing, and of one request to delete: what S3 takes."""
UNORDERED_MAX = 1 << 20
"""A listing that does not come in order is sorted in memory, up to so many objects."""
USED = "used/"
CLOCK = "now/clock"

_Answer = TypeVar("_Answer")


class Traits(NamedTuple):
    """What a store can do. Found by trial, except for what its kind says."""

    refuses_second: bool = True
    """Of two puts with one name it refuses the second."""
    ranges: bool = True
    suffixes: bool = True
    """The last bytes can be asked for without knowing the size."""
    bulk_delete: bool = True
    """Many objects are deleted by one request, and one that is not there is no error."""
    ordered: bool = True
    """Objects are listed in the order of their names."""


class ObjectBlobs:
    """See `kvbm.tiers.remote.blobs.BlobStore`. `store` keeps the deadline of a request by its own options.

    `find_traits` is called before the first request and again until it answers; it may raise StoreError. `kind`: what
    is known of this kind of store beforehand.
    """

    def __init__(
        self,
        store: ObjectStore,
        place: str,
        clock: Clock,
        *,
        kind: Traits = Traits(),  # noqa: B008 (immutable)
        find_traits: Callable[[ObjectBlobs, Traits], Traits] | None = None,
        blob_bytes_max: int = BLOB_BYTES_MAX,
    ) -> None:
        self.place = place
        self.blob_bytes_max = blob_bytes_max
        self.notes: tuple[str, ...] = ()
        self._store = store
        self._traits = kind
        self._find_traits = find_traits
        self._finding = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._clock = StoreClock(self._asked_s, clock)

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        assert valid_name(name)
        traits = self._known()
        if not traits.refuses_second and self._size(name) is not None:
            return Put.EXISTS
        return self.put_object(name, parts, traits.refuses_second)

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        assert 0 <= start < end
        if not self._known().ranges:
            whole = self.whole(name)
            return None if whole is None else whole[start:end]
        return self.range(name, start, end)

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        assert length > 0
        traits = self._known()
        if not traits.ranges:
            whole = self.whole(name)
            return None if whole is None else (whole[-length:], len(whole))
        if not traits.suffixes:
            size = self._size(name)
            found = None if size is None else self.range(name, max(0, size - length), max(1, size))
            return None if found is None or size is None else (found, size)

        def last() -> tuple[Buffer, int]:
            answer = obstore.get(self._store, name, options={"range": {"suffix": length}})
            return memoryview(answer.bytes()), answer.meta["size"]

        return self._found("get", name, last)

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`. Costs a request for each page of blobs and one for each page of marks."""
        assert not prefix or prefix.endswith("/")
        self._known()
        marks = self._objects(USED + prefix)
        mark = next(marks, None)
        for blob in self._objects(prefix):
            if blob.name.partition("/")[0] in RESERVED:
                continue
            while mark is not None and mark.name[len(USED) :] < blob.name:
                mark = next(marks, None)
            if mark is not None and mark.name[len(USED) :] == blob.name:
                blob = blob._replace(modified_s=max(blob.modified_s, mark.modified_s))
            yield blob

    def touch(self, name: str) -> None:
        """See `BlobStore`. Two requests: a mark without its blob would stay for ever."""
        self._known()
        if self._size(name) is not None:
            self._do("put", USED + name, lambda: self._write(USED + name, b""))

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`. A blob goes before its mark, so that one without its mark is never left behind."""
        traits = self._known()
        if not traits.bulk_delete:
            for name in names:
                self._delete_one(name)
                self._delete_one(USED + name)
            return
        for begin in range(0, len(names), PAGE // 2):
            some = [word + name for word in ("", USED) for name in names[begin : begin + PAGE // 2]]
            what = f"{some[0]} and {len(some) // 2 - 1} more"
            self._do("delete", what, partial(obstore.delete, self._store, some))

    def now_s(self) -> float:
        """See `BlobStore`. As exact as the store tells times: to a second, mostly."""
        return self._clock.now_s()

    def requests(self) -> dict[str, int]:
        """See `BlobStore`."""
        with self._counting:
            return {kind: self._requests[kind] for kind in ("put", "get", "list", "delete")}

    def close(self) -> None:
        """See `BlobStore`. The client lets its connections go with itself."""

    def delete_object(self, name: str) -> None:
        """One delete, without a trial before it."""
        self._delete_one(name)

    def put_object(self, name: str, parts: Sequence[Buffer], create: bool) -> Put:
        """One put, without a trial before it. `create`: the store shall refuse a second one.

        Raises Unknown where the store does not know what that means.
        """
        try:
            self._do("put", name, lambda: self._write(name, parts, create))
        except AlreadyExistsError:
            return Put.EXISTS
        return Put.CREATED

    def range(self, name: str, start: int, end: int) -> memoryview | None:
        """One read of a range, without a trial before it."""

        def part() -> memoryview:
            try:
                return memoryview(obstore.get_range(self._store, name, start=start, end=end))
            except BaseError as error:
                if status_of(error) == 416 or "StartTooLarge" in str(error):
                    return memoryview(b"")
                raise

        return self._found("get", name, part)

    def whole(self, name: str) -> memoryview | None:
        """All of an object."""
        return self._found("get", name, lambda: memoryview(obstore.get(self._store, name).bytes()))

    def _known(self) -> Traits:
        """What the store can do; finds it out first."""
        if self._find_traits is None:
            return self._traits
        with self._finding:
            if self._find_traits is not None:
                self._traits = self._find_traits(self, self._traits)
                self._find_traits = None
                if not self._traits.ranges:
                    self.blob_bytes_max = min(self.blob_bytes_max, WHOLE_BYTES_MAX)
                self.notes = _notes(self._traits)
                for note in self.notes:
                    say_once(self.place, note)
        return self._traits

    def _write(self, name: str, parts: Sequence[Buffer] | bytes, create: bool = False) -> None:
        # One request whatever the size: a blob is there whole or not at all, and an upload in parts would leave its
        # parts behind, unseen and billed, when we die.
        mode = "create" if create else "overwrite"
        obstore.put(self._store, name, parts, mode=mode, use_multipart=False)  # type: ignore[arg-type]  # it takes buffers

    def _size(self, name: str) -> int | None:
        return self._found("get", name, lambda: obstore.head(self._store, name)["size"])

    def _delete_one(self, name: str) -> None:
        self._found("delete", name, lambda: obstore.delete(self._store, name))

    def _asked_s(self) -> float:
        """The store's time: that of an object written just now."""
        self._do("put", CLOCK, lambda: self._write(CLOCK, b"now"))
        written = self._do("get", CLOCK, lambda: obstore.head(self._store, CLOCK))
        return written["last_modified"].timestamp()

    def _objects(self, prefix: str) -> Iterator[BlobInfo]:
        """Every object below a prefix, blobs or not, in the order of their names."""
        if self._known().ordered:
            yield from self._in_order(self._listed(prefix))
            return
        found: list[BlobInfo] = []
        for info in self._listed(prefix):
            found.append(info)
            if len(found) > UNORDERED_MAX:
                raise StoreError("failed", f"{self.place}: more than {UNORDERED_MAX} blobs in no order")
        yield from sorted(found)

    def _in_order(self, infos: Iterator[BlobInfo]) -> Iterator[BlobInfo]:
        # Marks and blobs are read in step. Out of order, a blob in use would look as if nobody used it.
        last = ""
        for info in infos:
            if info.name <= last:
                raise StoreError("failed", f"{self.place}: lists {info.name} after {last}")
            last = info.name
            yield info

    def _listed(self, prefix: str) -> Iterator[BlobInfo]:
        pages = obstore.list(self._store, prefix or None, chunk_size=PAGE)
        while True:
            page = self._do("list", prefix, lambda: next(pages, None))
            if page is None:
                return
            for meta in page:
                yield BlobInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def _found(self, kind: str, name: str, ask: Callable[[], _Answer]) -> _Answer | None:
        """As `_do`; None where there is no such object."""

        def found() -> _Answer | None:
            try:
                return ask()
            except FileNotFoundError as error:
                if is_no_store(error):
                    raise
                return None

        return self._do(kind, name, found)

    def _do(self, kind: str, name: str, ask: Callable[[], _Answer]) -> _Answer:
        """One request, counted. Raises StoreError, and AlreadyExistsError."""
        with self._counting:
            self._requests[kind] += 1
        try:
            return ask()
        except AlreadyExistsError:
            raise
        except (BaseError, OSError) as error:
            # Not chained: the client's own text may hold what no log shall.
            if ignores_ranges(error):
                raise RangesIgnored(self.place) from None
            if status_of(error) == 501 or isinstance(error, NotSupportedError):
                raise Unknown(self.place, f"{kind} {name}") from None
            raise trouble_of(error, self.place, f"{kind} {name}") from None


class Unknown(StoreError):
    """The store does not know this kind of request, or one of its headers."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__("failed", f"{place}: {what}: the store does not know such a request (501)")


class RangesIgnored(StoreError):
    """The store answered with the whole object where a part was asked for."""

    def __init__(self, place: str) -> None:
        super().__init__("failed", f"{place}: answers with the whole object where a part is asked for")


def _notes(traits: Traits) -> tuple[str, ...]:
    notes = []
    if not traits.refuses_second:
        notes.append(
            "ignores If-None-Match: a blob is looked for before it is written, and may be written twice"
        )
    if not traits.ranges:
        notes.append(f"ignores ranges: blobs are read whole, and are at most {WHOLE_BYTES_MAX >> 20} MiB")
    return tuple(notes)
