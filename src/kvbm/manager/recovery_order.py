"""The order in which blocks that were found after a restart enter their pool."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


def parents_first(
    found: Sequence[tuple[KeyT, KeyT | None, int]],
) -> Iterator[tuple[KeyT, KeyT | None, int]]:
    """The same blocks, each after its parent where the parent is among them."""
    by_key = {entry[0]: entry for entry in found}
    waiting: list[tuple[KeyT, KeyT | None, int]] = []
    for entry in found:
        current: tuple[KeyT, KeyT | None, int] | None = by_key.pop(entry[0], None)
        while current is not None:
            waiting.append(current)
            current = by_key.pop(current[1], None) if current[1] is not None else None
        while waiting:
            yield waiting.pop()
