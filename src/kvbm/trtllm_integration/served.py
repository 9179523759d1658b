"""A request of the engine, from its match to its end: its tokens' keys, its blocks on the device, its promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm.hashing import Chain

NO_PAGE = -1
"""In a block table: this block has no memory (a sliding window has passed it)."""


@dataclass(slots=True)
class Served:
    """`computed` blocks were found on the device at the match, and `promised` ones after them are loaded.

    `reported`: the engine has scheduled it since. `carried`: a plan has its load. `position` is how many tokens' KV is
    valid when the step ends that was reported last. `table` has the device block of each block. Only the first
    `keep_blocks` may be stored: the first one of too low a priority ends that for good.
    """

    name: str
    chain: Chain
    prompt_tokens: int
    computed: int = 0
    promised: int = 0
    table: list[int] = field(default_factory=list)
    allocated: list[int] | None = None
    reported: bool = False
    carried: bool = False
    position: int = 0
    keep_blocks: int | None = None
    adapter: int | None = None
    salted: bool = False

    def first_report(self, data: Any, new: bool) -> bool:
        """The engine schedules it for the first time since the match. False where its blocks cannot be known."""
        self.reported = True
        block_ids = list(data.new_block_ids)
        if (
            self.allocated is not None
            and self.allocated[: len(block_ids)] != block_ids[: len(self.allocated)]
        ):
            # Not the whole table: what was allocated ends with it, or it is the table of an earlier life.
            if self.allocated[len(self.allocated) - len(block_ids) :] != block_ids:
                return False
            block_ids = self.allocated
        elif self.allocated is None and not new:
            return False
        elif self.allocated is not None and len(self.allocated) > len(block_ids):
            block_ids = self.allocated
        self.table = block_ids
        return True

    def later_report(self, data: Any) -> None:
        """The engine schedules it again: what has come since."""
        self.chain.extend(data.new_tokens)
        self.table += data.new_block_ids

    def note_priorities(self, priorities: Sequence[int] | None, first: int, least: int) -> None:
        """Retention priorities of blocks from number `first` on; `least` is the lowest that is kept."""
        if priorities is None or self.keep_blocks is not None:
            return
        for place, priority in enumerate(priorities):
            if priority < least:
                self.keep_blocks = first + place
                return

    def advance(self, data: Any, block_tokens: int, flat: bool, first: bool) -> None:
        """Note how far its KV is valid after the step that is about to run.

        The first report leaves out the tokens that we promised. An engine that takes up a promise as a whole (`flat`,
        its first cache manager) has them all when the step begins; of another one it is not known how many of them it
        computes itself, so they count when it reports them.
        """
        start = int(data.computed_position)
        if first and flat and self.promised and start == self.computed * block_tokens:
            start += self.promised * block_tokens
        self.position = min(start + int(data.num_scheduled_tokens), self.chain.tokens)

    def complete_blocks(self, block_tokens: int) -> int:
        """How many leading blocks are complete after the step, have memory, and may be stored."""
        complete = min(self.position // block_tokens, len(self.table))
        if self.keep_blocks is not None:
            complete = min(complete, self.keep_blocks)
        return complete if NO_PAGE not in self.table[:complete] else self.table.index(NO_PAGE)

    def blocks(self) -> Callable[[], Sequence[int]]:
        """Its block table, when it is needed."""
        return lambda: self.table
