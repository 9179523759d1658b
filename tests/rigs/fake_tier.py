"""A storage tier in host memory whose completions a test releases by hand, and that fails on demand.

Everything that a medium may do at any moment it does at the worst one: a load scribbles over its targets at once and
brings the bytes only when it is released; a store reads its sources only when it is released, and fails the test when
they changed meanwhile. So a slot that is given away too early is always noticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion, RecoveredBlock
from kvbm.tiers.host import HostArena

_SCRIBBLE = b"\xa5"


@dataclass(slots=True)
class _Entry:
    key: BlockKey
    parent: BlockKey | None
    sequence: int
    digest: bytes
    engine_hash: bytes
    group: int


class FakeMedium:
    """The part that outlives a tier: the bytes, and a journal of them. Close it at the end of the test."""

    def __init__(self, layout: BlockLayout, slot_count: int) -> None:
        self.layout = layout
        self.slot_count = slot_count
        self.entries: dict[int, _Entry] = {}
        self.sequence = 0
        self._arena = HostArena(layout, slot_count, touch_threads=0)

    def views(self, slot: int) -> list[memoryview]:
        """The slot's bytes, one view per shard."""
        return self._arena.slot_views(slot)

    def corrupt(self, slot: int, byte: int = 0) -> None:
        """Flip one bit of the first shard."""
        view = self.views(slot)[0]
        view[byte % len(view)] ^= 1

    def close(self) -> None:
        """Release the memory."""
        self._arena.close()


@dataclass(slots=True)
class _PendingBlock:
    slot: int
    head: BlockHead
    views: Sequence[memoryview]
    digest: bytes


@dataclass(slots=True)
class _Pending:
    job_id: int
    blocks: list[_PendingBlock]
    is_store: bool

    @property
    def slots(self) -> range:
        return range(self.blocks[0].slot, self.blocks[0].slot + len(self.blocks))


