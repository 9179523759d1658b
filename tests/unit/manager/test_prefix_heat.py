"""The bounded count of prefixes: exact while it has room, right about what is frequent when it has none."""

from __future__ import annotations

import random
from collections import Counter

from kvbm.block import BlockKey
from kvbm.hashing import chain_keys
from kvbm.manager.prefix_heat import CHAIN_BLOCKS_MAX, PrefixHeat


def chain(*tokens: int) -> list[BlockKey]:
    """A chain of one block for each token."""
    return chain_keys(bytes(32), tokens, 1)


def test_counts_of_a_prefix_add_up_and_its_length_is_what_requests_share() -> None:
    heat = PrefixHeat()
    assert not heat.asked(chain(1, 2, 3, 4), 0, 4, 0)
    assert not heat.asked(chain(1, 2, 3, 9, 9), 3, 5, 3)
    heat.asked(chain(7), 0, 1, 0)
    [(key, prefix)] = heat.hottest(5)
    assert key == chain(1)[0]
    assert (prefix.requests, prefix.asked, prefix.found, prefix.lost, prefix.shared) == (2, 9, 3, 0, 3)


def test_the_shared_length_is_exact_wherever_two_chains_part() -> None:
    for length in range(1, 40):
        for same in range(1, length + 1):
            heat = PrefixHeat()
            heat.asked(chain(*range(length)), 0, 1, 0)
            heat.asked(chain(*range(same), 99, 98), 0, 1, 0)
            assert heat.hottest(1)[0][1].shared == same


def test_a_prefix_is_lost_when_it_came_before_and_nothing_of_it_is_held() -> None:
    heat = PrefixHeat()
    assert not heat.asked(chain(1, 2), 0, 2, 0)  # never seen
    assert not heat.asked(chain(1, 2), 1, 2, 1)  # a part of it is there
    assert heat.asked(chain(1, 5), 0, 2, 0)
    assert heat.hottest(1)[0][1].lost == 1


def test_nothing_is_kept_of_an_empty_chain_and_a_part_of_a_long_one() -> None:
    heat = PrefixHeat()
    assert not heat.asked([], 0, 0, 0)
    assert len(heat) == 0
    for _ in range(2):
        heat.asked(chain(*range(CHAIN_BLOCKS_MAX + 10)), 0, 1, 0)
    assert heat.hottest(1)[0][1].shared == CHAIN_BLOCKS_MAX
    assert len(heat.hottest(1)[0][1].chain) == 32 * CHAIN_BLOCKS_MAX


def test_frequent_heads_stay_in_a_table_that_is_too_small_for_all() -> None:
    heat, random_source, true = (
        PrefixHeat(heads_max=16, halved_every=1 << 30),
        random.Random(3),
        Counter[int](),
    )
    for number in range(4000):
        # Every other request is of one of four heads; the others never come again.
        head = random_source.randrange(4) if number % 2 else 1000 + number
        true[head] += 1
        heat.asked(chain(head), 0, 1, 0)
    assert len(heat) == 16
    hottest = heat.hottest(4)
    assert {key for key, _ in hottest} == {chain(head)[0] for head, _ in true.most_common(4)}
    # Space-saving: the heat is never below the true count, and above it by at most requests / size.
    for key, prefix in hottest:
        count = next(true[head] for head in range(4) if chain(head)[0] == key)
        assert count <= prefix.heat <= count + 4000 / 16


def test_yesterdays_prefix_cools_down() -> None:
    heat = PrefixHeat(halved_every=10)
    for _ in range(50):
        heat.asked(chain(1), 1, 1, 1)
    for _ in range(30):
        heat.asked(chain(2), 1, 1, 1)
    assert [key for key, _ in heat.hottest(2)] == [chain(2)[0], chain(1)[0]]
    assert heat.hottest(2)[1][1].requests == 50
