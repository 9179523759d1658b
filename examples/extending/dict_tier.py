"""A storage tier: blocks in a dict. See docs/guides/extending.md; the contract is `kvbm.tiers.contract.SlotTier`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.tiers.contract import Completion, RecoveredBlock


class StoredBlock(NamedTuple):
    """The content of one slot."""

    key: BlockKey
    content: bytes
    checksum: bytes
    engine_hash: bytes
    group: int


class DictTier:
    """Keeps `slot_count` blocks in this process, and forgets them with it: nothing is recovered after a restart.

    A dict answers at once, so every accepted submission is complete when the call returns. `poll` hands its completion
    out. A tier over a network would begin the transfer here and add the completion when it has ended.
    """

    name = "dict"
    fault = ""

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
        self,
        job_id: int,
        key: BlockKey,
        parent: BlockKey | None,
        slot: SlotIndex,
        sources: Sequence[memoryview],
        engine_hash: bytes = b"",
        group: int = 0,
    ) -> Outcome:
        if refusal := self._refusal():
            return refusal
        content = b"".join(sources)
        self.blocks[slot] = StoredBlock(key, content, self._checksum(key, content), engine_hash, group)
        self._complete(Completion(job_id=job_id, outcome=Outcome.HIT, bytes_moved=len(content)))
        return Outcome.PENDING

    def submit_load(
        self, job_id: int, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        if refusal := self._refusal():
            return refusal
        self._complete(self._load(job_id, key, slot, targets))
        return Outcome.PENDING

    def forget(self, slot: SlotIndex) -> None:
        self.blocks.pop(slot, None)

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._event)
        return done

    def fileno(self) -> int:
        return self._event

    def heal(self) -> bool:
        return not self._closed

    def drain(self, deadline_s: float) -> bool:
        return True

    def close(self, keep: bool) -> None:
        self._closed = True
        self.blocks.clear()

    def _refusal(self) -> Outcome | None:
        if self._closed:
            return Outcome.RETRY
        return Outcome.THROTTLED if len(self._done) >= self.pending_limit else None

    def _load(self, job_id: int, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]) -> Completion:
        held = self.blocks.get(slot)
        if held is None or held.key != key:
            return Completion(job_id=job_id, outcome=Outcome.MISS)
        if held.checksum != self._checksum(key, held.content):
            del self.blocks[slot]
            return Completion(job_id=job_id, outcome=Outcome.MISS, corrupt=True)
        start = 0
        for target in targets:
            target[:] = held.content[start : start + target.nbytes]
            start += target.nbytes
        return Completion(
            job_id=job_id,
            outcome=Outcome.HIT,
            bytes_moved=start,
            engine_hash=held.engine_hash,
            group=held.group,
        )

    def _checksum(self, key: BlockKey, content: bytes) -> bytes:
        """Over the namespace and the key too: the bytes of another block, or of other weights, never fit."""
        return hashlib.blake2b(self._fingerprint + key + content, digest_size=16).digest()

    def _complete(self, completion: Completion) -> None:
        if not self._done:
            os.eventfd_write(self._event, 1)
        self._done.append(completion)
