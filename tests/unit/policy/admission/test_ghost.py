"""Ghost lists: a block enters from its second offer on, and the list is bounded."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.policy.admission.ghost import GHOSTS_MAX, GHOSTS_PER_SLOT, GhostAdmission


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def test_a_block_enters_from_the_second_offer_on() -> None:
    ghosts = GhostAdmission(4)
    assert not ghosts.offered(key(1), 0.0)
    assert ghosts.offered(key(1), 1e9), "time does not matter"
    assert ghosts.offered(key(1), 1e9), "it may be offered again when its write came to nothing"
    ghosts.hit(key(2), 0.0)
    assert not ghosts.offered(key(2), 0.0), "a hit is of a block that is on disk"


def test_the_list_is_bounded_and_forgets_what_was_offered_longest_ago() -> None:
    ghosts = GhostAdmission(2)
    size = 2 * GHOSTS_PER_SLOT
    for number in range(size):
        assert not ghosts.offered(key(number), 0.0)
    assert ghosts.offered(key(0), 0.0)  # the latest now
    assert not ghosts.offered(key(100), 0.0)
    assert len(ghosts) == size
    assert ghosts.offered(key(0), 0.0)
    assert not ghosts.offered(key(1), 0.0), "it had to go for 100"


def test_the_list_of_a_huge_tier_is_bounded_too() -> None:
    ghosts = GhostAdmission(GHOSTS_MAX)
    assert ghosts._ghosts_max == GHOSTS_MAX
