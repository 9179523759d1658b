"""What the tiers of all nodes hold together, out of what each node's manager tells of its own.

A block is in a tier when every node has its part there. One that some nodes have in host memory and others on disk is
told of in neither: it can be loaded all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvbm.hashing import split_keys
from kvbm.leader.announced import part_of
from kvbm.protocol import RemovedBlocks, StoredRun, TierEvents


class NodeEvents:
    """The account of one session. Bounded by what the tiers hold."""

    def __init__(self, nodes: int = 0) -> None:
        self._all = (1 << nodes) - 1
        # Of each block in a tier, the nodes that have it, a bit each.
        self._held: dict[int, dict[bytes, int]] = {}
        self._complete = 0

    def take_in(self, node: int, message: TierEvents) -> TierEvents | None:
        """What one node's manager tells; what that means for all, where it means anything."""
        bit = 1 << node
        removed = [
            RemovedBlocks(gone.tier, joined)
            for gone in message.removed
            if (joined := b"".join(self._removed(gone.tier, split_keys(gone.hashes), bit)))
        ]
        stored = [part for run in message.stored for part in self._stored(run, bit)]
        was_complete = self._complete == self._all
        self._complete |= bit if message.complete else 0
        complete = self._complete == self._all and not was_complete
        if not (removed or stored or complete):
            return None
        return TierEvents(removed=tuple(removed), stored=tuple(stored), complete=complete)

    def _removed(self, tier: int, hashes: Iterable[bytes], bit: int) -> Iterable[bytes]:
        held = self._held.setdefault(tier, {})
        for each in hashes:
            before = held.get(each, 0)
            if before == self._all:
                yield each
            if before & ~bit:
                held[each] = before & ~bit
            else:
                held.pop(each, None)

    def _stored(self, run: StoredRun, bit: int) -> Iterable[StoredRun]:
        """The parts of a run that all nodes have by now."""
        held, hashes = self._held.setdefault(run.tier, {}), split_keys(run.hashes)
        start = None
        for place, each in enumerate(hashes):
            before = held.get(each, 0)
            held[each] = before | bit
            if before != self._all and before | bit == self._all:
                start = place if start is None else start
            elif start is not None:
                yield part_of(run, hashes, start, place)
                start = None
        if start is not None:
            yield part_of(run, hashes, start, len(hashes))
