"""The contract of a storage tier below the host arena.

A tier stores blocks in slots that the *manager* chooses; it moves bytes, keeps what it needs to find them
again after a restart, and decides nothing else. Every method is called by the manager's one owner thread and
none of them may block on the medium: work is submitted, and its completion is collected by `poll`. With each block a
tier keeps the engine's own hash and the group, which mean nothing to it, and hands them back.

A tier moves *runs*: blocks in consecutive slots, each run as one submission with one completion. A run may be one block
long, and a tier that moves single blocks takes no longer ones.

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

CLOSE_LIMIT_S = 5.0
"""A tier is closed within so many seconds, unless the caller says otherwise."""


class BlockHead(NamedTuple):
    """What a tier keeps of a block beside its bytes: see `RunTier.submit_store`."""

    key: BlockKey
    parent: BlockKey | None
    engine_hash: bytes = b""
    group: int = 0
    facts: bytes = b""
    """What is said of the block to those who follow events. A tier may keep it, or a part of the blocks' only."""


class BlockEnd(NamedTuple):
    """How one block of a run ended.

    `outcome` is HIT (its bytes moved and, for a load, were verified), MISS (not there, or it failed verification: then
    `corrupt` is True) or RETRY (the medium failed). A load with HIT brings what the block was stored with.
    """

    outcome: Outcome
    corrupt: bool = False
    engine_hash: bytes = b""
    group: int = 0
    facts: bytes = b""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one submitted load or store. `blocks` tells how each block ended, in order.

    `outcome` is that of the first block that is no HIT, `bytes_moved` counts the blocks with HIT, and `error` says in
    one line why some are RETRY. `still_in_use`: the medium may still write to the targets of a load, which must not be
    used again before `heal` returned HIT; then none is a HIT.
    """

    job_id: int
    outcome: Outcome
    blocks: Sequence[BlockEnd]
    bytes_moved: int = 0
    seconds: float = 0.0
    error: str = ""
    still_in_use: bool = False

    @property
    def corrupt(self) -> bool:
        """Whether a block failed verification."""
        return any(end.corrupt for end in self.blocks)

    @classmethod
    def of(
        cls,
        job_id: int,
        blocks: Sequence[BlockEnd],
        block_bytes: int,
        seconds: float = 0.0,
        error: str = "",
        still_in_use: bool = False,
    ) -> Completion:
        """The completion of a job whose blocks, of so many bytes each, ended so."""
        missed = [end for end in blocks if end.outcome is not Outcome.HIT]
        return cls(
            job_id=job_id,
            outcome=missed[0].outcome if missed else Outcome.HIT,
            blocks=blocks,
            bytes_moved=(len(blocks) - len(missed)) * block_bytes,
            seconds=seconds,
            error=error if any(end.outcome is Outcome.RETRY for end in missed) else "",
            still_in_use=still_in_use,
        )


class RecoveredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block found after a restart, as it was stored. `sequence` grows with the time of its store: higher is newer."""

    key: BlockKey
    slot: SlotIndex
    sequence: int
    parent: BlockKey | None = None
    engine_hash: bytes = b""
    group: int = 0


class RunTier(Protocol):
    """A bounded store addressed by slot. The module's text has its guarantees.

    A run has n blocks, 1 <= n <= `run_blocks_max`, in the n slots from `slot` on. Targets and sources are one
    page-aligned buffer per shard with the n blocks' parts of that shard one after the other, as n consecutive slots lie
    in host memory.
    """

    name: str
    slot_count: int
    pending_limit: int
    run_blocks_max: int

    def recovered(self) -> Iterable[RecoveredBlock]:
        """The blocks found at start, once, the oldest first; all other slots are free."""

    def submit_store(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[memoryview]
    ) -> Outcome:
        """Start writing a run, whose keys are distinct. PENDING, THROTTLED or RETRY (tier is off).

        The caller keeps the sources unchanged until the completion is polled. A block's `engine_hash` is what the
        engine calls it, 32 bytes, or empty where that is not known; its `group` is 0 to `block.GROUP_MAX`.
        """

    def submit_load(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[memoryview]
    ) -> Outcome:
        """Start reading a run into the targets. PENDING, THROTTLED, MISS or RETRY (tier is off)."""

    def forget(self, slot: SlotIndex, count: int = 1) -> None:
        """The manager evicted these slots. No load or store of them is pending, and no load of them follows.

        Once `drain` or `close` has returned they are not found any more; after a crash before that they may be, unless
        `sync` says otherwise."""

    def sync(self) -> int:
        """Begin to make durable what was forgotten. When `synced` has reached the number that is returned, the blocks
        that were forgotten before this call are not found even after a crash."""

    @property
    def synced(self) -> int:
        """See `sync`."""

    def poll(self) -> list[Completion]:
        """The completions since the last call; never blocks."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` would return something (an eventfd)."""

    @property
    def load_room(self) -> int:
        """So many loads can be submitted now before one is THROTTLED; an upper bound."""

    @property
    def store_room(self) -> int:
        """As `load_room`, for stores."""

    @property
    def fault(self) -> str:
        """Empty while the tier works; otherwise one line saying why it is off."""

    @property
    def busy_s(self) -> float:
        """How long the oldest operation that the medium is executing has taken so far, in seconds; 0 without one."""

    def heal(self) -> Outcome:
        """Try to come back after a fault. HIT when the tier works: if it was off, the owner has forgotten all that it
        knew of the slots and takes `recovered` anew. PENDING while an attempt is under way (call it again when `fileno`
        is readable, or later), RETRY when it failed."""

    def drain(self, deadline_s: float) -> bool:
        """Wait for pending work up to `deadline_s` seconds from now; True when nothing is pending."""

    def close(self, keep: bool, deadline_s: float = CLOSE_LIMIT_S) -> None:
        """Finish pending work, release the medium; with `keep` false, remove the stored blocks. Returns after about
        `deadline_s` seconds in any case, and leaves the rest undone; with 0 it does all that later, in a thread."""
