"""Which blocks of a hybrid model are offered to the manager, and when.

Blocks of all tokens are offered when they are complete, as those of other models. Of the other groups only what a
boundary needs at which a request may be taken up again, its *tail*: where the same prompt could be loaded again, where
the request leaves what is stored (others may leave there too), and where it ends (its next turn begins there). What
lies between is worth nothing, and the engine drops it soon. Recurrent states exist only where the engine keeps one: all
of them are offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm.block import KEY_BYTES
from kvbm.clock import Clock
from kvbm.grouping import WINDOWS, Grouping, Place
from kvbm.hashing import join_keys, split_keys
from kvbm.leader.keys import RequestKeys
from kvbm.leader.offers import Offers
from kvbm.leader.search import Search
from kvbm.leader.stores import ShortAnswer, Stores
from kvbm.leader.tracked import NOTHING_SAID, Scheduled, Tracked

A_STATE = -1
"""The first block of an offer of a recurrent state, in place of one in the chain; of a tail, less its boundary."""

Tables = Sequence[Sequence[int]]
"""The block table of each group; 0 stands for a block that the engine has dropped."""


class GroupOffers(Offers):
    """The reservations of an engine with several groups."""

    def __init__(
        self,
        stores: Stores,
        requests: Mapping[str, Tracked],
        keys: RequestKeys,
        clock: Clock,
        block_tokens: int,
        grouping: Grouping,
    ) -> None:
        super().__init__(stores, requests, keys, clock, block_tokens)
        self._grouping = grouping

    def found(self, search: Search, full: int) -> None:
        """The manager holds `full` blocks of a request as far as all tokens go: where that is more than can be taken
        up, the request stores what was missing there."""
        tracked = self._requests.get(search.request)
        if tracked is not None and full > search.boundary:
            tracked.wants_tail(full)

    def complete(self, tracked: Tracked, entry: Scheduled) -> None:
        """Offer what the step completes of the request."""
        if not tracked.stores:
            return
        end = self._grouping.floor(min(entry.complete_blocks, len(tracked.hashes)))
        if end <= tracked.stored and not tracked.tails and not entry.states:
            return  # as in almost every step
        ready = self._clock() >= tracked.retry.due_s
        due = sorted(each for each in tracked.tails if each <= end) if ready else []
        more = ready and end > tracked.stored
        if not (due or more or entry.states) or (tracked.keep is not None and not tracked.keep(0.0)):
            return
        tables = entry.tables()
        if more:
            self._offer_chain(entry.request, tracked, tables, end)
        for boundary in due:
            if boundary <= tracked.stored:  # else the manager would not have the block that it lies behind
                self._offer_tail(entry.request, tracked, tables, boundary)
        for state in entry.states:
            # vLLM may also keep states inside of a block (`prefix_match_unit`): no block's key is theirs.
            blocks, inside = divmod(state.boundary, self._grouping.groups[state.group].span)
            if state.boundary <= end and not inside:
                place = Place(state.group, blocks - 1)
                self._offer(entry.request, tracked, [place], [state.device_block], state.boundary)

    def ending(self, request: str, tracked: Tracked, tables: Tables, complete: int) -> None:
        """The request has ended, with so many complete blocks: its next turn begins there."""
        boundary = self._grouping.floor(min(complete, len(tracked.hashes), tracked.stored))
        usable = bool(tables) and tracked.stores and boundary > 0
        if usable and boundary not in tracked.tails_offered and (tracked.keep is None or tracked.keep(0.0)):
            self._offer_tail(request, tracked, tables, boundary)

    def answered(self, answer: ShortAnswer) -> None:
        """Blocks of all tokens, and tails, that the manager had no slot for are offered again."""
        tracked = self._requests.get(answer.request)
        if tracked is None or answer.first == A_STATE:
            return
        if answer.first < A_STATE:
            tracked.tail_refused(A_STATE - answer.first, self._clock())
            return
        asked = self._grouping.chain(answer.first, answer.first + answer.blocks * self._grouping.step)
        tracked.refused(self._grouping.start_of(asked[answer.taken]), self._clock())

    def _offer_chain(self, request: str, tracked: Tracked, tables: Tables, end: int) -> None:
        step, start = self._grouping.step, self._grouping.floor(tracked.stored)
        per_step = max(1, len(self._grouping.chain(0, step)))
        end = min(end, start + max(1, self._blocks_max(tracked) // max(per_step, step)) * step)
        places = self._grouping.chain(start, end)
        if not places:
            tracked.stored = end
            return
        if any(len(tables[group]) <= block for group, block in (places[-1], places[-per_step])):
            return
        blocks = [tables[group][block] for group, block in places]
        again = start <= tracked.refused_at
        if self._offer(request, tracked, places, blocks, start, first=start, again=again):
            tracked.stored = end

    def _offer_tail(self, request: str, tracked: Tracked, tables: Tables, boundary: int) -> None:
        places = self._grouping.tail(boundary, kinds=WINDOWS)
        blocks = [tables[group][block] if block < len(tables[group]) else 0 for group, block in places]
        there = bool(places) and all(blocks)
        if not there or self._offer(request, tracked, places, blocks, boundary, first=A_STATE - boundary):
            tracked.tail_offered(boundary)

    def _offer(
        self,
        request: str,
        tracked: Tracked,
        places: Sequence[Place],
        blocks: Sequence[int],
        behind: int,
        first: int = A_STATE,
        again: bool = False,
    ) -> bool:
        """Reserve slots for these blocks, which come behind those of the first `behind` blocks' tokens. Blocks of all
        tokens have `first`, and stay; the others are fleeting."""
        grouping = self._grouping
        parents = grouping.parent(behind)
        start = min(grouping.first_of(place) for place in (*parents, *places))
        end = max(map(grouping.end_of, places))
        named = self._keys(tracked, start, end)
        plain = split_keys(named.keys)
        hashes = named.hashes or named.keys
        ends = [(grouping.end_of(place) - 1 - start) * KEY_BYTES for place in places]
        before = b"".join(
            hashes[(grouping.end_of(place) - 1 - start) * KEY_BYTES :][:KEY_BYTES] for place in parents
        )
        # Routers know chains of blocks of all tokens; of several such groups they would count each block twice.
        said = tracked.said(behind, end, before) if first >= 0 and grouping.plain else NOTHING_SAID
        return self._stores.ask(
            request,
            join_keys(grouping.keys(plain, parents, start)),
            join_keys(grouping.keys(plain, places, start)),
            blocks,
            hashes=b"".join(hashes[at : at + KEY_BYTES] for at in ends),
            first=first,
            keep=tracked.keep,
            again=again,
            groups=bytes(group for group, _ in places),
            fleeting=first < 0,
            said=said,
            tenant=tracked.asker.tenant,
        )
