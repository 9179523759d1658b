"""What is said of blocks in a remote tier, so that they can be announced to routers like those of other tiers.

A remote tier has no slots, and of what others put there a node knows nothing that means anything to a router. So this
is of blocks that this node wrote or read itself, which were in its host memory then; the newest of them.
"""

from __future__ import annotations

from collections import OrderedDict

from kvbm.block import BlockKey, Tier
from kvbm.manager.host_side import HostSide
from kvbm.manager.slot_facts import SlotFacts
from kvbm.tiers.remote.contract import News

BLOCKS_MAX = 16_384
"""Some 150 bytes each, and more where a block has many tokens."""


class RemoteFacts:
    """The facts of one remote tier. Owned by the manager's thread. `slots` is told of like a tier's."""

    def __init__(self, block_tokens: int, blocks_max: int = BLOCKS_MAX) -> None:
        self.slots = SlotFacts(Tier.REMOTE, blocks_max, block_tokens)
        self._slot_of: OrderedDict[BlockKey, int] = OrderedDict()
        self._free = list(range(blocks_max - 1, -1, -1))

    def heard(self, news: News, host: HostSide) -> None:
        """Blocks were seen in the tier, or are known to have gone; what is said of them is in host memory."""
        for key in news.gone:
            self._forget(key)
        for key in news.came:
            slot = host.pool.find(key)
            fact = host.facts.of(slot) if slot is not None else None
            if fact is None or key in self._slot_of:
                continue
            if not self._free:
                self._forget(next(iter(self._slot_of)))
            self._slot_of[key] = place = self._free.pop()
            self.slots.note(place, fact)
            self.slots.committed((place,))

    def _forget(self, key: BlockKey) -> None:
        place = self._slot_of.pop(key, None)
        if place is not None:
            self.slots.emptied((place,))
            self._free.append(place)
