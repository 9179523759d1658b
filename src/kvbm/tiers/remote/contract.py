"""The contract of a tier below host memory that is not addressed by slot: a store that many managers share.

Such a tier chooses where a block lies, and others put blocks there and take them away while we look. So what we know
of it is hearsay: `places` answers from memory, and only a load says whether a block is there. Every method is called
by the manager's one owner thread, and none waits for the network: work is submitted, `poll` has its end.

Guarantees that every tier gives, checked by `kvbm.testing.remote_contract`:

- a load with HIT brought exactly the bytes that were stored under that key in this namespace, verified by key,
  fingerprint, length and checksum; anything else (torn, rewritten, foreign, sealed with another key) is MISS;
- it keeps at most `pending_limit` submissions; beyond that it answers THROTTLED and does nothing;
- every accepted submission completes exactly once, within the tier's deadline, also when the store is silent, and after
  its completion nothing touches its buffers;
- a store that fails or is slow turns the tier off (`fault`), and it comes back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvbm.block import BlockKey, Outcome
from kvbm.tiers.contract import CLOSE_LIMIT_S, BlockHead, Completion

NOWHERE = -1
"""In place of a place: the tier knows of no such block."""

Buffers = Sequence[memoryview]
"""The bytes of one block: one buffer for each shard, of `layout.slot_bytes` each."""


class News(NamedTuple):
    """Blocks that this node has seen in the store since the last call, and those of them that it knows to have gone.

    Seen are those that it stored or loaded. Of a block that others put there it knows no more than a part of its key
    until it is loaded: `places` finds such a block, `came` does not name it. A block that is only forgotten to keep a
    bound counts as gone. Both are bounded: what does not fit is left out, oldest first, and `gone` never names a block
    that was in no `came` before.
    """

    came: Sequence[BlockKey]
    gone: Sequence[BlockKey]


class RemoteTier(Protocol):
    """A store that is not addressed by slot. The module's text has its guarantees.

    A *place* is a number of a block's whereabouts, at least 0. Blocks whose places follow one another are read
    together. A place is good for `submit_load` as long as the tier lives; it is never used again for another block.

    `tenant` is whose the blocks are: a tier that seals them needs it. None where nobody knows.
    """

    name: str
    """What it is called in metrics and log lines: one word."""
    pending_limit: int
    load_blocks_max: int
    """The most blocks of one load."""
    store_blocks_max: int
    """The most blocks of one store. Fewer cost as many requests."""

    def places(self, keys: Sequence[BlockKey]) -> list[int]:
        """Where each block is believed to lie, or `NOWHERE`."""

    def tail(self, place: int) -> bool:
        """Whether the block there was stored as one of a tail (see `submit_store`)."""

    def used(self, keys: Sequence[BlockKey], may_tell: Callable[[], bool]) -> None:
        """These blocks were found above the tier, and may lie in it too: what is in use shall stay there.

        The tier tells the store so now and then, later and not for every call. Each telling costs a request, for which
        it asks `may_tell` first; False: not now, the next use asks again.
        """

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        targets: Sequence[Buffers],
        tenant: str | None,
    ) -> Outcome:
        """Start reading blocks from the places from `place` on. PENDING, THROTTLED, MISS or RETRY (the tier is off).

        The completion tells in `blocks` how each one ended. Targets may be scribbled over before it.
        """

    def submit_store(
        self,
        job_id: int,
        blocks: Sequence[BlockHead],
        sources: Sequence[Buffers],
        tenant: str | None,
        tail: bool = False,
    ) -> Outcome:
        """Start writing consecutive blocks of a chain, together. PENDING, THROTTLED or RETRY (see
        `store_fault`).

        The caller keeps the sources unchanged until the completion is polled. `tail`: they are a tail of other groups
        of a hybrid model (see `kvbm.grouping`).
        """

    @property
    def load_room(self) -> int:
        """So many loads can be submitted now before one is THROTTLED; an upper bound."""

    @property
    def store_room(self) -> int:
        """As `load_room`, for stores."""

    def expected_s(self, byte_count: int) -> float:
        """Expected seconds of a load of so many bytes that begins now: its latency and its transfer; 0 if unknown."""

    def news(self) -> News:
        """What is new since the last call (see `News`); bounded, so that the owner may have to call again."""

    def poll(self) -> list[Completion]:
        """The completions since the last call; never blocks. Also takes in what the tier's threads have learned."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` would return something (an eventfd)."""

    @property
    def fault(self) -> str:
        """Empty while the tier works; otherwise one line saying why it is off."""

    @property
    def store_fault(self) -> str:
        """Empty while stores are taken; otherwise one line saying why not. It may be read from all the same: a store
        may be full, or its credentials may only read."""

    def tick(self) -> None:
        """Called about twice a second: look after time (a breaker's next try, what is due)."""

    def describe(self) -> dict[str, object]:
        """For operators: what it is, without credentials; what it costs in requests and bytes; how it is."""

    def drain(self, deadline_s: float) -> bool:
        """Wait for pending work up to `deadline_s` seconds from now; True when nothing is pending."""

    def close(self, deadline_s: float = CLOSE_LIMIT_S) -> None:
        """End pending work, within `deadline_s` seconds, and let the store go. What was stored stays."""
