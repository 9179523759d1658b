"""The contract of a storage tier below the host arena.

A tier stores blocks in slots that the *manager* chooses; it moves bytes, keeps what it needs to find them
again after a restart, and decides nothing else. Every method is called by the manager's one owner thread and
none of them may block on the medium: work is submitted, and its completion is collected by `poll`. With each block a
tier keeps the engine's own hash and the group, which mean nothing to it, and hands them back.

Guarantees that every tier gives, checked by `kvbm.testing.tier_contract`:

- a completed load with HIT returned exactly the bytes that were stored under that key, verified by checksum;
  anything else (torn, stale, flipped, foreign) is MISS, never wrong bytes;
- it keeps at most `pending_limit` submissions; beyond that it answers THROTTLED and does nothing;
- every accepted submission completes exactly once, also when the medium fails or the tier closes;
- what it uses on the medium never exceeds the bytes it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from kvbm.block import BlockKey, Outcome, SlotIndex


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one submitted load or store.

    `outcome` is HIT (bytes moved and, for a load, verified), MISS (not there, or it failed verification: then
    `corrupt` is True) or RETRY (the medium failed; `error` says how, in one line). `still_in_use`: the medium may
    still write to the targets of a load, which must not be used again before `heal` returned True. A load with HIT
    brings the `engine_hash` and `group` that the block was stored with.
    """

    job_id: int
    outcome: Outcome
    bytes_moved: int = 0
    seconds: float = 0.0
    corrupt: bool = False
    error: str = ""
    still_in_use: bool = False
    engine_hash: bytes = b""
    group: int = 0


class RecoveredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block found after a restart, as it was stored. `sequence` grows with the time of its store: higher is newer."""

    key: BlockKey
    slot: SlotIndex
    sequence: int
    parent: BlockKey | None = None
    engine_hash: bytes = b""
    group: int = 0


class SlotTier(Protocol):
    """A bounded store addressed by slot. The module's text has its guarantees."""

    name: str
    slot_count: int
    pending_limit: int

    def recovered(self) -> Iterable[RecoveredBlock]:
        """The blocks found at start, once; all other slots are free."""

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
        """Start writing one block (one page-aligned buffer per shard). PENDING, THROTTLED or RETRY (tier is off).

        The caller keeps the sources unchanged until the completion is polled. `engine_hash` is what the engine calls
        the block, 32 bytes, or empty where that is not known; `group` is 0 to `block.GROUP_MAX`.
        """

    def submit_load(
        self, job_id: int, key: BlockKey, slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        """Start reading one block into the targets. PENDING, THROTTLED, MISS or RETRY (tier is off)."""

    def forget(self, slot: SlotIndex) -> None:
        """The manager evicted this slot: after a restart it must not be found. No load or store of it is pending."""

    def poll(self) -> list[Completion]:
        """The completions since the last call; never blocks."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` would return something (an eventfd)."""

    @property
    def fault(self) -> str:
        """Empty while the tier works; otherwise one line saying why it is off."""

    def heal(self) -> bool:
        """Try to come back after a fault, bounded in time; True when the tier works again (empty or recovered)."""

    def drain(self, deadline_s: float) -> bool:
        """Wait for pending work up to `deadline_s` seconds from now; True when nothing is pending."""

    def close(self, keep: bool) -> None:
        """Finish pending work, release the medium; with `keep` false, remove the stored blocks."""
