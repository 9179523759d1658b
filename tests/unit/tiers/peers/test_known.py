"""What peers said they hold: a place for each block, by several peers, bounded, and never used again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import BlockKey
from kvbm.tiers.peers.known import Known, link_of, prints_of
from kvbm.tiers.remote.contract import NOWHERE


def test_the_print_is_the_beginning_of_the_key() -> None:
    keys = [BlockKey(bytes((n,)) + bytes(31)) for n in (1, 2, 7)]
    assert prints_of(keys) == [1, 2, 7]


def test_a_chain_told_at_once_lies_in_a_row_and_apart_from_the_next() -> None:
    known = Known()
    link = known.add_link(100)
    link.came([5, 6, 7])
    link.came([8])
    places = known.places([5, 6, 7, 8, 9])
    assert places[1] - places[0] == places[2] - places[1] == 1
    assert places[3] > places[2] + 1
    assert places[4] == NOWHERE
    assert [link_of(place) for place in places[:4]] == [link.number] * 4


def test_a_block_that_one_peer_drops_is_found_at_another() -> None:
    known = Known()
    a, b = known.add_link(10), known.add_link(10)
    a.came([1])
    b.came([1])
    assert link_of(known.places([1])[0]) == a.number
    a.gone([1])
    assert link_of(known.places([1])[0]) == b.number
    b.forget()
    assert known.holds([1]) == b"\0" and len(known) == 0


def test_the_newest_are_kept() -> None:
    known = Known()
    link = known.add_link(3)
    link.came([1, 2], tail=True)
    link.came([3, 4, 5])
    assert known.holds([1, 2, 3, 4, 5]) == bytes((0, 0, 1, 1, 1))
    assert not link.tails


def test_tails_are_told_by_their_place() -> None:
    known = Known()
    link = known.add_link(3)
    link.came([1])
    link.came([2], tail=True)
    assert [known.is_tail(place) for place in known.places([1, 2])] == [False, True]
    known.remove_link(link)
    assert not known.is_tail(link.number << 40 | 3)


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["came", "gone", "forget"]),
        st.sets(st.integers(1, 12), max_size=5),
    ),
    max_size=40,
)


@given(steps)
def test_it_is_the_union_of_what_each_said(steps: list[tuple[int, str, set[int]]]) -> None:
    known = Known()
    links = [known.add_link(100) for _ in range(3)]
    held: list[set[int]] = [set(), set(), set()]
    used: dict[int, int] = {}
    for number, verb, prints in steps:
        if verb == "came":
            links[number].came(sorted(prints))
            held[number] |= prints
        elif verb == "gone":
            links[number].gone(sorted(prints))
            held[number] -= prints
        else:
            links[number].forget()
            held[number].clear()
        for each in range(1, 13):
            (place,) = known.places([each])
            holders = {links[i].number for i in range(3) if each in held[i]}
            assert (place == NOWHERE) == (not holders)
            if holders:
                assert link_of(place) in holders
                assert used.setdefault(place, each) == each, "a place that was another block's"
        assert len(known) == len(set().union(*held))
