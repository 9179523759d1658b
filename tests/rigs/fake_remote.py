"""A remote tier in memory whose completions a test releases by hand, and that fails on demand.

As `fake_tier`, it does everything at the worst moment: a load scribbles over its targets at once and brings the bytes
only when it is released; a store reads its sources only when it is released, and fails the test when they changed.
What a node believes of the store and what lies there are two things: several `FakeRemote` may share a `FakeStore`,
each knows what it stored itself, and `learn` tells it of more, true or not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvbm.block import BlockKey, Outcome
from kvbm.layout import BlockLayout
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion
from kvbm.tiers.remote.contract import NOWHERE, Buffers, News

_SCRIBBLE = b"\xa5"


@dataclass(slots=True)
class StoredBlock:
    """What a `FakeStore` has of a block; `digest` is that of the bytes that were stored."""

    head: BlockHead
    shards: list[bytearray]
    digest: bytes
    tenant: str | None
    tail: bool


class FakeStore:
    """The part that nodes share, and that outlives them: blocks by key."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.blocks: dict[BlockKey, StoredBlock] = {}

    def put(
        self,
        head: BlockHead,
        shards: Sequence[bytes | bytearray | memoryview],
        tenant: str | None = None,
        tail: bool = False,
    ) -> None:
        """Put a block there, as another node would."""
        copies = [bytearray(shard) for shard in shards]
        self.blocks[head.key] = StoredBlock(head, copies, _digest(copies), tenant, tail)

    def corrupt(self, key: BlockKey, byte: int = 0) -> None:
        """Flip one bit of the first shard: a load of it is a MISS, and the block is gone then."""
        shard = self.blocks[key].shards[0]
        shard[byte % len(shard)] ^= 1

    def lose(self, keys: Iterable[BlockKey]) -> None:
        """The blocks are gone from the store; the nodes do not know it yet."""
        for key in keys:
            self.blocks.pop(key, None)


@dataclass(slots=True)
class _Pending:
    job_id: int
    heads: Sequence[BlockHead]
    buffers: Sequence[Buffers]
    digests: list[bytes]
    is_store: bool
    tenant: str | None
    tail: bool


