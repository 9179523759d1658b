"""Groups: the kinds of layers of a hybrid model, and which of their blocks a prefix needs.

A model may keep KV of several kinds: of every token (full attention), of the last tokens only (sliding window), of the
tokens since the last multiple of a chunk (chunked local attention), or one recurrent state in place of all tokens.
The layers of one kind form a *group*, with blocks of its own. A prefix can be taken up again at a *boundary*, a token
count at which every group has what it needs there.

Boundaries and positions are counted in blocks of the layout (`BlockLayout.block_tokens`), by which the engine names
content. A block of a group may span several of these; it bears the name of its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import Enum
from functools import partial
from math import lcm

import msgspec

GROUPS_MAX = 64

LOOKED_BACK_AT_ONCE = 256
"""How many boundaries back a search for one that can be taken up looks at a time."""

Held = Callable[[range], bytes]
"""Which of consecutive blocks of a group are held: a byte each, 1 or 0."""


class GroupKind(Enum):
    """What a group keeps of a prefix."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group. Its blocks span `span` blocks of the layout each.

    `reach` is, of a window, how many of the group's own blocks before a boundary it needs; of a chunk, its length in
    the group's own blocks; 0 for the other kinds.
    """

    kind: GroupKind = GroupKind.FULL
    span: int = 1
    reach: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, because groups arrive in messages."""
        reaches = self.kind in (GroupKind.WINDOW, GroupKind.CHUNK)
        if self.span < 1 or self.reach < 0 or (self.reach > 0) != reaches:
            raise ValueError(
                f"a group {self.kind.value} of span={self.span}, reach={self.reach} cannot be used"
            )

    def needed(self, boundary: int) -> range:
        """The group's own blocks that it needs at a boundary, which is a multiple of its span."""
        end = boundary // self.span
        if self.kind is GroupKind.WINDOW:
            return range(max(0, end - self.reach), end)
        if self.kind is GroupKind.CHUNK:
            return range(end - end % self.reach, end)
        if self.kind is GroupKind.STATE:
            return range(max(0, end - 1), end)
        return range(end)

    def needed_max(self, boundary: int, start: int) -> int:
        """How many of them there are at most, at any boundary up to this one, behind the first `start` blocks of the
        layout."""
        behind = max(0, boundary // self.span - start // self.span)
        if self.kind is GroupKind.CHUNK:
            return min(behind, self.reach - 1)  # at the end of a chunk nothing of it is needed
        return min(behind, self.reach) if self.kind is GroupKind.WINDOW else min(behind, 1)

    def lowered(self, boundary: int, held: Held) -> int:
        """The boundary itself where the group holds what it needs there; else the next lower one that may do."""
        end = boundary // self.span
        if self.kind is GroupKind.STATE:
            return self._last_held(end, held) * self.span
        needed = self.needed(boundary)
        there = held(needed)
        if self.kind is not GroupKind.WINDOW:
            hole = there.find(0)
            return boundary if hole < 0 else (needed.start + hole) * self.span
        hole = there.rfind(0)
        # A window that holds this hole cannot be taken up, and none can that lacks its last block.
        return boundary if hole < 0 else self._last_held(needed.start + hole, held) * self.span

    def _last_held(self, end: int, held: Held) -> int:
        """The largest number of own blocks up to `end` of which the last one is held, or where to look on from."""
        first = max(0, end - LOOKED_BACK_AT_ONCE)
        return first + held(range(first, end)).rfind(1) + 1


def looking_back(
    groups: Sequence[Group], limit: int, held: Callable[[int, range], bytes]
) -> Generator[None, None, int]:
    """The largest boundary up to `limit` at which every group holds what it needs; 0 where there is none.

    `held` tells of a group, by its number, which of these consecutive blocks of it are held. It may be a long way back:
    the search yields wherever it has to look on.
    """
    step = lcm(*(group.span for group in groups))
    boundary = limit - limit % step
    settled = set[int]()
    while boundary and len(settled) < len(groups):
        for number, group in enumerate(groups):
            if number in settled:
                continue
            lowered = group.lowered(boundary, partial(held, number))
            lowered -= lowered % step
            if lowered < boundary:
                # What all tokens need, they need less of now; the others need other blocks.
                settled = {each for each in settled if groups[each].kind is GroupKind.FULL}
            if lowered == boundary or group.kind is GroupKind.FULL:
                settled.add(number)
            if lowered < boundary:
                yield
            boundary = lowered
    return boundary
