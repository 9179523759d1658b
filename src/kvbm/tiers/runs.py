"""Runs on a tier that moves single blocks: every `SlotTier` as a `RunTier`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.tiers.contract import BlockHead, Completion, RecoveredBlock, RunTier, SlotTier


def with_runs(tier: SlotTier) -> RunTier:
    """The tier itself where it moves runs, else one around it whose runs are one block long."""
    return cast(RunTier, tier) if hasattr(tier, "submit_load_run") else BlockwiseRuns(tier)


class BlockwiseRuns:
    """A `RunTier` over a `SlotTier`. It answers as that one does, and takes one block for a run."""

    run_blocks_max = 1

    def __init__(self, tier: SlotTier) -> None:
        self._tier = tier
        self.name, self.slot_count, self.pending_limit = tier.name, tier.slot_count, tier.pending_limit
        # The jobs submitted here that were not collected: those of runs, and how many in all.
        self._runs: set[int] = set()
        self._uncollected = 0

    @property
    def load_room(self) -> int:
        return max(0, self.pending_limit - self._uncollected)

    @property
    def store_room(self) -> int:
        return self.load_room

    def submit_store_run(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[memoryview]
    ) -> Outcome:
        ((key, parent, engine_hash, group, _),) = blocks
        outcome = self.submit_store(job_id, key, parent, slot, sources, engine_hash, group)
        return self._noted(job_id, outcome)

    def submit_load_run(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        (key,) = keys
        return self._noted(job_id, self.submit_load(job_id, key, slot, targets))

    def forget_run(self, slot: SlotIndex, count: int) -> None:
        for each in range(slot, slot + count):
            self._tier.forget(SlotIndex(each))

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
        outcome = self._tier.submit_store(job_id, key, parent, slot, sources, engine_hash, group)
        self._uncollected += outcome is Outcome.PENDING
        return outcome

    def submit_load(
        self, job_id: int, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        outcome = self._tier.submit_load(job_id, key, slot, targets)
        self._uncollected += outcome is Outcome.PENDING
        return outcome

    def poll(self) -> list[Completion]:
        done = self._tier.poll()
        self._uncollected -= len(done)
        return list(map(self._as_run, done))

    def recovered(self) -> Iterable[RecoveredBlock]:
        return self._tier.recovered()

    def forget(self, slot: SlotIndex) -> None:
        self._tier.forget(slot)

    def fileno(self) -> int:
        return self._tier.fileno()

    @property
    def fault(self) -> str:
        return self._tier.fault

    def heal(self) -> bool:
        return self._tier.heal()

    def drain(self, deadline_s: float) -> bool:
        return self._tier.drain(deadline_s)

    def close(self, keep: bool) -> None:
        self._tier.close(keep)

    def _noted(self, job_id: int, outcome: Outcome) -> Outcome:
        if outcome is Outcome.PENDING:
            self._runs.add(job_id)
        return outcome

    def _as_run(self, done: Completion) -> Completion:
        if done.job_id not in self._runs:
            return done
        self._runs.remove(done.job_id)
        return msgspec.structs.replace(done, engine_hash=b"", group=0, blocks=done.ends)
