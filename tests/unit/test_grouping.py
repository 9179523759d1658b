"""The order in which a prefix needs the blocks of several groups, and their keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.grouping import Grouping, Place, in_group, sources_of_prompt
from kvbm.groups import Group, GroupKind
from kvbm.hashing import chain_keys

KEYS = chain_keys(bytes(32), range(400), 4)
FULL, WINDOW = Group(), Group(kind=GroupKind.WINDOW, reach=3)
STATE = Group(kind=GroupKind.STATE, span=2)


def test_all_tokens_come_first_and_two_groups_of_them_take_turns() -> None:
    grouping = Grouping((FULL, FULL, WINDOW, STATE))
    assert grouping.step == 2
    assert grouping.chain(1, 3) == [Place(0, 1), Place(1, 1), Place(0, 2), Place(1, 2)]
    assert grouping.tail(8) == [Place(2, 7), Place(3, 3), Place(2, 6), Place(2, 5)]
    assert grouping.run(8, 7) == [Place(0, 7), Place(1, 7), Place(2, 7), Place(3, 3)]
    assert grouping.tail(8, kinds=(GroupKind.STATE,)) == [Place(3, 3)]


def test_what_the_engine_has_is_left_out() -> None:
    grouping = Grouping((FULL, WINDOW))
    assert grouping.run(10, 8) == [Place(0, 8), Place(0, 9), Place(1, 9), Place(1, 8)]
    assert grouping.run(10, 0)[-3:] == [Place(1, 9), Place(1, 8), Place(1, 7)]


def test_wide_blocks_of_all_tokens() -> None:
    grouping = Grouping((FULL, Group(span=4), WINDOW))
    assert grouping.step == 4
    assert [place for place in grouping.chain(0, 8) if place.group == 1] == [Place(1, 0), Place(1, 1)]
    assert grouping.start_of(Place(0, 6)) == 4
    assert grouping.first_of(Place(1, 1)) == 4
    assert grouping.end_of(Place(1, 1)) == 8


def test_a_model_without_full_attention_has_no_chain() -> None:
    grouping = Grouping((STATE,))
    assert grouping.chain(0, 8) == []
    assert grouping.run(8, 2) == [Place(0, 3)]


@given(st.lists(st.sampled_from((FULL, WINDOW, STATE, Group(span=3))), min_size=1, max_size=5), st.data())
def test_a_key_names_the_content_up_to_its_block_and_its_group(
    groups: list[Group], data: st.DataObject
) -> None:
    grouping = Grouping(groups)
    boundary = data.draw(st.integers(0, 24 // grouping.step)) * grouping.step
    places = grouping.run(boundary, 0)
    keys = grouping.keys(KEYS, places)
    assert len(set(keys)) == len(keys) == len(places)
    for place, key in zip(places, keys, strict=True):
        last = KEYS[grouping.end_of(place) - 1]
        assert key == BlockKey(in_group(last, place.group))
        assert (key == last) == (place.group == 0), "the first group's are the engine's own"
        first = grouping.first_of(place)
        assert grouping.keys(KEYS[first:], [place], first) == [key], "from a part of the keys"
    assert in_group(b"".join(KEYS[:3]), 2)[KEY_BYTES : 2 * KEY_BYTES] == in_group(KEYS[1], 2)


@given(
    st.lists(st.sampled_from((FULL, WINDOW, STATE, Group(span=3))), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(0, 40),
    st.integers(0, 200),
)
def test_what_is_counted_is_what_there_is(groups: list[Group], steps: int, start: int, hole: int) -> None:
    grouping = Grouping(groups)
    boundary = steps * grouping.step
    start = min(start, boundary)
    chain, run = grouping.chain(0, boundary), grouping.run(boundary, start)
    assert grouping.chain_length(boundary) == len(chain)
    up_to = [
        len(grouping.run(each, start)) for each in range(start, boundary + 1) if each % grouping.step == 0
    ]
    assert max(up_to, default=0) <= grouping.run_length_max(boundary, start) <= len(chain) + 4 * len(groups)
    assert len(run) <= grouping.run_length_max(boundary, start)
    assert grouping.chain_keys(KEYS, start, boundary) == grouping.keys(KEYS, grouping.chain(start, boundary))
    for number, group in enumerate(groups):
        blocks = range(start // group.span, boundary // group.span)
        places = [Place(number, block) for block in blocks]
        assert grouping.keys_of(KEYS, number, blocks) == grouping.keys(KEYS, places)
    tables = [[100 * number + block for block in range(boundary)] for number in range(len(groups))]
    assert grouping.run_in(tables, boundary, start) == [100 * number + block for number, block in run]
    if hole < len(chain):
        held = bytes([1] * hole + [0] * (len(chain) - hole))
        full = grouping.reach(boundary, held, lambda group, blocks: bytes(len(blocks))).full
        assert full == grouping.start_of(chain[hole])


@given(st.binary(max_size=40), st.integers(1, 60))
def test_tiers_keep_their_share_and_the_deepest_one_counts(sources: bytes, blocks: int) -> None:
    told = sources_of_prompt(sources, blocks)
    assert len(told) == (blocks if sources else 0)
    assert set(told) <= set(sources)
    if sources:
        assert max(told) == max(sources)
        assert bytes(sorted(told)) == told


def test_shares() -> None:
    assert sources_of_prompt(bytes([2] * 30 + [3] * 10), 4) == bytes([2, 2, 2, 3])
    assert sources_of_prompt(bytes([2] * 39 + [3]), 4) == bytes([2, 2, 2, 3])
    assert sources_of_prompt(bytes([3] * 40), 4) == bytes([3] * 4)
