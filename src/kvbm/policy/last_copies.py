"""An eviction policy around any other one, which lets blocks go first that can be had elsewhere.

A block that lies in another node's memory or in a store costs a read when it is wanted again; the last copy in the
fleet costs its computing. So among the blocks that would go next, a few more than are needed, those with another copy
go before the others. It looks no further: what is far from its turn stays, whoever else has it, and an answer takes a
bounded number of looks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence

from kvbm.policy.contract import ClientWord, EvictionPolicy, insert_tail, none_leased, request_tail

PASSED_OVER_MIN = 32
PASSED_OVER_EACH = 2
"""So many last copies are passed over for one answer, and so many more for each block that is needed."""


class LastCopies:
    """A policy around `inner`. `elsewhere(slot)` says whether the block in a slot is believed to have another copy."""

    def __init__(self, inner: EvictionPolicy, elsewhere: Callable[[int], bool]) -> None:
        self.inner = inner
        self._elsewhere = elsewhere
        self._filling: set[int] = set()
        hinted = getattr(inner, "hinted", None)
        if hinted is not None:  # `knows_hints` shall say of this what it says of the inner one
            self.hinted: Callable[[Hashable, ClientWord, float], None] = hinted

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.inner.requested(keys, slots, now_s)

    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """The inner policy is told so if it knows tails."""
        request_tail(self.inner, keys, slots, now_s)

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        self.inner.finished(key, output_tokens, now_s)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        self._filling.update(slots)
        self.inner.inserted(keys, slots, parent, now_s)

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        """The inner policy is told so if it knows tails."""
        self._filling.update(slots)
        insert_tail(self.inner, keys, slots, parent, now_s)

    def evictable(self, slots: Iterable[int]) -> None:
        slots = slots if isinstance(slots, Sequence) else list(slots)
        self._filling.difference_update(slots)
        self.inner.evictable(slots)

    def removed(self, slots: Iterable[int]) -> None:
        slots = slots if isinstance(slots, Sequence) else list(slots)
        self._filling.difference_update(slots)
        self.inner.removed(slots)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The inner policy's choice among what has another copy, and then among all."""
        kept = _Kept(leased, self._elsewhere, PASSED_OVER_MIN + PASSED_OVER_EACH * needed)
        chosen = self.inner.victims(needed, incoming, kept, now_s)
        if not kept.passed:
            return chosen
        # It may have dropped them from its queues, as it may with leases. What is being filled was no candidate.
        self.inner.evictable([slot for slot in kept.passed if slot not in self._filling])
        rest = needed - len(chosen)
        if rest > 0:
            more = incoming[: max(0, len(incoming) - len(chosen))]
            chosen += self.inner.victims(rest, more, leased, now_s)
        return chosen


class _Kept:
    """The slots that the inner policy may not choose, as a container of leased ones; `passed` has the last copies among
    those that it asked about, at most `most`."""

    def __init__(self, leased: Container[int], elsewhere: Callable[[int], bool], most: int) -> None:
        self._leased, self._elsewhere, self._most = leased, elsewhere, most
        self.passed: dict[int, None] = {}

    def __contains__(self, slot: object) -> bool:
        assert isinstance(slot, int)
        if slot in self._leased:
            return True
        if slot in self.passed:
            return True
        if len(self.passed) >= self._most or self._elsewhere(slot):
            return False
        self.passed[slot] = None
        return True

    def isdisjoint(self, slots: Collection[int]) -> bool:
        """Whether all of the slots may go. It may say no where that is not sure; then whoever asks looks at each."""
        if not none_leased(self._leased, slots) or not self.passed.keys().isdisjoint(slots):
            return False
        return len(self.passed) >= self._most or all(map(self._elsewhere, slots))
