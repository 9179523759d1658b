"""Which blocks are offered to the manager, and when: complete ones, or those that the engine is about to hand out, and
again those that the manager had no slot for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.clock import Clock
from kvbm.hashing import join_keys, split_keys
from kvbm.leader.keys import RequestKeys
from kvbm.leader.lazy import Unsaved
from kvbm.leader.search import Search
from kvbm.leader.stores import Answered, Stores
from kvbm.leader.tracked import Scheduled, Tracked
from kvbm.protocol import STORED_KEYS_MAX

LEAVING_BLOCKS = 512
"""How many blocks ahead lazy offload looks, and about how many it stores in one step at most."""


class Offers:
    """The leader's reservations. `requests` is the leader's; with `unsaved`, blocks are offered when they leave the
    device and not when they are complete. Called only while there is a manager, but for `scheduled`."""

    def __init__(
        self,
        stores: Stores,
        unsaved: Unsaved | None,
        requests: Mapping[str, Tracked],
        keys: RequestKeys,
        clock: Clock,
    ) -> None:
        self._stores = stores
        self._unsaved = unsaved
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
        if ready:
            self.leaving()

    def complete(self, tracked: Tracked, entry: Scheduled) -> None:
        """Offer the blocks that the request has completed since the last offer, or note them to be offered later."""
        if not tracked.stores:
            return
        start, end = tracked.stored, min(entry.complete_blocks, len(tracked.hashes))
        if end <= start or self._clock() < tracked.retry.due_s:
            return
        if tracked.keep is not None and not tracked.keep(0.0):
            return
        table = entry.device_blocks()
        end = min(end, len(table), start + STORED_KEYS_MAX)
        if end <= start:
            return
        before = KEY_BYTES if start else 0  # the parent is named with its children
        keys, hashes = self._keys(tracked, start - 1 if start else 0, end)
        said = tracked.said(start, end, hashes[:before])
        parent, keys, hashes = keys[:before], keys[before:], hashes[before:]
        if self._unsaved is not None:
            names = split_keys(keys)
            self._unsaved.note(BlockKey(parent) or None, names, table[start:end], hashes, tracked.keep)
            tracked.stored = end
            return
        again = start <= tracked.refused_at
        if self._stores.ask(
            entry.request,
            parent,
            keys,
            table[start:end],
            (),
            hashes,
            start,
            tracked.keep,
            again,
            said=said,
            tenant=tracked.asker.tenant,
        ):
            tracked.stored = end

    def found(self, search: Search, full: int) -> None:
        """A lookup was answered (see `GroupOffers`)."""

    def ending(self, request: str, tracked: Tracked, tables: Sequence[Sequence[int]], complete: int) -> None:
        """The request has ended, and its blocks are offered already (see `GroupOffers`)."""

    def loaded(self, tracked: Tracked, blocks: int) -> None:
        """So many blocks of the request have come from the manager, which need not be asked whether it holds them.

        Not with lazy offload: by the time they leave the device the manager may have dropped them. Nor behind blocks
        that were on the device already, of which it is not known whether the manager has them.
        """
        if self._unsaved is None and tracked.computed == 0:
            tracked.stored = max(tracked.stored, blocks)

    def leaving(self) -> None:
        """Lazy offload: offer the blocks that the engine is about to hand out."""
        if self._unsaved is None:
            return
        # What is taken out here and cannot be asked for would be lost; a chain has one block at least.
        blocks_max, again = min(LEAVING_BLOCKS, self._stores.room), self._unsaved.refused
        for chain in self._unsaved.leaving(LEAVING_BLOCKS, blocks_max, self._clock()):
            for start in range(0, len(chain.keys), STORED_KEYS_MAX):
                part = slice(start, start + STORED_KEYS_MAX)
                parent = chain.keys[start - 1] if start else chain.parent or b""
                hashes = chain.hashes[part.start * KEY_BYTES : part.stop * KEY_BYTES]
                keys, blocks, tags = join_keys(chain.keys[part]), chain.device_blocks[part], chain.tags[part]
                self._stores.ask("", parent, keys, blocks, tags, hashes, keep=chain.keep, again=again)

    def answered(self, answer: Answered) -> None:
        """Blocks that the manager had no slot for are offered again, while the device has them."""
        if self._unsaved is not None:
            self._unsaved.answered(answer, self._clock())
        elif answer.refused and (tracked := self._requests.get(answer.request)) is not None:
            tracked.refused(answer.first + answer.taken, self._clock())

    def anew(self) -> None:
        """Offer all blocks of running requests anew; the manager's answers leave out those that it holds."""
        for tracked in self._requests.values():
            tracked.offer_anew()

    def keys_changed(self) -> None:
        """Blocks that were noted have other keys now."""
        if self._unsaved is not None:
            self._unsaved.clear()
