"""A storage tier in host memory whose completions a test releases by hand, and that fails on demand.

Everything that a medium may do at any moment it does at the worst one: a load scribbles over its targets at once and
brings the bytes only when it is released; a store reads its sources only when it is released, and fails the test when
they changed meanwhile. So a slot that is given away too early is always noticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout
from kvbm.tiers.contract import Completion, RecoveredBlock
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
class _Pending:
    job_id: int
    key: BlockKey
    slot: SlotIndex
    views: Sequence[memoryview]
    parent: BlockKey | None = None
    digest: bytes = b""
    is_store: bool = field(default=False)
    engine_hash: bytes = b""
    group: int = 0


class FakeTier:
    """A `SlotTier` for tests. With `by_hand` nothing completes before `release`; otherwise everything does at once.

    `throttled` refuses new work. `lose` makes stores complete with success and keep nothing. `break_down` turns the
    tier off: pending work completes with RETRY, and `heal` works again once `mend` was called.
    """

    name = "fake"

    def __init__(self, medium: FakeMedium, pending_limit: int = 8, by_hand: bool = True) -> None:
        self.medium = medium
        self.slot_count = medium.slot_count
        self.pending_limit = pending_limit
        self.throttled = False
        self.lose = False
        self.forgotten: list[int] = []
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

    # ---- SlotTier

    @property
    def fault(self) -> str:
        return self._fault

    def recovered(self) -> Iterable[RecoveredBlock]:
        found, self._recovered = self._recovered, []
        return found

    def submit_store(
        self,
        job_id: int,
        key: BlockKey,
        parent: BlockKey | None,
        slot: SlotIndex,
        sources: Sequence[memoryview],
        engine_hash: bytes = b"",
        group: int = 0,
    ) -> Outcome:
        digest = _digest(sources)
        return self._submit(_Pending(job_id, key, slot, sources, parent, digest, True, engine_hash, group))

    def submit_load(
        self, job_id: int, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        return self._submit(_Pending(job_id, key, slot, targets))

    def forget(self, slot: SlotIndex) -> None:
        assert all(pending.slot != slot for pending in self._pending), "forgotten while in use"
        self.forgotten.append(slot)
        self.medium.entries.pop(slot, None)

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._event)
        if self._closed:
            self._close_event()
        return done

    def fileno(self) -> int:
        return self._event

    def heal(self) -> bool:
        """True after `mend`; the blocks of the medium are in `recovered` again."""
        if not self._mended or self._closed:
            return False
        if self._fault:
            self._fault = ""
            self._recovered = self._recover()
        return True

    def drain(self, deadline_s: float) -> bool:
        """Complete everything, so that a caller that waits sees the end."""
        self.release()
        return True

    def close(self, keep: bool) -> None:
        if self._closed:
            return
        self.release()
        self._closed = True
        if not keep:
            self.medium.entries.clear()
        if not self._done:
            self._close_event()

    # ---- inside

    def _submit(self, pending: _Pending) -> Outcome:
        assert 0 <= pending.slot < self.slot_count
        assert len(pending.views) == self.medium.layout.shard_count
        assert all(view.nbytes == self.medium.layout.slot_bytes for view in pending.views)
        if self._fault or self._closed:
            return Outcome.RETRY
        if self.throttled or len(self._pending) + len(self._done) >= self.pending_limit:
            return Outcome.THROTTLED
        if pending.is_store:
            self.medium.entries.pop(pending.slot, None)
        else:
            for view in pending.views:
                view[:] = _SCRIBBLE * len(view)
        self._pending.append(pending)
        if not self._by_hand:
            self.release()
        return Outcome.PENDING

    def _complete(self, pending: _Pending) -> None:
        size = self.medium.layout.block_bytes
        if self._fault:
            completion = Completion(job_id=pending.job_id, outcome=Outcome.RETRY, error=self._fault)
        elif pending.is_store:
            self._write(pending)
            completion = Completion(job_id=pending.job_id, outcome=Outcome.HIT, bytes_moved=size)
        else:
            entry = self.medium.entries.get(pending.slot)
            if entry is None or entry.key != pending.key:
                completion = Completion(job_id=pending.job_id, outcome=Outcome.MISS)
            else:
                for source, target in zip(self.medium.views(pending.slot), pending.views, strict=True):
                    target[:] = source
                right = _digest(pending.views) == entry.digest
                outcome = Outcome.HIT if right else Outcome.MISS
                completion = Completion(
                    job_id=pending.job_id,
                    outcome=outcome,
                    corrupt=not right,
                    bytes_moved=size if right else 0,
                    engine_hash=entry.engine_hash,
                    group=entry.group,
                )
                if not right:
                    del self.medium.entries[pending.slot]
        if not self._done:
            os.eventfd_write(self._event, 1)
        self._done.append(completion)

    def _write(self, pending: _Pending) -> None:
        assert _digest(pending.views) == pending.digest, "the sources of a store changed before it ended"
        if self.lose:
            return
        medium = self.medium
        for source, target in zip(pending.views, medium.views(pending.slot), strict=True):
            target[:] = source
        medium.sequence += 1
        medium.entries[pending.slot] = _Entry(
            pending.key, pending.parent, medium.sequence, pending.digest, pending.engine_hash, pending.group
        )

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