class FakeRemote:
    """A `RemoteTier` for tests. With `by_hand` nothing completes before `release`; otherwise everything does at once.

    `throttled` refuses new work. `lose` makes stores complete with success and keep nothing. `break_down` turns the
    tier off: pending work completes with RETRY, and the first `tick` after `mend` brings it back. With `sealed` a
    block can be read by the tenant alone that stored it. `seconds` is what `expected_s` and each completion say.
    """

    name = "fake"

    def __init__(
        self,
        store: FakeStore,
        pending_limit: int = 8,
        by_hand: bool = True,
        load_blocks_max: int = 4,
        store_blocks_max: int = 8,
        sealed: bool = False,
    ) -> None:
        self.store = store
        self.pending_limit = pending_limit
        self.load_blocks_max = load_blocks_max
        self.store_blocks_max = store_blocks_max
        self.throttled = False
        self.lose = False
        self.seconds = 0.0
        self.full = ""  # why it takes no stores; it is still read from
        self.loads: list[tuple[int, int]] = []
        """Place and number of blocks of each load that was accepted."""
        self.stores: list[int] = []
        """The number of blocks of each store that was accepted."""
        self.links: dict[str, int] = {}
        self.errors = self.touch_errors = self.compressed = 0
        """What it says of failed reads, of failed touches and of compressed packs."""
        self.touched: list[BlockKey] = []
        """The blocks of which it told the store that they are in use."""
        self._by_hand = by_hand
        self._sealed = sealed
        self._fault = ""
        self._mended = True
        self._closed = False
        self._pending: list[_Pending] = []
        self._done: list[Completion] = []
        self._place_of: dict[BlockKey, int] = {}
        self._tail_places: set[int] = set()
        self._next_place = 0
        self._announced: set[BlockKey] = set()
        self._came: dict[BlockKey, None] = {}
        self._gone: dict[BlockKey, None] = {}
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- what a test does

    @property
    def pending_count(self) -> int:
        """Submissions that were accepted and not released."""
        return len(self._pending)

    def release(self, count: int | None = None, first: int = 0) -> int:
        """Complete `count` submissions (None: all), beginning with the one at position `first`; how many there were."""
        end = len(self._pending) if count is None else first + count
        chosen, self._pending = self._pending[first:end], self._pending[:first] + self._pending[end:]
        for pending in chosen:
            self._complete(pending)
        return len(chosen)

    def learn(self, keys: Sequence[BlockKey]) -> None:
        """Hear that these blocks lie in the store, one after the other, put there by another node. They need not.

        `news` speaks of them when they were loaded (see `RemoteTier.news`)."""
        stored = [self.store.blocks.get(key) for key in keys]
        self._know(keys, any(block is not None and block.tail for block in stored))

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Hear that these blocks are gone."""
        for key in keys:
            self._drop(key)

    def corrupt(self, key: BlockKey, byte: int = 0) -> None:
        """As `FakeStore.corrupt`."""
        self.store.corrupt(key, byte)

    def break_down(self, reason: str = "fake store is off: broken by the test") -> None:
        """The store fails from now on."""
        self._fault, self._mended = reason, False
        self.release()

    def mend(self) -> None:
        """The store works again; the tier comes back with the next `tick`."""
        self._mended = True

    # ---- RemoteTier

    def places(self, keys: Sequence[BlockKey]) -> list[int]:
        return [self._place_of.get(key, NOWHERE) for key in keys]

    def tail(self, place: int) -> bool:
        return place in self._tail_places

    def used(self, keys: Sequence[BlockKey], may_tell: Callable[[], bool]) -> None:
        known = [key for key in keys if key in self._place_of]
        if known and not self._fault and may_tell():
            self.touched += known

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        targets: Sequence[Buffers],
        tenant: str | None,
    ) -> Outcome:
        assert 0 < len(keys) <= self.load_blocks_max and 0 <= place <= self._next_place - len(keys)
        outcome = self._submit(job_id, [BlockHead(key, None) for key in keys], targets, tenant, False, False)
        if outcome is Outcome.PENDING:
            self.loads.append((place, len(keys)))
        return outcome

    def submit_store(
        self,
        job_id: int,
        blocks: Sequence[BlockHead],
        sources: Sequence[Buffers],
        tenant: str | None,
        tail: bool = False,
    ) -> Outcome:
        assert 0 < len(blocks) <= self.store_blocks_max
        assert len({head.key for head in blocks}) == len(blocks)
        outcome = self._submit(job_id, tuple(blocks), sources, tenant, True, tail)
        if outcome is Outcome.PENDING:
            self.stores.append(len(blocks))
        return outcome

    @property
    def load_room(self) -> int:
        return self._room

    @property
    def store_room(self) -> int:
        return self._room

    def expected_s(self, byte_count: int) -> float:
        return self.seconds

    def news(self) -> News:
        came, gone = list(self._came), list(self._gone)
        self._came.clear()
        self._gone.clear()
        return News(came, gone)

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._event)
        if self._closed:
            self._close_event()
        return done

    def fileno(self) -> int:
        return self._event

    @property
    def fault(self) -> str:
        return self._fault

    @property
    def store_fault(self) -> str:
        return self._fault or self.full

    def tick(self) -> None:
        if self._mended and not self._closed:
            self._fault = ""

    def describe(self) -> dict[str, object]:
        state = "open" if self._fault else "closed"
        return {
            "place": "memory of a test",
            "requests": {"put": len(self.stores), "get": len(self.loads), "list": 0, "delete": 0},
            "blocks": len(self._place_of),
            "packs": len(self.stores),
            "complete": True,
            "reading": state,
            "writing": state,
            "fault": self._fault,
            "store_fault": self.store_fault,
            "read_errors": self.errors,
            "write_errors": 0,
            "latency_s": self.seconds,
            "touched": len(self.touched),
            "touch_errors": self.touch_errors,
            "compressed_packs": self.compressed,
            "links": self.links,
        }

    def drain(self, deadline_s: float) -> bool:
        """Complete everything, so that a caller that waits sees the end."""
        self.release()
        return True

    def close(self, deadline_s: float = 0.0) -> None:
        if self._closed:
            return
        self.release()
        self._closed = True
        if not self._done:
            self._close_event()

    # ---- inside

    @property
    def _room(self) -> int:
        return 0 if self.throttled else max(0, self.pending_limit - len(self._pending) - len(self._done))

    def _submit(
        self,
        job_id: int,
        heads: Sequence[BlockHead],
        buffers: Sequence[Buffers],
        tenant: str | None,
        is_store: bool,
        tail: bool,
    ) -> Outcome:
        layout = self.store.layout
        assert len(buffers) == len(heads), "the buffers of each block"
        for shards in buffers:
            assert [shard.nbytes for shard in shards] == [layout.slot_bytes] * layout.shard_count
        if self._fault or self._closed or (is_store and self.full):
            return Outcome.RETRY
        if self._room == 0:
            return Outcome.THROTTLED
        digests = [_digest(shards) for shards in buffers] if is_store else []
        if not is_store:
            for shards in buffers:
                for shard in shards:
                    shard[:] = _SCRIBBLE * len(shard)
        self._pending.append(_Pending(job_id, heads, buffers, digests, is_store, tenant, tail))
        if not self._by_hand:
            self.release()
        return Outcome.PENDING

    def _complete(self, pending: _Pending) -> None:
        if self._fault:
            ends = [BlockEnd(Outcome.RETRY)] * len(pending.heads)
        elif pending.is_store:
            ends = self._write(pending)
        else:
            ends = [self._read(pending, number) for number in range(len(pending.heads))]
        if not self._done:
            os.eventfd_write(self._event, 1)
        block_bytes = self.store.layout.block_bytes
        self._done.append(Completion.of(pending.job_id, ends, block_bytes, self.seconds, self._fault))

    def _read(self, pending: _Pending, number: int) -> BlockEnd:
        key, targets = pending.heads[number].key, pending.buffers[number]
        block = self.store.blocks.get(key)
        if block is None:
            self._drop(key)
            return BlockEnd(Outcome.MISS)
        if self._sealed and block.tenant != pending.tenant:
            return BlockEnd(Outcome.MISS)
        for source, target in zip(block.shards, targets, strict=True):
            target[:] = source
        if _digest(targets) != block.digest:
            del self.store.blocks[key]
            self._drop(key)
            return BlockEnd(Outcome.MISS, corrupt=True)
        head = block.head
        self._announce(key)
        return BlockEnd(Outcome.HIT, False, head.engine_hash, head.group, head.facts)

    def _write(self, pending: _Pending) -> list[BlockEnd]:
        for shards, digest in zip(pending.buffers, pending.digests, strict=True):
            assert _digest(shards) == digest, "the sources of a store changed before it ended"
        if not self.lose:
            for head, shards in zip(pending.heads, pending.buffers, strict=True):
                self.store.put(head, shards, pending.tenant, pending.tail)
        self._know([head.key for head in pending.heads], pending.tail)
        for head in pending.heads:
            self._announce(head.key)
        return [BlockEnd(Outcome.HIT)] * len(pending.heads)

    def _know(self, keys: Sequence[BlockKey], tail: bool) -> None:
        for key in keys:
            self._place_of[key] = self._next_place
            if tail:
                self._tail_places.add(self._next_place)
            self._next_place += 1
        self._next_place += 1  # what is learned apart is not read together

    def _announce(self, key: BlockKey) -> None:
        if key in self._place_of and key not in self._announced:
            self._announced.add(key)
            self._came[key] = None
            self._gone.pop(key, None)

    def _drop(self, key: BlockKey) -> None:
        self._place_of.pop(key, None)
        if key in self._announced:
            self._announced.discard(key)
            self._gone[key] = None
            self._came.pop(key, None)

    def _close_event(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


def _digest(shards: Sequence[bytes | bytearray | memoryview]) -> bytes:
    digest = blake3()
    for shard in shards:
        digest.update(shard)
    return digest.digest()
