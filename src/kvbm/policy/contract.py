"""What a tier asks of a policy.

Called by the one thread that owns the tier; never blocks, does no I/O, reads no clock: time comes as an argument
(seconds, never going back). Slots are handles below `slot_count`; -1 stands for "no parent here".
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from kvbm.block import BlockKey


class EvictionPolicy(Protocol):
    """Chooses which resident, unleased block a full tier gives up."""

    def inserted(self, slot: int, parent: int, now_s: float) -> None:
        """The slot is being filled with a block whose parent is in slot `parent` (or -1); not to be chosen yet."""

    def accessed(self, slots: Sequence[int], now_s: float) -> None:
        """A request used these blocks, a prefix in chain order."""

    def evictable(self, slots: Iterable[int]) -> None:
        """These slots may be chosen: their block became resident, or the last lease on them ended."""

    def removed(self, slot: int) -> None:
        """The slot was emptied, by eviction or otherwise."""

    def victim(self, leased: Container[int]) -> int:
        """A slot to evict that is not `leased`, or -1 when there is none. The caller evicts it and calls `removed`."""


class AdmissionPolicy(Protocol):
    """Decides whether a block may enter a lower tier."""

    def offered(self, key: BlockKey, now_s: float) -> bool:
        """The block could be stored below now; True admits it."""

    def hit(self, key: BlockKey, now_s: float) -> None:
        """The block was used again."""
