"""How long a request waits for the manager's answer, and for blocks that are being read from disk; how long an answer
holds."""

from __future__ import annotations

from kvbm.leader.cost import CostModel
from kvbm.leader.link import Link
from kvbm.leader.postponed import IN_TURN, Hold, Until
from kvbm.leader.search import Search, Stage

REPLY_DEADLINE_S = 0.25
"""The manager's answer to a lookup is waited for at least this long."""
REPLY_DEADLINE_S_MAX = 10.0
SILENCE_S_MAX = 2.0
"""A manager that has sent nothing at all for this long is not waited for."""
ASSUMED_TOKENS_PER_S = 50_000.0
"""How fast an engine computes a prompt, until its own steps were measured: faster than most do."""
ARRIVAL_DEADLINE_S = 10.0
UNANSWERED_MAX = 3
"""After so many unanswered lookups in a row no request waits. Lookups are sent all the same: an answer ends that."""
LEASE_MARGIN_S = 30.0
ASK_AGAIN_S = 1.0
ATTEMPTS_MAX = 4


class Patience:
    """No wait is longer than computing the blocks takes, as far as that is known, and each has a bound besides."""

    def __init__(self, link: Link, cost: CostModel) -> None:
        self._link = link
        self._cost = cost
        self._unanswered = 0
        self._life = link.life

    def record_answer(self) -> None:
        """The manager has answered a lookup."""
        self._unanswered = 0

    def record_unanswered(self) -> None:
        """It has not answered one in time."""
        self._unanswered, self._life = self._in_a_row + 1, self._link.life

    @property
    def is_manager_silent(self) -> bool:
        """Whether it has stopped answering: nothing waits for it."""
        return self._in_a_row >= UNANSWERED_MAX

    @property
    def _in_a_row(self) -> int:
        """Lookups of this session that were not answered in time, since its latest answer."""
        return self._unanswered if self._life == self._link.life else 0

    def unanswered_too_long(self, search: Search, now_s: float) -> bool:
        """Whether to go on without the manager's answer.

        Others may be served first: as long as the manager sends anything, its answer is waited for as long as computing
        the blocks would take, within bounds. While it has not answered an earlier lookup in time, the least is enough,
        and while it has not answered several, nothing is.
        """
        if self.is_manager_silent:
            return True
        if self._in_a_row:
            return now_s - search.asked_s >= REPLY_DEADLINE_S
        blocks = search.wanted - search.skip
        prefill_s = self._cost.prefill_s(blocks, search.skip)
        if prefill_s is None:
            prefill_s = blocks * self._cost.block_tokens / ASSUMED_TOKENS_PER_S
        deadline_s = min(max(prefill_s, REPLY_DEADLINE_S), REPLY_DEADLINE_S_MAX)
        silent_s = now_s - max(search.asked_s, self._link.received_s)
        return now_s - search.asked_s >= deadline_s or silent_s >= min(deadline_s, SILENCE_S_MAX)

    def for_reads_s(self, search: Search, offset: int) -> float:
        """How long to wait for blocks that are being read from disk: no longer than computing them takes, and not at
        all where they are expected later than that."""
        prefill_s = self._cost.prefill_s_at_most(len(search.slots) - offset, search.skip + offset)
        patience_s = min(prefill_s, ARRIVAL_DEADLINE_S)
        return patience_s if search.arrives_s - search.asked_s <= patience_s else 0.0

    def until(self, search: Search | None, computed: int) -> Hold:
        """How long a request is told to ask again where no message about its lookup comes. Without one it waits to be
        looked up."""
        if search is None:
            return IN_TURN
        if search.stage is Stage.ASKED:
            return Until(search.asked_s + REPLY_DEADLINE_S)
        return Until(search.asked_s + self.for_reads_s(search, computed - search.skip))

    def is_aged(self, search: Search, now_s: float) -> bool:
        """Whether the lease of a lookup is about to end."""
        ready = self._link.ready
        lease_s = ready.lease_s if ready is not None else 0.0
        return now_s - search.asked_s > max(0.0, lease_s - LEASE_MARGIN_S)

    def is_void(self, search: Search, computed: int, now_s: float) -> bool:
        """Whether an answer is of no use: the lease is about to end, or the device has dropped blocks that the question
        left out."""
        if search.stage is not Stage.FOUND or self.is_aged(search, now_s):
            return search.stage is Stage.FOUND
        # What several groups lack at a boundary is known for one beginning only.
        dropped = computed < search.skip or (search.boundary > computed != search.skip)
        return dropped and search.attempts < ATTEMPTS_MAX

    def is_stale(self, search: Search, computed: int, now_s: float) -> bool:
        """Whether to ask again: the answer is void, or the manager may find more by now."""
        if search.stage is not Stage.FOUND or self.is_void(search, computed, now_s):
            return search.stage is Stage.FOUND
        # Leases of earlier requests may have left no room in host memory for this one's blocks.
        short = search.final and search.skip + search.blocks < search.wanted
        return short and now_s - search.asked_s > ASK_AGAIN_S and search.attempts < ATTEMPTS_MAX
