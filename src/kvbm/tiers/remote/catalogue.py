"""What a node knows of a store: which packs there are, and where in them a block lies. Pure, and bounded by blocks.

Of a block it keeps 60 bits of its key, and in its pack 8 bytes of the key and its offset. So two keys can be taken for
one another: the record that is read says whose it is. A *place* is a pack's number and a block's position in it; the
numbers are never used again.

The packs that were neither learned nor used for the longest time are forgotten first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.tiers.remote.contract import NOWHERE, News
from kvbm.tiers.remote.packs import PRINT_BYTES, PackEntry

PLACES_PER_PACK = 1 << 16
PACK_BLOCKS_MAX = PLACES_PER_PACK - 1
"""One less, so that places of two packs never follow one another."""

NEWS_MAX = 1 << 15
"""So many blocks are told of between two calls of `news`, each way."""
COMPRESSED_MAX = 1 << 15
"""So many names of compressed packs are remembered; others are read anew at each listing of all packs."""

_UNSEEN = bytes(KEY_BYTES)
_DEAD = bytes(PRINT_BYTES)
_PRINT_SHIFT = 4
"""An int of 60 bits takes 32 bytes of memory, one of 64 takes 48."""


class Span(NamedTuple):
    """Records of a pack: the bytes from `start` to before `end` of the blob `name`. `offsets`: where each record
    begins, and the last one ends, counted from `start`."""

    name: str
    start: int
    end: int
    offsets: list[int]


class _Pack:
    """`prints` is `_DEAD` where a block proved to be wrong; `keys` are those that were seen, or `_UNSEEN`, joined."""

    __slots__ = ("_offsets", "first", "keys", "name", "prints", "size", "tail", "used_s")

    def __init__(self, entry: PackEntry, first: int, used_s: float) -> None:
        self.name = entry.name
        self.first = first
        self.prints: bytes | bytearray = entry.prints
        self.size = entry.size
        self.tail = entry.tail
        self.used_s = used_s
        self.keys: bytearray | None = None
        self._offsets = array("I" if entry.size < 1 << 32 else "Q", entry.offsets)

    @property
    def count(self) -> int:
        return len(self._offsets) - 1

    def says(self, entry: PackEntry) -> bool:
        """Whether this is what the entry says, and no block of it proved to be wrong."""
        return (
            self.prints == entry.prints and self.size == entry.size and tuple(self._offsets) == entry.offsets
        )

    def find(self, wanted: bytes) -> int:
        """The position of the block whose key begins so, or -1."""
        found = self.prints.find(wanted)
        while found % PRINT_BYTES and found >= 0:
            found = self.prints.find(wanted, found + 1)
        return found // PRINT_BYTES

    def span(self, position: int, count: int) -> Span:
        start = self._offsets[position]
        offsets = [offset - start for offset in self._offsets[position : position + count + 1]]
        return Span(self.name, start, start + offsets[-1], offsets)

    def key(self, position: int) -> BlockKey | None:
        """The block's key, if it was seen."""
        if self.keys is None:
            return None
        key = bytes(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])
        return None if key == _UNSEEN else BlockKey(key)

    def see(self, position: int, key: bytes) -> None:
        if self.keys is None:
            self.keys = bytearray(KEY_BYTES * self.count)
        self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES] = key

    def kill(self, position: int) -> None:
        if isinstance(self.prints, bytes):
            self.prints = bytearray(self.prints)
        self.prints[position * PRINT_BYTES : (position + 1) * PRINT_BYTES] = _DEAD
        if self.keys is not None:
            self.see(position, _UNSEEN)

    def revive(self, position: int, wanted: bytes) -> bool:
        """Undo `kill`; False where the block was not killed."""
        place = position * PRINT_BYTES
        if isinstance(self.prints, bytes) or self.prints[place : place + PRINT_BYTES] != _DEAD:
            return False
        self.prints[place : place + PRINT_BYTES] = wanted
        return True


