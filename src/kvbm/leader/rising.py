"""Leases that outlive their requests, so that the blocks they wait for reach host memory for the next time.

An engine that asks once cannot wait for a read from disk. The manager gives up reads that no lease waits for; so the
lease of such a request is kept until its blocks have come. The number of these leases and of their blocks is bounded.
"""

from __future__ import annotations

from kvbm.leader.link import Link
from kvbm.leader.search import Search
from kvbm.protocol import Release

LEASES_MAX = 16
SHARE = 4
"""They hold one part in so many of what the engine may lease."""


class Rising:
    """The last messages about lookups whose blocks are on their way. Owned by the leader's thread."""

    def __init__(self, link: Link, on: bool) -> None:
        """Off, every lease ends at once."""
        self._link = link
        self._on = on
        self._waiting: dict[int, tuple[Release, int]] = {}
        self._life = link.life

    def __len__(self) -> int:
        return len(self._waiting)

    def release(self, search: Search, message: Release) -> None:
        """Send the message that ends the lookup's lease: now, or when its blocks have come."""
        if self._life != self._link.life:
            self._life = self._link.life
            self._waiting.clear()
        ready = self._link.ready
        share = (ready.lease_blocks if ready is not None else 0) // SHARE
        blocks = len(search.slots)
        fits = len(self._waiting) < LEASES_MAX and blocks + self._blocks <= share
        if self._on and search.answered and not search.final and search.life == self._link.life and fits:
            self._waiting[message.lookup] = message, blocks
        else:
            self._link.send(message)

    def ended(self, lookup: int) -> None:
        """No more blocks of this lookup will come."""
        waiting = self._waiting.pop(lookup, None)
        if waiting is not None and self._life == self._link.life:
            self._link.send(waiting[0])

    @property
    def _blocks(self) -> int:
        return sum(blocks for _, blocks in self._waiting.values())
