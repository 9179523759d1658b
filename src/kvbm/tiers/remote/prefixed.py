"""A part of a store of blobs as a store of its own: what lies under one prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbm.tiers.remote.blobs import BlobInfo, BlobStore, Buffer, Put


class PrefixedBlobs:
    """The blobs of `store` whose names begin with `prefix`, which ends with `/`. `close` lets the whole store go."""

    def __init__(self, store: BlobStore, prefix: str) -> None:
        assert prefix.endswith("/")
        self._store = store
        self._prefix = prefix
        self.place = store.place + ("" if store.place.endswith("/") else "/") + prefix
        self.blob_bytes_max = store.blob_bytes_max

    @property
    def notes(self) -> tuple[str, ...]:
        """See `BlobStore`."""
        return self._store.notes

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        """See `BlobStore`."""
        return self._store.put(self._prefix + name, parts)

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        """See `BlobStore`."""
        return self._store.read(self._prefix + name, start, end)

    def read_end(self, name: str, length: int) -> tuple[Buffer, int] | None:
        """See `BlobStore`."""
        return self._store.read_end(self._prefix + name, length)

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        """See `BlobStore`."""
        for info in self._store.listing(self._prefix + prefix):
            if info.name.startswith(self._prefix):
                yield info._replace(name=info.name[len(self._prefix) :])

    def touch(self, name: str) -> None:
        """See `BlobStore`."""
        self._store.touch(self._prefix + name)

    def delete(self, names: Sequence[str]) -> None:
        """See `BlobStore`."""
        self._store.delete([self._prefix + name for name in names])

    def now_s(self) -> float:
        """See `BlobStore`."""
        return self._store.now_s()

    def requests(self) -> dict[str, int]:
        """See `BlobStore`: those of the whole store."""
        return self._store.requests()

    def close(self) -> None:
        """See `BlobStore`."""
        self._store.close()
