"""The blocks that a tier found at start, as columns: a million of them cost no step of Python each.

Needs numpy, which takes too long to load to be imported before there is a tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvbm.block import KEY_BYTES, BlockKey, SlotIndex
from kvbm.tiers.contract import RecoveredBlock

RECOVERED = np.dtype(
    [
        ("key", np.uint64, (KEY_BYTES // 8,)),
        ("parent", np.uint64, (KEY_BYTES // 8,)),
        ("engine_hash", np.uint64, (KEY_BYTES // 8,)),
        ("sequence", np.uint64),
        ("slot", np.int64),
        ("group", np.uint16),
        ("has_parent", np.bool_),
    ]
)
"""One row a block. Hashes are their bytes, in the machine's words; an `engine_hash` of zeros is not known."""
_HASH = np.dtype((np.void, KEY_BYTES))


class RecoveredBlocks:
    """Blocks as `RunTier.recovered` gives them: the oldest first, keys and slots distinct. They are the `rows` at these
    places, in this order."""

    def __init__(self, rows: np.ndarray, places: np.ndarray) -> None:
        self._keys = rows["key"][places]
        self._parents = rows["parent"][places]
        self._engine_hashes = rows["engine_hash"][places]
        self.sequences = rows["sequence"][places]
        self.slots = rows["slot"][places]
        self.groups = rows["group"][places]
        self.has_parent = rows["has_parent"][places]
        self.follows = self.has_parent.copy()
        """Whether the parent of each is the block before it in this order."""
        self.follows[:1] = False
        self.follows[1:] &= (self._parents[1:] == self._keys[:-1]).all(axis=1)

    @classmethod
    def of(cls, blocks: Iterable[RecoveredBlock]) -> RecoveredBlocks:
        """The same of blocks in any other form."""
        if isinstance(blocks, RecoveredBlocks):
            return blocks
        found = list(blocks)
        rows = np.zeros(len(found), RECOVERED)
        for name, hashes in (
            ("key", [block.key for block in found]),
            ("parent", [block.parent or bytes(KEY_BYTES) for block in found]),
            ("engine_hash", [block.engine_hash or bytes(KEY_BYTES) for block in found]),
        ):
            rows[name] = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, KEY_BYTES // 8)
        rows["sequence"] = [block.sequence for block in found]
        rows["slot"] = [block.slot for block in found]
        rows["group"] = [block.group for block in found]
        rows["has_parent"] = [block.parent is not None for block in found]
        return cls(rows, np.arange(len(rows)))

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[RecoveredBlock]:
        for at in range(len(self)):
            engine_hash = self._engine_hashes[at]
            yield RecoveredBlock(
                key=BlockKey(self._keys[at].tobytes()),
                slot=SlotIndex(int(self.slots[at])),
                sequence=int(self.sequences[at]),
                parent=self.parent(at),
                engine_hash=engine_hash.tobytes() if engine_hash.any() else b"",
                group=int(self.groups[at]),
            )

    def keys(self, part: slice) -> list[BlockKey]:
        """The keys of these blocks."""
        keys: list[BlockKey] = self._keys[part].view(_HASH).ravel().tolist()
        return keys

    def parent(self, at: int) -> BlockKey | None:
        """The parent's key of the block at this place; None where it has none."""
        return BlockKey(self._parents[at].tobytes()) if self.has_parent[at] else None

    def engine_names(self, part: slice) -> np.ndarray:
        """What engines call these blocks, `KEY_BYTES` each: their own hash of it, or where it is not known, the key."""
        hashes, keys = self._engine_hashes[part], self._keys[part]
        names = np.where(hashes.any(axis=1, keepdims=True), hashes, keys)
        return names.view(np.uint8)

    def last_sequence(self) -> int:
        """The highest sequence; 0 without blocks."""
        return int(self.sequences.max(initial=0))

    def without(self, gone: bytearray) -> RecoveredBlocks:
        """The same blocks but those in slots that are marked in `gone`, which has a byte for each slot."""
        if gone.find(1) < 0:
            return self
        kept = np.flatnonzero(np.frombuffer(gone, np.uint8)[self.slots] == 0)
        rows = np.empty(len(kept), RECOVERED)
        rows["key"], rows["parent"] = self._keys[kept], self._parents[kept]
        rows["engine_hash"], rows["sequence"] = self._engine_hashes[kept], self.sequences[kept]
        rows["slot"], rows["group"] = self.slots[kept], self.groups[kept]
        rows["has_parent"] = self.has_parent[kept]
        return RecoveredBlocks(rows, np.arange(len(rows)))


def recovered_rows(rows: np.ndarray) -> tuple[RecoveredBlocks, np.ndarray]:
    """Of rows in the order of their slots, those that count, the oldest first, and the slots of the others: of two with
    one key the newer counts."""
    counts = np.ones(len(rows), np.bool_)
    counts[_outdated(rows)] = False
    places = np.flatnonzero(counts)
    by_age = np.argsort(rows["sequence"][places], kind="stable")  # mostly they are in this order already
    return RecoveredBlocks(rows, places[by_age]), rows["slot"][~counts]


def _outdated(rows: np.ndarray) -> list[int]:
    """The places of rows whose key another row has, with a higher sequence or, with the same one, a lower slot."""
    starts = np.ascontiguousarray(rows["key"][:, 0])
    order = np.argsort(starts)
    alike = np.flatnonzero(starts[order[1:]] == starts[order[:-1]])
    # Keys are hashes, so few rows have a rival: the others cost no step of Python.
    places = np.unique(np.concatenate((order[alike], order[alike + 1]))).tolist()
    newest, outdated = dict[bytes, int](), list[int]()
    for place in places:
        key = rows["key"][place].tobytes()
        rival = newest.setdefault(key, place)
        if rival != place:
            if rows["sequence"][rival] < rows["sequence"][place]:
                newest[key] = place
                outdated.append(rival)
            else:
                outdated.append(place)
    return outdated
