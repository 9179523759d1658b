"""Blobs in a Mooncake Store, in the memory that nodes give to a pool; their names in a second store, the *index*.

Mooncake has values by key and no listing. So each pack (and each trial of the tier's, `probe`) is a value, and the
index has a blob of the same name and one byte, by which it is listed and touched. All else (logs, marks) is small and
lies in the index alone. What the index says is hearsay: a name without a value is no blob, and whoever finds that
takes the name out. A value without a name can be read and is listed nowhere; Mooncake evicts it in its time.

Keys: `<prefix>/<name>`. Mooncake refuses no second put and says nothing of it; what one looks at, it keeps for some
seconds (a lease), also what was only listed.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvbm.tiers.remote.blobs import BlobInfo, BlobStore, Buffer, Put, StoreError, StoreTrouble, valid_name
from kvbm.tiers.remote.drivers.mooncake_calls import MooncakeCalls
from kvbm.tiers.remote.drivers.mooncake_wire import (
    BLOB_BYTES_MAX,
    IS_THERE,
    NOT_FOUND,
    Answer,
    Ask,
    Operation,
)

PAGE = 500
_VALUES = re.compile(r"(?:.*/)?(?:packs|probe)/.*")
_ENTRY = b"1"

_GONE = (NOT_FOUND, -702, -703, -710, -712)
"""No such blob; none that can be read: it is being written, or has just gone."""
_TROUBLES: dict[int, tuple[StoreTrouble, str]] = {
    -200: ("full", "no node of the pool has room"),
    -101: ("full", "no node gives memory to the pool"),
    -707: ("slow", "the value's lease was over before it had come"),
    -800: ("failed", "the node that has the value, or should take it, does not answer"),
    -900: ("unreachable", "the master cannot be reached"),
    -901: ("slow", "the master does not answer"),
}


class MooncakeBlobs:
    """See `kvbm.tiers.remote.blobs.BlobStore`. Both `calls` and `index` are its own to close."""

    def __init__(self, calls: MooncakeCalls, index: BlobStore, place: str, prefix: str) -> None:
        self.place = place
        self.blob_bytes_max = BLOB_BYTES_MAX
        self.notes: tuple[str, ...] = ()
        self._calls = calls
        self._index = index
        self._prefix = prefix + "/"
        self._requests: Counter[str] = Counter()
        self._counting = threading.Lock()

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`. Of puts at once several may be told CREATED."""
        assert valid_name(name)
        if not _is_value(name):
            return self._index.put(name, parts)
        size = sum(memoryview(part).nbytes for part in parts)
        if not 0 < size <= BLOB_BYTES_MAX:
            raise StoreError("failed", f"{self.place}: put {name}: {size} bytes, over {BLOB_BYTES_MAX}")
        (code,) = self._ask("put", "put", [name], size=size, parts=parts)[0].codes
        if code not in (0, IS_THERE):
            raise self._trouble("put", name, code)
        if self._index.put(name, [_ENTRY]) is Put.EXISTS and code == 0:
            self._index.touch(name)  # of a value that had gone
        self.notes = self._index.notes
        return Put.EXISTS if code == IS_THERE else Put.CREATED

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        assert 0 <= start < end
        if not _is_value(name):
            return self._index.read(name, start, end)
        answer, data = self._ask("read", "get", [name], start=start, size=end - start)
        return data if self._there(name, answer) else None

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        assert length > 0
        if not _is_value(name):
            return self._index.read_end(name, length)
        answer, data = self._ask("end", "get", [name], size=length)
        return (data, answer.blob_size) if self._there(name, answer) else None

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`. Names whose values have gone are taken out."""
        page: list[BlobInfo] = []
        for info in self._index.listing(prefix):
            page.append(info)
            if len(page) == PAGE:
                yield from self._listed(page)
                page = []
        yield from self._listed(page)

    def touch(self, name: str) -> None:
        """See `BlobStore`."""
        self._index.touch(name)

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`."""
        values = [name for name in names if _is_value(name)]
        for begin in range(0, len(values), PAGE):
            some = values[begin : begin + PAGE]
            for name, code in zip(some, self._ask("remove", "delete", some)[0].codes, strict=True):
                if code < 0 and code not in _GONE:
                    raise self._trouble("delete", name, code)
        self._index.delete(names)

    def now_s(self) -> float:
        """See `BlobStore`: the index's clock."""
        return self._index.now_s()

    def requests(self) -> dict[str, int]:
        """See `BlobStore`: of both stores."""
        index = self._index.requests()
        with self._counting:
            return {kind: self._requests[kind] + index[kind] for kind in ("put", "get", "list", "delete")}

    def close(self) -> None:
        """See `BlobStore`. What this node gave to the pool goes."""
        self._calls.close()
        self._index.close()

    def _listed(self, page: Sequence[BlobInfo]) -> Iterator[BlobInfo]:
        values = [info.name for info in page if _is_value(info.name)]
        sizes = self._sizes(values) if values else {}
        self._forget([name for name, size in sizes.items() if size == NOT_FOUND])
        for info in page:
            size = sizes.get(info.name, info.size)
            if size >= 0:
                yield info._replace(size=size)

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        """The values' sizes; below 0 where there is none that can be read. Raises StoreError."""
        sizes = dict(zip(names, self._ask("sizes", "list", names)[0].codes, strict=True))
        for name, size in sizes.items():
            if size < 0 and size not in _GONE:
                raise self._trouble("list", name, size)
        return sizes

    def _there(self, name: str, answer: Answer) -> bool:
        (code,) = answer.codes
        if code == NOT_FOUND:
            with suppress(StoreError):  # the name goes with a later look
                self._forget([name])
        elif code < 0 and code not in _GONE:
            raise self._trouble("get", name, code)
        return code >= 0

    def _forget(self, names: Sequence[str]) -> None:
        """Take out names whose values have gone; one that came meanwhile gets its name again. Raises StoreError."""
        if not names:
            return
        self._index.delete(names)
        for name, size in self._sizes(names).items():
            if size >= 0:
                self._index.put(name, [_ENTRY])

    def _ask(
        self,
        operation: Operation,
        kind: str,
        names: Sequence[str],
        *,
        start: int = 0,
        size: int = 0,
        parts: Sequence[Buffer] = (),
    ) -> tuple[Answer, memoryview]:
        with self._counting:
            self._requests[kind] += 1
        keys = [self._prefix + name for name in names]
        return self._calls.ask(Ask(operation, keys, start, size), parts)

    def _trouble(self, kind: str, name: str, code: int) -> StoreError:
        trouble, said = _TROUBLES.get(code, ("failed", f"Mooncake answers with an error ({code})"))
        return StoreError(trouble, f"{self.place}: {kind} {name}: {said}")


def _is_value(name: str) -> bool:
    return _VALUES.fullmatch(name) is not None
