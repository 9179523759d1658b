"""The eviction policy of host memory when disk is written on eviction: victims are chosen early, and written first.

Writing takes time and a reservation cannot wait for it. So the blocks that the inner policy would evict next are set
aside ahead of need: at any time a sixteenth of the slots is free, or holds a block that was set aside and offered to
disk. Such a block stays resident and is found as before; a request that uses it, or stores a continuation, puts it
back under the inner policy. Otherwise it goes when room is made and its write has ended, or was refused.

A reservation never waits. When more room is needed at once than was prepared, blocks whose write has not begun go
unwritten, which the offload queue counts; blocks being written are leased and stay until their bytes are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from kvbm.policy.contract import ClientWord, EvictionPolicy, insert_tail, request_tail, tell_hint

AHEAD_SHARE = 16
AHEAD_BLOCKS_MAX = 4096
_BATCH_BLOCKS_MAX = 256


class Pool(Protocol):
    """The part of a pool of slots that `Departures` needs; `manager.pool.SlotPool` is one.

    Properties are read-only; a slot is a number below `slot_count`.
    """

    @property
    def slot_count(self) -> int:
        """All slots, free or not."""

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""

    @property
    def leased(self) -> Container[int]:
        """The slots that are leased."""

    def spared(self, now_s: float) -> Container[int]:
        """Those, and the slots that are not to be chosen before there is a need (see `favours`)."""

    def key_of(self, slot: int) -> Hashable:
        """The block in a slot that is not free."""

    def is_tail(self, slot: int) -> bool:
        """Whether the block in a slot that is not free is one of a tail (see `contract.KnowsTails`)."""

    def parent_slot_of(self, slot: int) -> int:
        """The slot of the block before the one in this slot; -1 where there is none, or it is not resident."""


class DepartureQueue(Protocol):
    """The queue to disk; `manager.offload.Offloader` is one."""

    def depart(self, slot: int) -> bool:
        """The block in this slot is a victim. False: it may go now. True: it is to be written, and
        `Departures.write_ended` is called for the slot when that has ended, unless the block goes before."""


class Departures:
    """An `EvictionPolicy` around another one, for the pool of host memory. Owned by the manager's thread.

    It keeps that contract with one exception: a block that waits for its write may go after its parent. `attach` comes
    before the first call.
    """

    def __init__(self, inner: EvictionPolicy, slot_count: int) -> None:
        self.inner = inner
        self.ahead = min(max(slot_count // AHEAD_SHARE, 1), AHEAD_BLOCKS_MAX)
        # Slots that the inner policy has given up and that still hold their block, oldest first: those whose write has
        # not ended, and those that may go.
        self.writing: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self._exhausted = False
        self._pool: Pool | None = None
        self._queue: DepartureQueue | None = None

    def attach(self, pool: Pool, queue: DepartureQueue) -> None:
        """`pool` is the one that this is the policy of; it keeps parents. `queue` replaces one that is idle."""
        assert not self.writing
        self._pool, self._queue = pool, queue

    def advance(self, now_s: float) -> None:
        """Set aside as many blocks as are missing. Called often; costs nothing when none are."""
        assert self._pool is not None
        prepared = self._pool.free_count + len(self.writing) + len(self.ready)
        missing = min(self.ahead - prepared, _BATCH_BLOCKS_MAX)
        if missing > 0 and not self._exhausted:
            chosen = self.inner.victims(missing, (), self._pool.spared(now_s), now_s)
            self._exhausted = len(chosen) < missing
            self._set_aside(chosen)

    def advance_all(self, now_s: float) -> None:
        """Host memory is about to go: offer every block to disk, the most valuable first."""
        assert self._pool is not None
        self._set_aside(self.inner.victims(self._pool.slot_count, (), self._pool.leased, now_s)[::-1])

    def keep(self, slot: int, now_s: float) -> None:
        """The block in this slot is about to get a continuation: it must not make room for that itself."""
        self._take_back(slot, now_s)

    def put_back(self, favoured: Callable[[int], bool], now_s: float) -> None:
        """Those set aside that are favoured now do not leave."""
        for slot in [slot for slot in (*self.writing, *self.ready) if favoured(slot)]:
            self._take_back(slot, now_s)

    def write_ended(self, slot: int) -> None:
        """The write of the block in this slot has ended, or there will be none."""
        if slot in self.writing:
            del self.writing[slot]
            self.ready[slot] = None

    # ---- the policy of the pool

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Blocks that are used again do not leave."""
        if self.writing or self.ready:
            for slot in slots:
                self._take_back(slot, now_s)
        self.inner.requested(keys, slots, now_s)

    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """The same; the inner policy is told that they are a tail if it knows tails."""
        if self.writing or self.ready:
            for slot in slots:
                self._take_back(slot, now_s)
        request_tail(self.inner, keys, slots, now_s)

    def hinted(self, key: Hashable, word: ClientWord, now_s: float) -> None:
        """As `KnowsHints`; the inner policy may ignore it."""
        tell_hint(self.inner, key, word, now_s)

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        self.inner.finished(key, output_tokens, now_s)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """A block that gets a continuation does not leave before it."""
        self._take_back(parent, now_s)
        self.inner.inserted(keys, slots, parent, now_s)

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        """The same; the inner policy is told so if it knows tails."""
        self._take_back(parent, now_s)
        insert_tail(self.inner, keys, slots, parent, now_s)

    def evictable(self, slots: Iterable[int]) -> None:
        """The inner policy does not choose among the slots set aside."""
        self._exhausted = False
        if self.writing or self.ready:
            slots = [slot for slot in slots if not self._leaves(slot)]
        self.inner.evictable(slots)

    def removed(self, slots: Iterable[int]) -> None:
        """The inner policy gets those that it still knows."""
        for slot in slots:
            if self._leaves(slot):
                self._forget(slot)
            else:
                self.inner.removed((slot,))

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """Those set aside first; as many of the inner policy's next victims are set aside in their place.

        Above a disk host memory takes every newcomer, so that none is weighed against the blocks set aside.
        """
        self._set_aside(self.inner.victims(needed, incoming, leased, now_s))
        gone = list(islice((slot for slot in self.ready if slot not in leased), needed))
        if len(gone) < needed:
            # Unwritten, the oldest first: a write that has begun holds a lease.
            unwritten = (slot for slot in self.writing if slot not in leased)
            gone += islice(unwritten, needed - len(gone))
        for slot in gone:
            self._forget(slot)
        return gone

    def _set_aside(self, slots: Sequence[int]) -> None:
        assert self._queue is not None
        for slot in slots:
            (self.writing if self._queue.depart(slot) else self.ready)[slot] = None

    def _take_back(self, slot: int, now_s: float) -> None:
        """Put a block that was set aside back under the inner policy, after its parents. Its write goes on."""
        pool = self._pool
        assert pool is not None
        branch: list[tuple[int, Hashable, int]] = []
        while self._leaves(slot):
            branch.append((slot, pool.key_of(slot), pool.parent_slot_of(slot)))
            self._forget(slot)
            slot = branch[-1][2]
        for slot, key, before in reversed(branch):
            if pool.is_tail(slot):
                insert_tail(self.inner, (key,), (slot,), before, now_s)
            else:
                self.inner.inserted((key,), (slot,), before, now_s)
            if slot not in pool.leased:  # else it becomes evictable when the lease ends
                self.inner.evictable((slot,))

    def _leaves(self, slot: int) -> bool:
        return slot in self.writing or slot in self.ready

    def _forget(self, slot: int) -> None:
        self.writing.pop(slot, None)
        self.ready.pop(slot, None)