class Catalogue:
    """Packs by name and number, blocks by a part of their keys. It belongs to one thread, but for `knows`."""

    def __init__(self, blocks_max: int, block_bytes: int) -> None:
        """Packs of blocks of `block_bytes`; compressed ones are not taken."""
        assert blocks_max > 0
        self._block_bytes = block_bytes
        self.blocks_max = blocks_max
        self.block_count = 0
        """Blocks of the packs that are known, also those that proved to be wrong or that are in two packs."""
        self.forgotten_packs = 0
        """So many were forgotten, or not taken, to keep the bound."""
        self.compressed_packs = 0
        """So many were not taken because they are compressed; beyond `COMPRESSED_MAX` they are not counted."""
        self._compressed: set[str] = set()
        self._next_number = 0
        self._by_number: OrderedDict[int, _Pack] = OrderedDict()
        self._by_name: dict[str, _Pack] = {}
        self._of_print: dict[int, _Pack] = {}
        self._came: dict[BlockKey, None] = {}
        self._gone: dict[BlockKey, None] = {}

    @property
    def pack_count(self) -> int:
        return len(self._by_name)

    def knows(self, name: str) -> bool:
        """Whether the pack is known, also as one that is compressed. Any thread."""
        return name in self._by_name or name in self._compressed

    def add(
        self, entry: PackEntry, used_s: float = 0.0, keys: Sequence[BlockKey] = (), *, older: bool = False
    ) -> bool:
        """Learn of a pack. False where it is known so already, is compressed, or there is no room.

        Of a name that is known, the last word counts: a pack that was removed may have been written again otherwise.

        `used_s`: when it was used last, as far as known. `keys`: those of its blocks, where this node has seen them.
        `older`: it is older than all others, so it goes first, and none goes for it.
        """
        count = entry.blocks
        known = self._by_name.get(entry.name)
        if known is not None:
            if known.says(entry):
                self._see_all(known, keys)
                return False
            self._forget(known)
        if entry.has_compressed(self._block_bytes):
            if entry.name not in self._compressed and len(self._compressed) < COMPRESSED_MAX:
                self._compressed.add(entry.name)
                self.compressed_packs += 1
            return False
        self._compressed.discard(entry.name)
        if not 0 < count <= PACK_BLOCKS_MAX or count + (self.block_count if older else 0) > self.blocks_max:
            self.forgotten_packs += 1
            return False
        while self.block_count + count > self.blocks_max:
            self._forget(next(iter(self._by_number.values())))
            self.forgotten_packs += 1
        number, self._next_number = self._next_number, self._next_number + 1
        pack = _Pack(entry, number * PLACES_PER_PACK, used_s)
        prints = _prints_of(entry.prints)
        if self._of_print.keys().isdisjoint(prints):
            self._of_print.update(zip(prints, repeat(pack)))
        else:
            self._add_known(pack, prints, older)
        self._by_number[number] = self._by_name[entry.name] = pack
        if older:
            self._by_number.move_to_end(number, last=False)
        self.block_count += count
        self._see_all(pack, keys)
        return True

    def _add_known(self, pack: _Pack, prints: Sequence[int], older: bool) -> None:
        """As `add`: blocks that are in another pack too are found in the newer one."""
        for position, number in enumerate(prints):
            other = self._of_print.get(number)
            if other is not None and older:
                continue
            self._of_print[number] = pack
            if other is not None and other.keys is not None:
                wanted = bytes(pack.prints[position * PRINT_BYTES : (position + 1) * PRINT_BYTES])
                found = other.find(wanted)
                key = other.key(found) if found >= 0 else None
                if key is not None:
                    pack.see(position, key)

    def places(self, keys: Sequence[BlockKey]) -> list[int]:
        """Where each block is believed to lie, or `NOWHERE`."""
        words = memoryview(b"".join(keys)).cast("Q")[:: KEY_BYTES // 8]
        packs = list(map(self._of_print.get, [word >> _PRINT_SHIFT for word in words.tolist()]))
        wanted, total = words.tobytes(), len(packs)
        if not any(packs):
            return [NOWHERE] * total
        places: list[int] = []
        while (done := len(places)) < total:
            pack = packs[done]
            position = (
                -1 if pack is None else pack.find(wanted[done * PRINT_BYTES : (done + 1) * PRINT_BYTES])
            )
            if pack is None or position < 0:
                places.append(NOWHERE)
                continue
            # A chain's blocks follow one another in a pack: all of them are found at once.
            count = _alike(pack.prints, position, wanted, done)
            places.extend(range(pack.first + position, pack.first + position + count))
        return places

    def tail(self, place: int) -> bool:
        """Whether the pack of this place is of a tail."""
        pack = self._by_number.get(place // PLACES_PER_PACK)
        return pack is not None and pack.tail

    def span(self, place: int, count: int) -> Span | None:
        """The records of the `count` blocks from `place` on; None where they are not known any more."""
        pack = self._by_number.get(place // PLACES_PER_PACK)
        position = place % PLACES_PER_PACK
        return None if pack is None or position + count > pack.count else pack.span(position, count)

    def use(self, name: str, now_s: float) -> float:
        """The pack is in use: it goes last. When it was used before, as far as known."""
        pack = self._by_name.get(name)
        if pack is None:
            return now_s
        self._by_number.move_to_end(pack.first // PLACES_PER_PACK)
        return pack.used_s

    def used(self, keys: Sequence[BlockKey], told_s: float) -> list[str]:
        """These blocks are in use: their packs go last. Those packs of which the store was not told after `told_s`."""
        places = (place for place in self.places(keys) if place != NOWHERE)
        untold = list[str]()
        for number in dict.fromkeys(place // PLACES_PER_PACK for place in places):
            self._by_number.move_to_end(number)
            pack = self._by_number[number]
            if pack.used_s <= told_s:
                untold.append(pack.name)
        return untold

    def touched(self, name: str, now_s: float) -> None:
        """The store was told of its use."""
        pack = self._by_name.get(name)
        if pack is not None:
            pack.used_s = now_s

    def seen(self, place: int, keys: Sequence[BlockKey]) -> None:
        """These blocks were read from there, and verified."""
        pack = self._by_number.get(place // PLACES_PER_PACK)
        if pack is not None:
            for position, key in enumerate(keys, place % PLACES_PER_PACK):
                self._see(pack, position, key)

    def forget_pack(self, name: str) -> None:
        """There is no such pack."""
        pack = self._by_name.get(name)
        if pack is not None:
            self._forget(pack)

    def forget_block(self, place: int) -> None:
        """The block there is not the one that was looked for, or its bytes are wrong."""
        pack = self._by_number.get(place // PLACES_PER_PACK)
        if pack is not None:
            position = place % PLACES_PER_PACK
            (number,) = _prints_of(pack.prints[position * PRINT_BYTES : (position + 1) * PRINT_BYTES])
            self._drop(pack, position, number)
            pack.kill(position)

    def restore_block(self, place: int, key: BlockKey) -> None:
        """The block there is the one of this key after all: it may be looked for again."""
        pack = self._by_number.get(place // PLACES_PER_PACK)
        position = place % PLACES_PER_PACK
        if pack is not None and pack.revive(position, key[:PRINT_BYTES]):
            (number,) = _prints_of(key[:PRINT_BYTES])
            self._of_print.setdefault(number, pack)

    def news(self) -> News:
        """See `RemoteTier.news`."""
        news = News(tuple(self._came), tuple(self._gone))
        self._came.clear()
        self._gone.clear()
        return news

    def _see_all(self, pack: _Pack, keys: Sequence[BlockKey]) -> None:
        for position, key in enumerate(keys):
            self._see(pack, position, key)

    def _see(self, pack: _Pack, position: int, key: BlockKey) -> None:
        (number,) = _prints_of(key[:PRINT_BYTES])
        if self._of_print.get(number) is not pack or pack.key(position) is not None:
            return
        if len(self._came) < NEWS_MAX:
            pack.see(position, key)
            if self._gone.pop(key, _UNSEEN) is _UNSEEN:
                self._came[key] = None

    def _forget(self, pack: _Pack) -> None:
        del self._by_name[pack.name], self._by_number[pack.first // PLACES_PER_PACK]
        self.block_count -= pack.count
        for position, number in enumerate(_prints_of(pack.prints)):
            self._drop(pack, position, number)

    def _drop(self, pack: _Pack, position: int, number: int) -> None:
        if self._of_print.get(number) is not pack:
            return
        del self._of_print[number]
        key = pack.key(position)
        if key is None or self._came.pop(key, _UNSEEN) is not _UNSEEN:
            return
        while len(self._gone) >= NEWS_MAX:
            del self._gone[next(iter(self._gone))]
        self._gone[key] = None


def _prints_of(prints: bytes | bytearray) -> list[int]:
    return [word >> _PRINT_SHIFT for word in memoryview(prints).cast("Q").tolist()]


def _alike(prints: bytes | bytearray, position: int, wanted: bytes, first: int) -> int:
    """How many of the blocks from `position` on are those that are wanted from `first` on."""
    there, here = position * PRINT_BYTES, first * PRINT_BYTES
    longest = min(len(prints) - there, len(wanted) - here)
    if prints[there : there + longest] == wanted[here : here + longest]:
        return longest // PRINT_BYTES
    count = 0
    while (
        prints[there : there + PRINT_BYTES] == wanted[here : here + PRINT_BYTES]
        and count * PRINT_BYTES < longest
    ):
        there, here, count = there + PRINT_BYTES, here + PRINT_BYTES, count + 1
    return count