class FakeTier:
    """A `RunTier` for tests. With `by_hand` nothing completes before `release`; otherwise everything does at once.

    `throttled` refuses new work. `lose` makes stores complete with success and keep nothing. `break_down` turns the
    tier off: pending work completes with RETRY, and `heal` works again once `mend` was called. An operation of the
    medium takes as long as `busy_s` says.
    """

    name = "fake"

    def __init__(
        self, medium: FakeMedium, pending_limit: int = 8, by_hand: bool = True, run_blocks_max: int = 1
    ) -> None:
        self.medium = medium
        self.slot_count = medium.slot_count
        self.pending_limit = pending_limit
        self.run_blocks_max = run_blocks_max
        self.runs: list[int] = []
        """The lengths of the runs that were accepted."""
        self.throttled = False
        self.lose = False
        self.forgotten: list[int] = []
        self.busy_s = 0.0
        self.holds_sync = False
        self.synced = self._sync_wanted = 0
        self._by_hand = by_hand
        self._fault = ""
        self._mended = True
        self._closed = False
        self._pending: list[_Pending] = []
        self._done: list[Completion] = []
        self._recovered = self._recover()
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

    def break_down(self, reason: str = "fake tier is off: broken by the test") -> None:
        """The medium fails from now on."""
        self._fault, self._mended = reason, False
        self.release()

    def kill(self) -> None:
        """The process dies: pending work never happens, and its memory is gone. Only the medium is of use now."""
        self._pending.clear()
        self._done.clear()
        self._closed = True
        self._close_event()

    def mend(self) -> None:
        """The medium works again; the tier comes back with the next `heal`."""
        self._mended = True

    # ---- RunTier

    @property
    def fault(self) -> str:
        return self._fault

    def recovered(self) -> Iterable[RecoveredBlock]:
        found, self._recovered = self._recovered, []
        return sorted(found, key=lambda block: block.sequence)

    def submit_store(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[memoryview]
    ) -> Outcome:
        return self._submit(job_id, blocks, slot, sources, is_store=True)

    def submit_load(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        return self._submit(job_id, [BlockHead(key, None) for key in keys], slot, targets, is_store=False)

    def forget(self, slot: SlotIndex, count: int = 1) -> None:
        for each in range(slot, slot + count):
            assert all(each not in pending.slots for pending in self._pending), "forgotten while in use"
            self.forgotten.append(each)
            self.medium.entries.pop(each, None)

    def sync(self) -> int:
        """What is forgotten is gone from the medium at once, but a test may hold `synced` back."""
        self._sync_wanted += 1
        if not self.holds_sync:
            self.synced = self._sync_wanted
        return self._sync_wanted

    @property
    def load_room(self) -> int:
        """None while `throttled`."""
        return 0 if self.throttled else max(0, self.pending_limit - len(self._pending) - len(self._done))

    @property
    def store_room(self) -> int:
        return self.load_room

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._event)
        if self._closed:
            self._close_event()
        return done

    def fileno(self) -> int:
        return self._event

    def heal(self) -> Outcome:
        """HIT after `mend`; the blocks of the medium are in `recovered` again."""
        if not self._mended or self._closed:
            return Outcome.RETRY
        if self._fault:
            self._fault = ""
            self._recovered = self._recover()
        return Outcome.HIT

    def drain(self, deadline_s: float) -> bool:
        """Complete everything, so that a caller that waits sees the end."""
        self.release()
        return True

    def close(self, keep: bool, deadline_s: float = 0.0) -> None:
        if self._closed:
            return
        self.release()
        self._closed = True
        if not keep:
            self.medium.entries.clear()
        if not self._done:
            self._close_event()

    # ---- inside

    def _submit(
        self,
        job_id: int,
        heads: Sequence[BlockHead],
        slot: int,
        buffers: Sequence[memoryview],
        is_store: bool,
    ) -> Outcome:
        size, count = self.medium.layout.slot_bytes, len(heads)
        assert 0 < count <= self.run_blocks_max and 0 <= slot <= self.slot_count - count
        assert len(buffers) == self.medium.layout.shard_count
        assert all(buffer.nbytes == count * size for buffer in buffers)
        if self._fault or self._closed:
            return Outcome.RETRY
        if self.load_room == 0:
            return Outcome.THROTTLED
        blocks = []
        for place, head in enumerate(heads):
            views = [buffer[place * size : (place + 1) * size] for buffer in buffers]
            blocks.append(_PendingBlock(slot + place, head, views, _digest(views) if is_store else b""))
            if is_store:
                self.medium.entries.pop(slot + place, None)
            else:
                for view in views:
                    view[:] = _SCRIBBLE * len(view)
        self._pending.append(_Pending(job_id, blocks, is_store))
        self.runs.append(count)
        if not self._by_hand:
            self.release()
        return Outcome.PENDING

    def _complete(self, pending: _Pending) -> None:
        if self._fault:
            ends = [BlockEnd(Outcome.RETRY)] * len(pending.blocks)
        else:
            ends = [self._write(block) if pending.is_store else self._read(block) for block in pending.blocks]
        if not self._done:
            os.eventfd_write(self._event, 1)
        block_bytes = self.medium.layout.block_bytes
        self._done.append(Completion.of(pending.job_id, ends, block_bytes, error=self._fault))

    def _read(self, block: _PendingBlock) -> BlockEnd:
        entry = self.medium.entries.get(block.slot)
        if entry is None or entry.key != block.head.key:
            return BlockEnd(Outcome.MISS)
        for source, target in zip(self.medium.views(block.slot), block.views, strict=True):
            target[:] = source
        if _digest(block.views) != entry.digest:
            del self.medium.entries[block.slot]
            return BlockEnd(Outcome.MISS, corrupt=True)
        return BlockEnd(Outcome.HIT, False, entry.engine_hash, entry.group)

    def _write(self, block: _PendingBlock) -> BlockEnd:
        assert _digest(block.views) == block.digest, "the sources of a store changed before it ended"
        if not self.lose:
            medium, head = self.medium, block.head
            for source, target in zip(block.views, medium.views(block.slot), strict=True):
                target[:] = source
            medium.sequence += 1
            medium.entries[block.slot] = _Entry(
                head.key, head.parent, medium.sequence, block.digest, head.engine_hash, head.group
            )
        return BlockEnd(Outcome.HIT)

    def _recover(self) -> list[RecoveredBlock]:
        """The blocks of the medium; of two blocks with one key the newer."""
        newest: dict[BlockKey, RecoveredBlock] = {}
        for slot, entry in sorted(self.medium.entries.items(), key=lambda item: item[1].sequence):
            newest[entry.key] = RecoveredBlock(
                key=entry.key,
                slot=SlotIndex(slot),
                sequence=entry.sequence,
                parent=entry.parent,
                engine_hash=entry.engine_hash,
                group=entry.group,
            )
        kept = {block.slot for block in newest.values()}
        self.medium.entries = {slot: entry for slot, entry in self.medium.entries.items() if slot in kept}
        return list(newest.values())

    def _close_event(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


def _digest(views: Sequence[memoryview]) -> bytes:
    digest = blake3()
    for view in views:
        digest.update(view)
    return digest.digest()
