"""Block tables of several groups, as the lists of device blocks that backends copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.block import BlockKey
from kvbm.errors import SettingsError
from kvbm.grouping import Grouping, Place

Table = Sequence[int | None]
"""The device block of each of a group's blocks, from its first one on; None for one that the device does not hold."""


class Part(NamedTuple):
    """Blocks to keep, a chain behind `parent`: their keys, device blocks, and the group of each."""

    parent: BlockKey | None
    keys: list[BlockKey]
    device_blocks: list[int]
    groups: bytes


def to_load(grouping: Grouping, boundary: int, skip: int, tables: Sequence[Table]) -> list[int]:
    """The device blocks for all that is needed at a boundary. Raises SettingsError where a table has none for it."""
    _check(grouping, tables)
    found = []
    for place in grouping.run(boundary, skip):
        device_block = _at(tables, place)
        if device_block is None:
            accepted = f"a device block for block {place.block} of group {place.group}: all that is needed, or nothing"
            raise SettingsError("device_blocks", None, accepted)
        found.append(device_block)
    return found


def to_keep(grouping: Grouping, keys: Sequence[BlockKey], tables: Sequence[Table]) -> list[Part]:
    """What these tables hold of a prompt: its blocks of all tokens, and what the other groups need behind them.

    The tail belongs to the last boundary that the tables reach; where one of its blocks is missing it is left out.
    """
    _check(grouping, tables)
    lengths = [len(table) * group.span for table, group in zip(tables, grouping.groups, strict=True)]
    end = grouping.floor(min(len(keys), *lengths))
    chain = grouping.chain(0, end)
    held = [_at(tables, place) for place in chain]
    hole = held.index(None) if None in held else len(chain)
    parts = []
    if hole:
        found = [block for block in held[:hole] if block is not None]
        parts.append(Part(None, grouping.keys(keys, chain[:hole]), found, _groups(chain[:hole])))
    tail = grouping.tail(end)
    beside = [block for place in tail if (block := _at(tables, place)) is not None]
    if hole == len(chain) and tail and len(beside) == len(tail):
        before = grouping.keys(keys, grouping.parent(end))
        parts.append(Part(before[0] if before else None, grouping.keys(keys, tail), beside, _groups(tail)))
    return parts


def _check(grouping: Grouping, tables: Sequence[Table]) -> None:
    if len(tables) != len(grouping.groups) or any(not isinstance(table, Sequence) for table in tables):
        accepted = f"a list for each of the layout's {len(grouping.groups)} groups"
        raise SettingsError("device_blocks", f"{len(tables)} entries", accepted)


def _at(tables: Sequence[Table], place: Place) -> int | None:
    table = tables[place.group]
    return table[place.block] if place.block < len(table) else None


def _groups(places: Sequence[Place]) -> bytes:
    return bytes(place.group for place in places)
