"""The order in which blocks that were found after a restart enter their pool."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
"""The key of a block and of the chain up to it: `BlockKey` in the manager, a number in the simulator."""


class FoundBlock(NamedTuple, Generic[KeyT]):
    """A block, the one before it, and its slot. `tail`: it is one of a tail of other groups (see `grouping`)."""

    key: KeyT
    parent: KeyT | None
    slot: int
    tail: bool = False


def parents_first(
    found: Iterable[FoundBlock[KeyT]], by_key: Mapping[KeyT, FoundBlock[KeyT]], pending: bytearray
) -> Iterator[FoundBlock[KeyT]]:
    """The same blocks, each after its parent where the parent is in `by_key` and marked in `pending`, which has a mark
    for the slot of each block that is to come."""
    waiting: list[FoundBlock[KeyT]] = []
    for entry in found:
        current: FoundBlock[KeyT] | None = entry
        while current is not None and pending[current.slot]:
            pending[current.slot] = 0
            waiting.append(current)
            current = by_key.get(current.parent) if current.parent is not None else None
        while waiting:
            yield waiting.pop()


def runs_of(found: Iterable[FoundBlock[KeyT]], length_max: int) -> Iterator[list[FoundBlock[KeyT]]]:
    """The same blocks, those that follow their parents together."""
    run = list[FoundBlock[KeyT]]()
    for entry in found:
        follows = bool(run) and entry.parent == run[-1].key and entry.tail == run[-1].tail
        if run and (not follows or len(run) == length_max):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
