"""The host arena behind the contract of a tier, so that the public kit can be run on it.

The manager writes through `slot_views`, and everything is read as a rank reads it: through a second mapping made from
descriptors of its own. A promise about a slot stays when the slot gets another block, as in a load plan that is not
executed yet; only the table of generations says that the promise no longer holds.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion, RecoveredBlock
from kvbm.tiers.host import HostArena, open_arena


class RankMapping:
    """One rank's mapping of its shard, without torch: for a whole one see `kvbm.worker.mapping`."""

    def __init__(self, fds: Sequence[int], slot_bytes: int) -> None:
        """Closes the descriptors."""
        self.region: mmap.mmap
        self.region, self._table = open_arena(fds)
        self._slot_bytes = slot_bytes
        self._generations = memoryview(self._table).cast("Q")

    @classmethod
    def of(cls, arena: HostArena, shard: int) -> RankMapping:
        """A second mapping of an arena in this process."""
        fds = [os.dup(arena.region_fds[shard]), os.dup(arena.generation_fd)]
        return cls(fds, arena.layout.slot_bytes)

    def intact(self, slot: int, generation: int) -> bool:
        """The slot has not changed hands since it had this generation."""
        return self._generations[slot] == generation

    def read(self, slot: int) -> bytes:
        return self.region[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def write(self, slot: int, content: bytes) -> None:
        start = slot * self._slot_bytes
        self.region[start : start + len(content)] = content

    def close(self) -> None:
        self._generations.release()
        self._table.close()
        self.region.close()


class HostArenaTier:
    """A `RunTier` over a `HostArena`. Copies run at once; their completions wait for `poll`."""

    name = "host"
    fault = ""
    run_blocks_max = 3

    def __init__(self, layout: BlockLayout, slot_count: int, pending_limit: int) -> None:
        self.slot_count = slot_count
        self.pending_limit = pending_limit
        self._arena = HostArena(layout, slot_count, touch_threads=1)
        self._ranks = [RankMapping.of(self._arena, shard) for shard in range(layout.shard_count)]
        self._promised: dict[tuple[BlockKey, SlotIndex], int] = {}
        self._names: dict[SlotIndex, tuple[bytes, int]] = {}
        self._done: list[Completion] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def recovered(self) -> Iterable[RecoveredBlock]:
        """Memory outlives nobody."""
        return []

    def submit_store(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[memoryview]
    ) -> Outcome:
        if (refusal := self._refusal()) is not None:
            return refusal
        slots = range(slot, slot + len(blocks))
        self._arena.invalidate_all(slots)
        for view, source in zip(self._arena.slot_views(slot, len(blocks)), sources, strict=True):
            with view:
                view[:] = source
        for each, block in zip(map(SlotIndex, slots), blocks, strict=True):
            self._promised[block.key, each] = self._arena.generation(each)
            self._names[each] = block.engine_hash, block.group
        return self._complete(job_id, [BlockEnd(Outcome.HIT)] * len(blocks))

    def submit_load(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        if (refusal := self._refusal()) is not None:
            return refusal
        size = self._arena.layout.slot_bytes
        ends = list[BlockEnd]()
        for place, key in enumerate(keys):
            views = [target[place * size : (place + 1) * size] for target in targets]
            ends.append(self._load(key, SlotIndex(slot + place), views))
        return self._complete(job_id, ends)

    def _load(self, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]) -> BlockEnd:
        generation = self._promised.get((key, slot))
        if generation is None:
            return BlockEnd(Outcome.MISS)
        whole = True
        for rank, target in zip(self._ranks, targets, strict=True):
            whole = whole and rank.intact(slot, generation)
            target[:] = rank.read(slot)
            whole = whole and rank.intact(slot, generation)
        return BlockEnd(Outcome.HIT, False, *self._names[slot]) if whole else BlockEnd(Outcome.MISS)

    def forget(self, slot: SlotIndex, count: int = 1) -> None:
        """The promises stay: the reader has to notice that one does not hold."""
        self._arena.invalidate_all(range(slot, slot + count))

    def sync(self) -> int:
        return 0

    @property
    def synced(self) -> int:
        return 0

    @property
    def load_room(self) -> int:
        return max(0, self.pending_limit - len(self._done))

    @property
    def store_room(self) -> int:
        return self.load_room

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._event)
        if self._closed and self._event >= 0:
            os.close(self._event)
            self._event = -1
        return done

    def fileno(self) -> int:
        return self._event

    @property
    def busy_s(self) -> float:
        return 0.0

    def heal(self) -> Outcome:
        return Outcome.RETRY if self._closed else Outcome.HIT

    def drain(self, deadline_s: float) -> bool:
        return True

    def close(self, keep: bool, deadline_s: float = 0.0) -> None:
        """Completions that nobody took keep the descriptor of `fileno` until they are polled."""
        if self._closed:
            return
        self._closed = True
        for rank in self._ranks:
            rank.close()
        self._arena.close()
        if not self._done:
            os.close(self._event)
            self._event = -1

    def _refusal(self) -> Outcome | None:
        if self._closed:
            return Outcome.RETRY
        return None if self.load_room else Outcome.THROTTLED

    def _complete(self, job_id: int, ends: Sequence[BlockEnd]) -> Outcome:
        if not self._done:
            os.eventfd_write(self._event, 1)
        self._done.append(Completion.of(job_id, ends, self._arena.layout.block_bytes))
        return Outcome.PENDING
