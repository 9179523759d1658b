"""A storage tier: blocks in a dict. See docs/guides/extending.md; the contract is `kvbm.tiers.contract.RunTier`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion, RecoveredBlock


class StoredBlock(NamedTuple):
    """The content of one slot."""

    head: BlockHead
    content: bytes
    checksum: bytes


class DictTier:
    """Keeps `slot_count` blocks in this process, and forgets them with it: nothing is recovered after a restart.

    A dict answers at once, so every accepted submission is complete when the call returns. `poll` hands its completion
    out. A tier over a network would begin the transfer here and add the completion when it has ended.
    """

    name = "dict"
    fault = ""
    run_blocks_max = 1

    def __init__(self, slot_count: int, fingerprint: bytes, pending_limit: int = 8) -> None:
        self.slot_count, self.pending_limit = slot_count, pending_limit
        self.blocks: dict[int, StoredBlock] = {}
        self._fingerprint = fingerprint
        self._done: list[Completion] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def recovered(self) -> Iterable[RecoveredBlock]:
        return ()

    def submit_store(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[memoryview]
    ) -> Outcome:
        if refusal := self._refusal():
            return refusal
        (head,), content = blocks, b"".join(sources)
        self.blocks[slot] = StoredBlock(head, content, self._checksum(head.key, content))
        self._complete(job_id, BlockEnd(Outcome.HIT), len(content))
        return Outcome.PENDING

    def submit_load(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        if refusal := self._refusal():
            return refusal
        (key,) = keys
        self._complete(job_id, self._load(key, slot, targets), sum(map(len, targets)))
        return Outcome.PENDING

    def forget(self, slot: SlotIndex, count: int = 1) -> None:
        for each in range(slot, slot + count):
            self.blocks.pop(each, None)

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
        if self._closed:
            self._close_event()
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
        self._closed = True
        self.blocks.clear()
        if not self._done:
            self._close_event()

    def _refusal(self) -> Outcome | None:
        if self._closed:
            return Outcome.RETRY
        return None if self.load_room else Outcome.THROTTLED

    def _load(self, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]) -> BlockEnd:
        held = self.blocks.get(slot)
        if held is None or held.head.key != key:
            return BlockEnd(Outcome.MISS)
        if held.checksum != self._checksum(key, held.content):
            del self.blocks[slot]
            return BlockEnd(Outcome.MISS, corrupt=True)
        start = 0
        for target in targets:
            target[:] = held.content[start : start + target.nbytes]
            start += target.nbytes
        return BlockEnd(Outcome.HIT, engine_hash=held.head.engine_hash, group=held.head.group)

    def _checksum(self, key: BlockKey, content: bytes) -> bytes:
        """Over the namespace and the key too: the bytes of another block, or of other weights, never fit."""
        return hashlib.blake2b(self._fingerprint + key + content, digest_size=16).digest()

    def _close_event(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def _complete(self, job_id: int, end: BlockEnd, block_bytes: int) -> None:
        if not self._done:
            os.eventfd_write(self._event, 1)
        self._done.append(Completion.of(job_id, [end], block_bytes))
