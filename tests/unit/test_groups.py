"""Boundaries of prefixes with several groups, against a search that tries every one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbm.groups import LOOKED_BACK_AT_ONCE, Group, GroupKind, looking_back
from kvbm.slices import at_once

FULL = Group()
WINDOW = Group(kind=GroupKind.WINDOW, reach=4)
STATE = Group(kind=GroupKind.STATE)


def tokens_needed(group: Group, boundary: int) -> set[int]:
    """By the definition, token by token: which blocks of the layout a group reads at a boundary."""
    if group.kind is GroupKind.FULL:
        return set(range(boundary))
    if group.kind is GroupKind.STATE:
        return {boundary - 1} if boundary else set()
    reach = group.reach * group.span
    start = boundary - reach if group.kind is GroupKind.WINDOW else boundary // reach * reach
    return set(range(max(0, start), boundary))


def by_trying(groups: list[Group], limit: int, held: list[bytes]) -> int:
    for boundary in range(limit, 0, -1):
        if all(
            boundary % group.span == 0
            and all(there[block // group.span] for block in tokens_needed(group, boundary))
            for group, there in zip(groups, held, strict=True)
        ):
            return boundary
    return 0


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Group], int, list[bytes]]:
    groups = []
    for kind in draw(st.lists(st.sampled_from(GroupKind), min_size=1, max_size=4)):
        reach = draw(st.integers(1, 5)) if kind in (GroupKind.WINDOW, GroupKind.CHUNK) else 0
        groups.append(Group(kind=kind, span=draw(st.sampled_from((1, 1, 2, 3, 4))), reach=reach))
    limit = draw(st.integers(0, 40))
    mostly = st.sampled_from((1, 1, 1, 1, 1, 1, 0))
    held = [
        bytes(draw(st.lists(mostly, min_size=limit // group.span, max_size=limit // group.span)))
        for group in groups
    ]
    return groups, limit, held


@given(chains())
@example(([FULL, WINDOW], 12, [bytes([1] * 12), bytes([1] * 9 + [0] + [1] * 2)]))
@example(
    (
        [STATE, FULL],
        LOOKED_BACK_AT_ONCE * 3,
        [bytes([1] + [0] * (LOOKED_BACK_AT_ONCE * 3 - 1)), bytes([1] * LOOKED_BACK_AT_ONCE * 3)],
    )
)
def test_the_largest_boundary_that_all_groups_have(chain: tuple[list[Group], int, list[bytes]]) -> None:
    groups, limit, held = chain
    searching = looking_back(groups, limit, lambda group, blocks: held[group][blocks.start : blocks.stop])
    assert at_once(searching) == by_trying(groups, limit, held)


@pytest.mark.parametrize(
    ("group", "boundary", "needed"),
    [
        (FULL, 3, range(3)),
        (WINDOW, 3, range(3)),
        (WINDOW, 9, range(5, 9)),
        (Group(kind=GroupKind.CHUNK, reach=4), 9, range(8, 9)),
        (Group(kind=GroupKind.CHUNK, reach=4), 8, range(8, 8)),
        (STATE, 9, range(8, 9)),
        (STATE, 0, range(0)),
        (Group(kind=GroupKind.STATE, span=3), 9, range(2, 3)),
    ],
)
def test_what_a_group_needs(group: Group, boundary: int, needed: range) -> None:
    assert group.needed(boundary) == needed


@pytest.mark.parametrize(
    "wrong", [{"span": 0}, {"reach": 3}, {"kind": GroupKind.WINDOW}, {"kind": GroupKind.STATE, "reach": 1}]
)
def test_groups_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        Group(**wrong)  # type: ignore[arg-type]  # wrong on purpose
