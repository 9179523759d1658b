"""A tier without bytes: the manager's own slots over the numbered blocks of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from kvbm.block import Tier
from kvbm.hints import Hint
from kvbm.manager.pool import SlotPool
from kvbm.policy import EvictionPolicy
from kvbm.policy.contract import ClientWord, tell_hint
from kvbm.sim.traces.said import CLIENT

BlocksChanged = Callable[[Sequence[int]], None]
"""Called with blocks that have just entered, or just left, a tier."""


class SimulatedTier(SlotPool[int]):
    """The manager's pool of slots, where filling a slot takes no time.

    With `insist` newcomers get a slot whatever the policy thinks of them: a tier above another is the way into it.
    `on_stored` is called with the blocks that `insert` has put in, `on_evicted` with those that have gone.
    """

    def __init__(
        self,
        slot_count: int,
        policy: EvictionPolicy,
        insist: bool = False,
        on_stored: BlocksChanged | None = None,
        on_evicted: BlocksChanged | None = None,
    ) -> None:
        on_emptied = None if on_evicted is None else lambda slots, blocks, reason: on_evicted(blocks)
        super().__init__(Tier.HOST, slot_count, policy, on_emptied)
        self.insist = insist
        self.inserted_count = 0
        self._on_stored = on_stored

    def hinted(self, last: int, hint: Hint, now_s: float) -> None:
        """Tell the policy what the client says of the request whose prompt ends with this block."""
        word = ClientWord(CLIENT, hint.session or "", hint.final, hint.expect_s)
        tell_hint(self.policy, last, word, now_s)

    def insert(self, blocks: Sequence[int], start: int, now_s: float) -> int:
        """Put the missing ones of `blocks[start:]` in, as far as the policy finds them worth it (unless the tier
        insists); how many."""
        end, before = len(blocks), self.inserted_count
        while start < end:
            run = blocks[start:]
            if self.holds_any(run):
                run = list(takewhile(lambda block: not self.holds(block), run))
            if not run:  # left behind when the block before it went
                start += 1
                continue
            slots = self.reserve_chain(run, blocks[start - 1] if start else None, now_s, self.insist)
            self.commit_all(slots)
            self.inserted_count += len(slots)
            if self._on_stored is not None:
                self._on_stored(run[: len(slots)])
            if len(slots) < len(run):
                break
            start += len(run)
        return self.inserted_count - before

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are resident."""
        slots = self.find_all(list(blocks))
        return slots.index(None) if None in slots else len(slots)

    def lease_blocks(self, blocks: Sequence[int]) -> None:
        """Keep resident blocks from being evicted; leases add up."""
        self.lease_all(self._slots_of(blocks))

    def unlease_blocks(self, blocks: Sequence[int]) -> None:
        """Undo one `lease_blocks`."""
        self.unlease_all(self._slots_of(blocks))

    def _slots_of(self, blocks: Sequence[int]) -> list[int]:
        slots = [slot for slot in self.find_all(list(blocks)) if slot is not None]
        assert len(slots) == len(blocks), "only resident blocks are leased"
        return slots
