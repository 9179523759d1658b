"""What peers said they hold, so that "where is this block" is answered from memory.

A block is known by its print, a part of its key. Each block of each peer gets a number when the peer speaks of it,
one after the other: a chain that a peer stored together mostly has consecutive ones. Peer and number make the *place*.

Written by the threads of the peers' links, under a lock; read by any thread without it.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvbm.block import BlockKey
from kvbm.tiers.peers.wire import PRINT_BYTES
from kvbm.tiers.remote.contract import NOWHERE

_NUMBER_BITS = 40
_IN_ONE_GO = 512
"""So many blocks are taken in under one lock."""
_print_of_key = struct.Struct("<Q24x")


def prints_of(keys: Sequence[BlockKey]) -> list[int]:
    """The print of each key."""
    return [each for (each,) in _print_of_key.iter_unpack(b"".join(keys))]


def link_of(place: int) -> int:
    """The number of the link that a place belongs to."""
    return place >> _NUMBER_BITS


def unpacked(prints: bytes) -> Sequence[int]:
    """Prints as they travelled. Raises ValueError where they are cut off."""
    if len(prints) % PRINT_BYTES:
        raise ValueError(f"{len(prints)} bytes are no whole number of prints")
    numbers = array("Q")
    numbers.frombytes(prints)
    return numbers


class Known:
    """All peers' blocks together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place_of: dict[int, int] = {}
        self._links: dict[int, PeerBlocks] = {}
        self._last_link = 0

    def __len__(self) -> int:
        """How many different blocks are known."""
        return len(self._place_of)

    def add_link(self, blocks_max: int) -> PeerBlocks:
        """A new peer, of whose blocks at most so many are kept: the newest."""
        with self._lock:
            self._last_link += 1
            link = self._links[self._last_link] = PeerBlocks(self, self._last_link, blocks_max)
        return link

    def remove_link(self, link: PeerBlocks) -> None:
        """The peer will not come back. Its places are never used again."""
        link.forget()
        with self._lock:
            self._links.pop(link.number, None)

    def places(self, prints: Iterable[int]) -> list[int]:
        """A place of each block, or NOWHERE."""
        get = self._place_of.get
        return [get(each, NOWHERE) for each in prints]

    def holds(self, prints: Iterable[int]) -> bytes:
        """Whether some peer holds each of them, a byte each: 1 or 0."""
        return bytes(map(self._place_of.__contains__, prints))

    def is_tail(self, place: int) -> bool:
        """Whether the block there is one of a tail."""
        link = self._links.get(link_of(place))
        return link is not None and place in link.tails

    def _came(self, link: PeerBlocks, prints: Sequence[int], tail: bool) -> None:
        for each in prints:
            if each in link.places:
                continue
            link.last_number += 1
            place = link.number << _NUMBER_BITS | link.last_number
            link.places[each] = place
            if tail:
                link.tails.add(place)
            self._place_of.setdefault(each, place)
            if len(link.places) > link.blocks_max:
                self._lost(link, *link.places.popitem(last=False))

    def _gone(self, link: PeerBlocks, prints: Sequence[int]) -> None:
        for each in prints:
            place = link.places.pop(each, None)
            if place is not None:
                self._lost(link, each, place)

    def _lost(self, link: PeerBlocks, each: int, place: int) -> None:
        link.tails.discard(place)
        if self._place_of.get(each) != place:
            return
        others = (other.places.get(each) for other in self._links.values() if other is not link)
        another = next((found for found in others if found is not None), None)
        if another is None:
            del self._place_of[each]
        else:
            self._place_of[each] = another


class PeerBlocks:
    """One peer's blocks. Its methods belong to the thread of that peer's link, but `drop`, which any may call."""

    def __init__(self, known: Known, number: int, blocks_max: int) -> None:
        self.number = number
        self.blocks_max = blocks_max
        self.places: OrderedDict[int, int] = OrderedDict()
        self.tails: set[int] = set()
        self.last_number = 0
        self._known = known

    def came(self, prints: Sequence[int], tail: bool = False) -> None:
        """The peer holds these blocks."""
        self.last_number += 1  # what came apart is not read together
        for first in range(0, len(prints), _IN_ONE_GO):
            with self._known._lock:
                self._known._came(self, prints[first : first + _IN_ONE_GO], tail)

    def gone(self, prints: Sequence[int]) -> None:
        """The peer holds them no more."""
        for first in range(0, len(prints), _IN_ONE_GO):
            with self._known._lock:
                self._known._gone(self, prints[first : first + _IN_ONE_GO])

    def drop(self, key: BlockKey) -> None:
        """The peer did not have this block when it was asked."""
        self.gone(prints_of((key,)))

    def forget(self) -> None:
        """Nothing is known of the peer."""
        while self.places:
            with self._known._lock:
                for _ in range(min(_IN_ONE_GO, len(self.places))):
                    self._known._lost(self, *self.places.popitem(last=False))
