"""A dictionary by block key that never grows in one go.

A dictionary of a million keys takes 30 ms to grow, and 55 ms to be tidied now and then while keys come and go. This one
is of small ones, each of which takes less than a millisecond, and they do so at different times. Against one dictionary
a key costs about 0.1 µs more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, TypeVar

_MASK = 255
_SHIFT = 40
"""The eight bits of a key's hash above these choose its part: its place in the part is chosen by the lowest ones."""

KeyT = TypeVar("KeyT", bound=Hashable)
"""The key of a block and of the chain up to it: `BlockKey` in the manager, a number in the simulator."""
ValueT = TypeVar("ValueT")


class KeyTable(Mapping[KeyT, ValueT], Generic[KeyT, ValueT]):
    """Values by key."""

    def __init__(self) -> None:
        self._parts: list[dict[KeyT, ValueT]] = [{} for _ in range(_MASK + 1)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[KeyT]:
        return chain.from_iterable(self._parts)

    def __contains__(self, key: object) -> bool:
        return key in self._parts[hash(key) >> _SHIFT & _MASK]

    def __getitem__(self, key: KeyT) -> ValueT:
        return self._parts[hash(key) >> _SHIFT & _MASK][key]

    def find(self, key: KeyT) -> ValueT | None:
        """The value of the key, None where it has none."""
        return self._parts[hash(key) >> _SHIFT & _MASK].get(key)

    def find_each(self, keys: Iterable[KeyT]) -> list[ValueT | None]:
        """`find` for each of the keys."""
        parts = self._parts
        return [parts[hash(key) >> _SHIFT & _MASK].get(key) for key in keys]

    def has_each(self, keys: Iterable[KeyT]) -> bytes:
        """Whether each of the keys has a value, a byte each: 1 or 0."""
        parts = self._parts
        return bytes([key in parts[hash(key) >> _SHIFT & _MASK] for key in keys])

    def put_each(self, keys: Iterable[KeyT], values: Iterable[ValueT]) -> None:
        """Give each of the keys its value."""
        parts = self._parts
        for key, value in zip(keys, values, strict=True):
            parts[hash(key) >> _SHIFT & _MASK][key] = value

    def remove_each(self, keys: Iterable[KeyT]) -> None:
        """The keys, each of which has a value, have none any more."""
        parts = self._parts
        for key in keys:
            del parts[hash(key) >> _SHIFT & _MASK][key]
