"""W-TinyLFU: who may stay, and the sketch that remembers those who had to go."""

from __future__ import annotations

import random

from kvbm.policy import WTinyLfu
from kvbm.policy.tinylfu import COUNT_MAX, CountSketch
from kvbm.testing.checked_tier import CheckedTier

NUMBER_OF_BYTES = 0x0706050403020100
NUMBER_OF_SEVEN = 0x363172989D94DF87
NUMBER_OF_PAIR = 0x861B5953598B11F6


def tier_with_regulars(regulars: int = 9, uses: int = 3) -> CheckedTier:
    """Ten slots, one of them window: blocks 0, 1, … were asked for often, and fill the main part."""
    tier = CheckedTier(WTinyLfu, 10, admits_all=True)
    for _ in range(uses):
        for block in range(regulars):
            tier.serve((block,))
    return tier


def held(tier: CheckedTier) -> set[int]:
    return {block.path[0] for block in tier.blocks.values()}


def test_newcomers_drive_out_one_another_only() -> None:
    tier = tier_with_regulars()
    for block in range(100, 150):
        tier.serve((block,))
    assert held(tier) == {*range(9), 149}


def test_whoever_is_asked_for_more_often_gets_in() -> None:
    """Block 50 never stays long enough to hit, but the sketch counts it."""
    tier = tier_with_regulars()
    for block in range(100, 104):
        assert not tier.serve((50,))
        tier.serve((block,))
    assert 50 in held(tier)
    assert len(held(tier) & set(range(9))) == 8


def test_a_tie_spares_the_main_part() -> None:
    tier = tier_with_regulars(uses=1)
    tier.serve((100,))
    tier.serve((101,))
    assert held(tier) == {*range(9), 101}


def test_old_fame_fades() -> None:
    """Ten requests a slot halve the counts, until fifteen uses of long ago are worth less than one of now."""
    tier = tier_with_regulars(uses=COUNT_MAX)
    assert min(tier._policies[0]._counts[:9]) >= COUNT_MAX // 2  # type: ignore[attr-defined]
    for block in range(1000, 1150):
        tier.serve((block,))
    assert set(range(9)) < held(tier), "one request each is not more than what is left of fifteen"
    for block in range(600):
        tier.serve((2000 + block % 12,))
    assert len(held(tier) & set(range(9))) < 3


def test_what_is_used_in_the_main_part_is_protected() -> None:
    """Two blocks of equal count: the one that was used after it left the window goes last."""
    tier = CheckedTier(WTinyLfu, 10, admits_all=True)
    for block in (0, 1, 2):
        tier.serve((block,))
    tier.serve((0,))
    slots = [tier.find((block,)) for block in (0, 1, 2)]
    assert tier.evict(3) == (slots[1], slots[0], slots[2]), "probation, protected, window"


def test_a_parent_whose_continuation_is_in_the_main_part_goes_there_too() -> None:
    tier = CheckedTier(WTinyLfu, 10, admits_all=True)
    for _ in range(3):
        tier.serve((1, 2, 3))
    for block in range(100, 150):
        tier.serve((block,))
    assert tier.find((1, 2, 3)) >= 0


def test_a_long_run_meets_the_main_part_later() -> None:
    """It does not fit into the window, but that is no way into the main part."""
    tier = tier_with_regulars()
    tier.serve((100, 101, 102, 103))
    policy = tier._policies[0]
    assert isinstance(policy, WTinyLfu)
    assert policy._sizes[0] == 4
    tier.serve((200,))
    assert held(tier) & {100, 200} == {100, 200}
    assert policy._sizes[0] == 4, "the last of the four lost, and the newcomer came"


def test_parents_do_not_crowd_the_window() -> None:
    """Three sessions that grow: what is continued leaves the window for the main part, and nothing waits there."""
    tier = CheckedTier(WTinyLfu, 40, admits_all=True)
    policy = tier._policies[0]
    assert isinstance(policy, WTinyLfu)
    sessions: list[tuple[int, ...]] = [(1,), (2,), (3,)]
    for turn in range(60):
        sessions[turn % 3] += (turn, turn)
        tier.serve(sessions[turn % 3])
        tier.serve((100 + turn,))
        waiting = [slot for slot in tier.blocks if policy._waits[slot] and policy._queue[slot] == 0]
        assert len(waiting) <= 1, "but for the parent of what came last"
        if len(sessions[turn % 3]) > 20:
            sessions[turn % 3] = (turn,)


def test_the_sketch_never_counts_too_low() -> None:
    sketch, chance, exact = CountSketch(64), random.Random(1), dict[int, int]()
    for _ in range(2000):
        number = sketch.number(chance.randrange(500))
        exact[number] = max(exact.get(number, 0), chance.randrange(COUNT_MAX))
        sketch.raise_to([number], [exact[number]])
    assert all(found >= exact[n] for n, found in zip(exact, sketch.counts(list(exact)), strict=True))


def test_the_sketch_rarely_counts_too_high() -> None:
    """As full as ten new keys a slot make it: chance alone would have a quarter of the strangers meet known keys."""
    sketch = CountSketch(1000)
    known = [sketch.number(key) for key in range(10_000)]
    sketch.raise_to(known, [1] * len(known))
    strangers = [sketch.number(key) for key in range(1_000_000, 1_010_000)]
    assert sketch.counts(known) == [1] * len(known)
    assert sum(sketch.counts(strangers)) < 0.3 * len(strangers)


def test_the_sketch_halves() -> None:
    sketch = CountSketch(64)
    numbers = [sketch.number(key) for key in (b"a" * 32, b"b" * 32, b"c" * 32)]
    sketch.raise_to(numbers, [15, 4, 1])
    sketch.halve()
    assert sketch.counts(numbers) == [7, 2, 0]


def test_keys_have_the_same_numbers_in_every_process() -> None:
    """Written down here once: unlike what `hash` says of bytes, they must not change from process to process."""
    assert CountSketch.number(bytes(range(32))) == NUMBER_OF_BYTES
    assert CountSketch.number(7) == NUMBER_OF_SEVEN
    assert CountSketch.number(("any", 7)) == NUMBER_OF_PAIR


def test_numbers_of_dense_keys_spread() -> None:
    """The simulator's keys count from 0; each row of the sketch must tell most of them apart."""
    sketch = CountSketch(512)
    numbers = [sketch.number(key) for key in range(4096)]
    for shift in sketch._shifts:
        places = {number >> shift & sketch._mask for number in numbers}
        assert len(places) > 0.6 * len(numbers)
