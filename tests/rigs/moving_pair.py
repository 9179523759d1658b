"""Two nodes of a test, each with a mover."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm.block import BlockKey, Outcome
from kvbm.tiers.contract import Completion
from kvbm.tiers.peers.mover import Mover
from rigs.movers import moves
from rigs.peers import LendingNode, Loads, Targets, content, keys_of, knows, open_tier, wait_until

KEYS = keys_of(16)


class Pair:
    """A lender and a reader, each with a mover; the lender holds KEYS."""

    def __init__(self, make: Callable[[], Mover], **options: object) -> None:
        self.lends, self.reads = make(), make()
        self.lender = LendingNode(mover=self.lends)
        self.slots = self.lender.store(KEYS)
        self.tier = open_tier([self.lender.peer], mover=self.reads, **{"deadline_s": 60.0, **options})
        self.loads = Loads(self.tier)
        wait_until(lambda: knows(self.tier, KEYS))
        self.connected()

    def connected(self) -> None:
        wait_until(lambda: moves(self.lender, self.tier), "the lender knows the reader's memory")

    @property
    def moved(self) -> int:
        return self.lender.server.counts["moved"]

    def peer(self) -> dict[str, object]:
        (peer,) = self.tier.describe()["peers"]  # type: ignore[misc]
        return peer  # type: ignore[no-any-return]

    def all_hits(self) -> None:
        right(*self.loads.load(KEYS), must_hit=True)

    def close(self) -> None:
        self.tier.close()
        self.lender.close()
        self.lends.close()
        self.reads.close()


def right(
    completion: Completion, targets: Targets, must_hit: bool = False, keys: Sequence[BlockKey] = KEYS
) -> None:
    """Whatever is a hit has the right bytes."""
    for index, end in enumerate(completion.blocks):
        assert end.outcome is Outcome.HIT or not must_hit, end
        if end.outcome is Outcome.HIT:
            assert targets.block(index) == content(keys[index])
