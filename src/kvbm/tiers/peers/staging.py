"""Memory between a manager and its mover, divided into places for one block each."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from kvbm.tiers.peers.wire import PLACES_MAX


def places_within(total_bytes: int, block_bytes: int) -> int:
    """How many blocks so much memory has places for: 0 where not even one fits."""
    return min(PLACES_MAX, total_bytes // block_bytes)


class Staging:
    """Anonymous memory whose size nobody can change; the mover maps it by `fd`, which is closed by `forget_fd`.

    Only its owner's thread takes places and gives them back. The memory stays as long as somebody has a view of it.
    """

    def __init__(self, place_bytes: int, places: int) -> None:
        """Raises OSError where there is no memory."""
        assert place_bytes > 0 and 0 < places <= PLACES_MAX
        self.place_bytes, self.places = place_bytes, places
        self.size = place_bytes * places
        self.fd = os.memfd_create("kvbm-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._map = mmap.mmap(self.fd, self.size)
        except OSError:
            os.close(self.fd)
            raise
        self._view = memoryview(self._map)
        self._free = list(range(places - 1, -1, -1))

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """A place that is free. The one that was given back last comes first: it is still in the CPU's cache."""
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """Nothing is written to it or read from it any more."""
        self._free.append(place)

    def view(self, place: int, size: int) -> memoryview:
        """The first `size` bytes of a place."""
        assert size <= self.place_bytes
        first = place * self.place_bytes
        return self._view[first : first + size]

    def forget_fd(self) -> None:
        """The mover has it, or will never have it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Let it go, unless somebody still has a view."""
        self.forget_fd()
        with contextlib.suppress(BufferError):  # it goes with the last view
            self._view.release()
            self._map.close()
