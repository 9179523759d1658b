"""Which prefixes are asked for most: a bounded count by the first block of a chain (space-saving).

A request's prefix is named by its first block: all requests with the same system prompt have that block in common. A
table of fixed size keeps the heads that come often: a head that is not in it takes the place of the coolest one and
inherits its heat, so a frequent head cannot be missing for long. Heat halves as requests come, so that yesterday's
prefix cools down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm.block import KEY_BYTES, BlockKey

HEADS_MAX = 128
CHAIN_BLOCKS_MAX = 512
"""So many blocks of a head's last chain are kept, to see how long a prefix the next one shares with it."""
HALVED_EVERY = 1024


@dataclass(slots=True, eq=False)
class HotPrefix:
    """One head. `shared` is the number of leading blocks that its last two chains share, `chain` is the last one."""

    heat: float
    requests: int = 0
    asked: int = 0
    found: int = 0
    lost: int = 0
    shared: int = 0
    chain: bytes = b""


class PrefixHeat:
    """The heads of one namespace. Owned by the manager's thread; one update for each lookup."""

    def __init__(self, heads_max: int = HEADS_MAX, halved_every: int = HALVED_EVERY) -> None:
        self._heads: dict[BlockKey, HotPrefix] = {}
        self._heads_max = heads_max
        self._halved_every = halved_every
        self._until_halved = halved_every

    def __len__(self) -> int:
        return len(self._heads)

    @property
    def block_count(self) -> int:
        """Blocks of all last chains."""
        return sum(len(prefix.chain) for prefix in self._heads.values()) // KEY_BYTES

    def asked(self, keys: Sequence[BlockKey], held: int, asked: int, found: int) -> bool:
        """A lookup of this chain ended; its first `held` blocks are in a tier or on the device.

        It asked for `asked` blocks beyond those on the device and found `found`. True when the prefix was *lost*: an
        earlier request had the same first block, and this one finds none of it.
        """
        if not keys:
            return False
        prefix = self._heads.get(keys[0])
        known = prefix is not None
        if prefix is None:
            prefix = self._heads[keys[0]] = HotPrefix(self._make_room())
        lost = known and held == 0
        prefix.heat += 1.0
        prefix.requests += 1
        prefix.asked += asked
        prefix.found += found
        prefix.lost += lost
        prefix.shared = _shared_blocks(prefix.chain, keys) if known else min(len(keys), CHAIN_BLOCKS_MAX)
        prefix.chain = b"".join(keys[:CHAIN_BLOCKS_MAX])
        self._until_halved -= 1
        if not self._until_halved:
            self._until_halved = self._halved_every
            for other in self._heads.values():
                other.heat /= 2.0
        return lost

    def hottest(self, count: int) -> list[tuple[BlockKey, HotPrefix]]:
        """The heads that came most often of late, and more than once, the hottest first."""
        repeated = [(key, prefix) for key, prefix in self._heads.items() if prefix.requests > 1]
        return sorted(repeated, key=lambda item: (-item[1].heat, item[0]))[:count]

    def _make_room(self) -> float:
        """Drop the coolest head where the table is full. Returns the heat that the next one begins with."""
        if len(self._heads) < self._heads_max:
            return 0.0
        coolest = min(self._heads, key=lambda key: self._heads[key].heat)
        return self._heads.pop(coolest).heat


def _shared_blocks(chain: bytes, keys: Sequence[BlockKey]) -> int:
    """How many leading blocks two chains share. Keys are chained: where one agrees, all before it do."""
    low, high = 0, min(len(chain) // KEY_BYTES, len(keys))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[(middle - 1) * KEY_BYTES : middle * KEY_BYTES] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
