"""The contract of a storage tier below the host arena.

A tier stores blocks in slots that the *manager* chooses; it moves bytes, keeps what it needs to find them
again after a restart, and decides nothing else. Every method is called by the manager's one owner thread and
none of them may block on the medium: work is submitted, and its completion is collected by `poll`. With each block a
tier keeps the engine's own hash and the group, which mean nothing to it, and hands them back.

`SlotTier` moves single blocks. A `RunTier` also moves *runs*, blocks in consecutive slots, each run as one submission
with one completion; `runs.with_runs` makes one of any `SlotTier`.

Guarantees that every tier gives, checked by `kvbm.testing.tier_contract`:

- a completed load with HIT returned exactly the bytes that were stored under that key, verified by checksum;
  anything else (torn, stale, flipped, foreign) is MISS, never wrong bytes;
- it keeps at most `pending_limit` submissions; beyond that it answers THROTTLED and does nothing;
- in a run each block ends for itself: one that is missing or corrupt costs no other;
- every accepted submission completes exactly once, also when the medium fails or the tier closes;
- what it uses on the medium never exceeds the bytes it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvbm.block import BlockKey, Outcome, SlotIndex

RUN_BYTES_MAX = 1 << 20
"""The bytes of a run: so many blocks, or one that is larger. More would gain nothing, and the first block of a run has
arrived only when the last one has."""


class BlockHead(NamedTuple):
    """What a tier keeps of a block beside its bytes: see `SlotTier.submit_store`."""

    key: BlockKey
    parent: BlockKey | None
    engine_hash: bytes = b""
    group: int = 0
    facts: bytes = b""
    """What is said of the block to those who follow events. A tier may keep it, or a part of the blocks' only."""


class BlockEnd(NamedTuple):
    """How one block of a run ended: as the fields of the same names in `Completion`, and of a block that was loaded its
    `BlockHead.facts`."""

    outcome: Outcome
    corrupt: bool = False
    engine_hash: bytes = b""
    group: int = 0
    facts: bytes = b""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one submitted load or store.

    `outcome` is HIT (bytes moved and, for a load, verified), MISS (not there, or it failed verification: then
    `corrupt` is True) or RETRY (the medium failed; `error` says how, in one line). `still_in_use`: the medium may
    still write to the targets of a load, which must not be used again before `heal` returned True. A load with HIT
    brings the `engine_hash` and `group` that the block was stored with.

    Of a run, `blocks` tells how each block ended, in order; then `outcome` is that of the first block that is no HIT,
    `bytes_moved` counts the blocks with HIT, and `error` speaks of those with RETRY. With `still_in_use` none is a HIT.
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
    blocks: Sequence[BlockEnd] = ()

    @property
    def ends(self) -> Sequence[BlockEnd]:
        """How each block ended, of a run or of a single one."""
        return self.blocks or (BlockEnd(self.outcome, self.corrupt, self.engine_hash, self.group),)


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


class RunTier(SlotTier, Protocol):
    """A `SlotTier` that moves runs: n blocks, 1 <= n <= `run_blocks_max`, in the n slots from `slot` on.

    Targets and sources are one page-aligned buffer per shard with the n blocks' parts of that shard one after the
    other, as n consecutive slots lie in host memory.
    """

    run_blocks_max: int

    def submit_store_run(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[memoryview]
    ) -> Outcome:
        """As `submit_store`, for a run. The keys are distinct."""

    def submit_load_run(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        """As `submit_load`, for a run."""

    def forget_run(self, slot: SlotIndex, count: int) -> None:
        """`forget` for the `count` slots from `slot` on."""

    @property
    def load_room(self) -> int:
        """So many loads, blocks or runs, can be submitted now before one is THROTTLED; an upper bound."""

    @property
    def store_room(self) -> int:
        """As `load_room`, for stores."""
