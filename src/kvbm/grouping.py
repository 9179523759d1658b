"""The blocks of a hybrid model's groups: in which order a prefix needs them, and their keys."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.groups import GROUPS_MAX, Group, GroupKind, looking_back
from kvbm.hashing import join_keys, split_keys
from kvbm.slices import at_once

WINDOWS = (GroupKind.WINDOW, GroupKind.CHUNK)
"""Kinds whose blocks exist wherever a prompt was just computed; a recurrent state only where the engine keeps one."""

LOOKED_UP_AT_ONCE = 2048
"""How many steps of a prompt are looked up in a turn."""


class Place(NamedTuple):
    """A block of a group by its number among the group's own blocks."""

    group: int
    block: int


class Reach(NamedTuple):
    """How far a prompt is held, in blocks of the layout: `full` of them as far as all of their tokens are needed, and
    all that every group needs at `boundary`, which may lie before that; 0 where there is none."""

    full: int
    boundary: int


class Grouping:
    """The groups of a namespace, and the order in which a prefix needs their blocks.

    The blocks of all tokens come first: they form one *chain*, in which every block of the layout has one entry for
    each group of full attention. What the other groups need at a boundary, its *tail*, comes behind them. Blocks are
    leased, copied and evicted in this order, the last one first.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        assert 0 < len(groups) <= GROUPS_MAX
        self.groups = tuple(groups)
        self.step = lcm(*(group.span for group in groups))
        """Boundaries are multiples of so many blocks of the layout."""
        self._full = [n for n, group in enumerate(groups) if group.kind is GroupKind.FULL]
        self.plain = len(self._full) == 1 and self.groups[self._full[0]].span == 1
        """The chain is one group's, and has a block for each of the layout."""
        self.plain_group = self._full[0] if self.plain else None
        """That group's number."""
        self._others = [n for n, group in enumerate(groups) if group.kind is not GroupKind.FULL]

    def floor(self, blocks: int) -> int:
        """The last boundary within so many blocks of the layout."""
        return blocks - blocks % self.step

    def parent(self, boundary: int) -> list[Place]:
        """The last block of all tokens before a boundary, behind which its tail lies; empty where there is none."""
        return self.chain(max(0, boundary - self.step), boundary)[-1:]

    def chain(self, start: int, end: int) -> list[Place]:
        """The blocks of all tokens that end behind the first `start` blocks of the layout, and not behind `end`."""
        if self.plain:
            return [Place(self._full[0], index) for index in range(start, end)]
        return [
            Place(number, position // self.groups[number].span)
            for position in range(start, end)
            for number in self._full
            if (position + 1) % self.groups[number].span == 0
        ]

    def chain_length(self, boundary: int) -> int:
        """How many blocks `chain(0, boundary)` has."""
        return sum(boundary // self.groups[number].span for number in self._full)

    def run_length_max(self, boundary: int, start: int) -> int:
        """How many blocks `run` has at most, at any boundary up to this one."""
        tail = sum(self.groups[number].needed_max(boundary, start) for number in self._others)
        return self.chain_length(boundary) - self.chain_length(start) + tail

    def _before(self, index: int) -> int:
        """The last boundary that does not need the block of this index in the chain."""
        if self.plain:
            return self.floor(index)
        low, high = 0, (index + 1) * self.step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.chain_length(middle) <= index else (low, middle - 1)
        return self.floor(low)

    def tail(self, boundary: int, start: int = 0, kinds: Iterable[GroupKind] = GroupKind) -> list[Place]:
        """What the other groups, of these kinds, need at a boundary, without their blocks that end within the first
        `start` blocks of the layout. The last tokens' blocks come first: each block lies behind those that stay useful
        for longer while the prompt grows, and so is evicted before them."""
        places = [
            Place(number, index)
            for number in self._others
            if self.groups[number].kind in kinds
            for index in self.groups[number].needed(boundary)
            if (index + 1) * self.groups[number].span > start
        ]
        return sorted(places, key=self.end_of, reverse=True)

    def run(self, boundary: int, start: int) -> list[Place]:
        """All blocks that an engine which has the first `start` blocks lacks at a boundary."""
        return self.chain(start, boundary) + self.tail(boundary, start)

    def run_in(self, tables: Sequence[Sequence[int]], boundary: int, start: int) -> list[int]:
        """What stands for each block of `run` in the tables, one for each group."""
        tail = [tables[number][block] for number, block in self.tail(boundary, start)]
        if self.plain:
            return [*tables[self._full[0]][start:boundary], *tail]
        return [tables[number][block] for number, block in self.chain(start, boundary)] + tail

    def reaching(
        self, limit: int, chain_held: bytes, held: Callable[[int, range], bytes]
    ) -> Generator[None, None, Reach]:
        """How far a prompt of `limit` blocks, a multiple of `step`, is held. `chain_held` has a byte for each block of
        its chain, 1 or 0, and `held` says the same of consecutive blocks of another group. Yields where a long search
        gives others a turn."""
        hole = chain_held.find(0)
        full = limit if hole < 0 else self._before(hole)

        def held_of(number: int, blocks: range) -> bytes:
            if self.groups[number].kind is GroupKind.FULL:
                return b"\1" * len(blocks)  # nothing behind the hole is looked at
            return held(number, blocks)

        return Reach(full, (yield from looking_back(self.groups, full, held_of)))

    def searching(
        self, keys: Sequence[BlockKey], held: Callable[[list[BlockKey]], bytes]
    ) -> Generator[None, None, tuple[Reach, list[BlockKey]]]:
        """How far the prompt with these keys is held, and the keys of its chain. `held` has a byte for each block that
        it is asked for, 1 or 0. Yields where a long search gives others a turn."""
        limit, at_a_time = self.floor(len(keys)), self.step * LOOKED_UP_AT_ONCE
        chain, there = list[BlockKey](), bytearray()
        for start in range(0, limit, at_a_time):
            if start:
                yield
            part = self.chain_keys(keys, start, min(start + at_a_time, limit))
            chain += part
            there += held(part)
        found = yield from self.reaching(
            limit, bytes(there), lambda number, blocks: held(self.keys_of(keys, number, blocks))
        )
        return found, chain

    def reach(self, limit: int, chain_held: bytes, held: Callable[[int, range], bytes]) -> Reach:
        """The same at once."""
        return at_once(self.reaching(limit, chain_held, held))

    def uses(self, found: Reach) -> list[int]:
        """The boundaries of whose tails the policies are told: what a request takes up, and what it would take up if
        the tail at `full` were held too. A policy that heard of held tails only would never learn that those it gave up
        were wanted."""
        return sorted({*found} - {0})

    def start_of(self, place: Place) -> int:
        """The last boundary that does not need this block of all tokens, in blocks of the layout."""
        return self.floor(self.first_of(place))

    def first_of(self, place: Place) -> int:
        """How many blocks of the layout end before this block begins."""
        return place.block * self.groups[place.group].span

    def end_of(self, place: Place) -> int:
        """How many blocks of the layout end with this block."""
        return (place.block + 1) * self.groups[place.group].span

    def chain_keys(self, keys: Sequence[BlockKey], start: int, end: int) -> list[BlockKey]:
        """The keys of the blocks in `chain(start, end)`; `keys` are those of the layout's blocks."""
        if any(self.groups[number].span > 1 for number in self._full):
            return self.keys(keys, self.chain(start, end))
        of_groups = [self.keys_of(keys, number, range(start, end)) for number in self._full]
        return (
            of_groups[0]
            if len(of_groups) == 1
            else list(itertools.chain.from_iterable(zip(*of_groups, strict=True)))
        )

    def keys_of(self, keys: Sequence[BlockKey], number: int, blocks: range) -> list[BlockKey]:
        """The keys of consecutive blocks of one group; `keys` are those of the layout's blocks."""
        span = self.groups[number].span
        plain = keys[(blocks.start + 1) * span - 1 : blocks.stop * span : span]
        return split_keys(in_group(join_keys(plain), number)) if number else list(plain)

    def keys(self, keys: Sequence[bytes], places: Sequence[Place], first: int = 0) -> list[BlockKey]:
        """The keys of blocks, in order; `keys` are those of the layout's blocks from number `first` on."""
        plain = join_keys(
            keys[(block + 1) * self.groups[number].span - 1 - first] for number, block in places
        )
        masks = b"".join(map(_mask, (number for number, _ in places)))
        return split_keys(_xor(plain, masks))


def sources_of_prompt(sources: bytes, blocks: int) -> bytes:
    """The tiers of so many blocks of a prompt, a byte each, for which this run of blocks of all groups stands.

    Each tier has the share of them that it has of the run; the deepest one has one at least, since the engine waits
    for it.
    """
    if not sources:
        return b""
    below = sorted(set(sources) - {min(sources)}, reverse=True)
    counted = b""
    for tier in below:
        share = max(1, sources.count(tier) * blocks // len(sources))
        counted = bytes((tier,)) * min(share, blocks - len(counted)) + counted
    return bytes((min(sources),)) * (blocks - len(counted)) + counted


def in_group(keys: bytes, number: int) -> bytes:
    """Joined keys of content, as the keys of the blocks that a group has of it: the first group's are the same.

    As with `hashing.keys_in_space`, two of them are equal only by a chance that is as small as that of equal hashes.
    """
    return _xor(keys, _mask(number) * (len(keys) // KEY_BYTES)) if number else keys


@lru_cache(maxsize=GROUPS_MAX)
def _mask(number: int) -> bytes:
    return hashlib.sha256(b"kvbm-group-%d" % number).digest() if number else bytes(KEY_BYTES)


def _xor(one: bytes, other: bytes) -> bytes:
    both = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return both.to_bytes(len(one), "little")
