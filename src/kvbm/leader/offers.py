"""Which blocks are offered to the manager: complete ones, and again those that it had no slot for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvbm.block import KEY_BYTES
from kvbm.clock import Clock
from kvbm.framing import announced_keys_max
from kvbm.leader.keys import RequestKeys
from kvbm.leader.search import Search
from kvbm.leader.stores import ShortAnswer, Stores
from kvbm.leader.tracked import Scheduled, Tracked
from kvbm.protocol import STORED_KEYS_MAX


class Offers:
    """The leader's reservations. `requests` is the leader's. Called only while there is a manager, but for
    `scheduled`."""

    def __init__(
        self,
        stores: Stores,
        requests: Mapping[str, Tracked],
        keys: RequestKeys,
        clock: Clock,
        block_tokens: int,
    ) -> None:
        self._announced_max = announced_keys_max(block_tokens)
        self._stores = stores
        self._requests = requests
        self._keys = keys
        self._clock = clock

    def scheduled(self, entries: Iterable[Scheduled], ready: bool) -> None:
        """A step computes these requests: offer what it completes, where there is a manager."""
        for entry in entries:
            tracked = self._requests.get(entry.request)
            if tracked is not None:
                tracked.begun = True
                if ready:
                    self.complete(tracked, entry)

    def complete(self, tracked: Tracked, entry: Scheduled) -> None:
        """Offer the blocks that the request has completed since the last offer."""
        if not tracked.stores:
            return
        start, end = tracked.stored, min(entry.complete_blocks, len(tracked.hashes))
        if end <= start or self._clock() < tracked.retry.due_s:
            return
        if tracked.keep is not None and not tracked.keep(0.0):
            return
        table = entry.device_blocks()
        end = min(end, len(table), start + self._blocks_max(tracked))
        if end <= start:
            return
        before = KEY_BYTES if start else 0  # the parent is named with its children
        keys, hashes = self._keys(tracked, start - 1 if start else 0, end)
        said = tracked.said(start, end, hashes[:before])
        parent, keys, hashes = keys[:before], keys[before:], hashes[before:]
        again = start <= tracked.refused_at
        if self._stores.ask(
            entry.request,
            parent,
            keys,
            table[start:end],
            hashes,
            start,
            tracked.keep,
            again,
            said=said,
            tenant=tracked.asker.tenant,
        ):
            tracked.stored = end

    def _blocks_max(self, tracked: Tracked) -> int:
        """How many blocks go into one message; those behind them are offered in the next step."""
        return STORED_KEYS_MAX if tracked.says is None else self._announced_max

    def found(self, search: Search, full: int) -> None:
        """A lookup was answered (see `GroupOffers`)."""

    def ending(self, request: str, tracked: Tracked, tables: Sequence[Sequence[int]], complete: int) -> None:
        """The request has ended, and its blocks are offered already (see `GroupOffers`)."""

    def loaded(self, tracked: Tracked, blocks: int) -> None:
        """So many blocks of the request have come from the manager, which need not be asked whether it holds them.

        Not behind blocks that were on the device already, of which it is not known whether the manager has them.
        """
        if tracked.computed == 0:
            tracked.stored = max(tracked.stored, blocks)

    def answered(self, answer: ShortAnswer) -> None:
        """Blocks that the manager had no slot for are offered again, while the device has them."""
        if (tracked := self._requests.get(answer.request)) is not None:
            tracked.refused(answer.first + answer.taken, self._clock())

    def anew(self) -> None:
        """Offer all blocks of running requests anew; the manager's answers leave out those that it holds."""
        for tracked in self._requests.values():
            tracked.offer_anew()
