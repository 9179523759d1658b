"""KVBM's disk filter against its own description, word by word, and the cost of keeping it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.block import BlockKey
from kvbm.policy import AdmitAll, DiskFilter
from kvbm.policy.admission.filter import ADMIT_FREQUENCY, DECAY_INTERVAL_S, ENTRIES_MAX, FREQUENCY_MAX
from kvbm.policy.contract import hit_all, offer_all
from rigs.property_tests import scale_examples

EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([0.0, 0.0, 1.0, 599.0, 600.0, 1800.0])),
    max_size=60,
)
"""Which block, whether it is offered or hit, and the seconds since the event before."""


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


class LiteralFilter:
    """The algorithm as its documentation puts it, with no thought for speed."""

    def __init__(self, entries_max: int) -> None:
        self.freq: dict[BlockKey, int] = {}
        self.entries_max = entries_max
        self.timer_s = 0.0

    def decay(self) -> None:
        self.freq = {k: n - 1 for k, n in self.freq.items() if n - 1 > 0}

    def seen(self, k: BlockKey, now_s: float) -> bool:
        while now_s - self.timer_s >= 600.0:
            self.decay()
            self.timer_s += 600.0
        self.freq[k] = 1 if k not in self.freq else min(2 * self.freq[k], FREQUENCY_MAX)
        if len(self.freq) > self.entries_max:
            while len(self.freq) > self.entries_max:
                self.decay()
            self.timer_s = now_s
        return self.freq.get(k, 0) >= 2


@settings(max_examples=scale_examples(200))
@given(entries_max=st.integers(1, 6), events=EVENTS)
def test_it_does_what_the_description_says(entries_max: int, events: list[tuple[int, bool, float]]) -> None:
    ours, literal, now_s = DiskFilter(0.0, entries_max), LiteralFilter(entries_max), 0.0
    for number, offered, passed_s in events:
        now_s += passed_s
        expected = literal.seen(key(number), now_s)
        if offered:
            assert ours.offered(key(number), now_s) is expected
        else:
            ours.hit(key(number), now_s)
        assert len(ours) == len(literal.freq) <= entries_max


@settings(max_examples=scale_examples(100))
@given(entries_max=st.integers(1, 6), events=EVENTS)
def test_every_frequency_is_that_of_the_description(
    entries_max: int, events: list[tuple[int, bool, float]]
) -> None:
    """Seen from outside: a block of frequency n is still known after n - 1 decays, and new again after n."""
    ours, literal, now_s = DiskFilter(0.0, entries_max), LiteralFilter(entries_max), 0.0
    for number, offered, passed_s in events:
        now_s += passed_s
        literal.seen(key(number), now_s)
        if offered:
            ours.offered(key(number), now_s)
        else:
            ours.hit(key(number), now_s)
    if events:
        for number in range(10):
            frequency = literal.freq.get(key(number), 0)
            assert not deepcopy(ours).offered(key(number), now_s + frequency * 600.0)
            if frequency:
                assert deepcopy(ours).offered(key(number), now_s + (frequency - 1) * 600.0)


def test_its_constants_are_those_of_kvbm() -> None:
    assert (ADMIT_FREQUENCY, DECAY_INTERVAL_S, ENTRIES_MAX) == (2, 600.0, 1_000_000)


def test_frequencies_start_at_one_double_and_fall_by_one() -> None:
    admission = DiskFilter(0.0)
    assert [admission.offered(key(1), 0.0) for _ in range(4)] == [False, True, True, True]  # 1, 2, 4, 8
    assert admission.offered(key(1), 7 * 600.0)  # 8 has become 1; now 2
    assert not admission.offered(key(1), 9 * 600.0)  # gone; now 1
    assert not admission.offered(key(1), 10 * 600.0), "gone with the first decay"
    assert admission.offered(key(1), 10 * 600.0 + 599.0), "none has come since"


def test_the_first_offer_is_refused_and_the_second_admitted() -> None:
    admission = DiskFilter(0.0)
    assert not admission.offered(key(1), 0.0)
    assert admission.offered(key(1), 1.0)
    assert not admission.offered(key(2), 1.0)


def test_what_is_not_seen_for_long_enough_is_forgotten() -> None:
    admission = DiskFilter(0.0)
    for _ in range(3):
        admission.hit(key(1), 0.0)  # 1, 2, 4
    assert not admission.offered(key(1), 4 * DECAY_INTERVAL_S)
    assert len(admission) == 1


def test_frequencies_are_capped() -> None:
    admission = DiskFilter(0.0, entries_max=10)
    for _ in range(10_000):
        admission.hit(key(1), 0.0)
    # Without a cap this would be a number of 3,000 digits, and never decay.
    assert not admission.offered(key(1), (FREQUENCY_MAX + 1) * DECAY_INTERVAL_S)


def test_making_room_among_hot_entries_does_not_take_a_pass_per_count() -> None:
    """Everything was hit twenty times: decaying by one, a million times over, would stop the manager for hours."""
    admission = DiskFilter(0.0, entries_max=500)
    for _ in range(25):
        for number in range(500):
            admission.hit(key(number), 0.0)
    assert not admission.offered(key(1000), 0.0)
    assert len(admission) == 500
    admission.hit(key(1001), 0.0)
    for _ in range(30):
        admission.hit(key(1001), 0.0)
    assert len(admission) <= 500


def test_a_long_idle_time_does_not_take_a_pass_per_interval() -> None:
    admission = DiskFilter(0.0)
    for _ in range(21):
        for number in range(500):
            admission.hit(key(number), 0.0)
    almost = (FREQUENCY_MAX - 2) * DECAY_INTERVAL_S
    assert admission.offered(key(1), almost)
    assert not admission.offered(key(2), almost + 2 * DECAY_INTERVAL_S)
    assert len(admission) == 2


def test_without_a_filter_everything_enters() -> None:
    admission = AdmitAll()
    assert admission.offered(key(1), 0.0)
    admission.hit(key(1), 0.0)


@settings(max_examples=scale_examples(200))
@given(
    entries_max=st.integers(1, 12),
    calls=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=8),
            st.booleans(),
            st.sampled_from([0.0, 0.0, 1.0, 599.0, 600.0, 1800.0]),
        ),
        max_size=30,
    ),
)
def test_many_at_once_are_as_one_after_the_other(
    entries_max: int, calls: list[tuple[list[int], bool, float]]
) -> None:
    one_by_one, at_once = DiskFilter(0.0, entries_max), DiskFilter(0.0, entries_max)
    now_s = 0.0
    for numbers, offers, seconds in calls:
        now_s += seconds
        keys = [key(number) for number in numbers]
        if offers:
            assert list(at_once.offered_all(keys, now_s)) == [one_by_one.offered(k, now_s) for k in keys]
        else:
            at_once.hit_all(keys, now_s)
            for k in keys:
                one_by_one.hit(k, now_s)
        assert len(at_once) == len(one_by_one)
        assert {k: n - at_once._decays for k, n in at_once._end.items() if n > at_once._decays} == {
            k: n - one_by_one._decays for k, n in one_by_one._end.items() if n > one_by_one._decays
        }


class OddOnly(DiskFilter):
    """An installed policy that knew nothing of many blocks at once."""

    def offered(self, key: Hashable, now_s: float) -> bool:
        return isinstance(key, bytes) and key[0] % 2 == 1 and super().offered(key, now_s)


class Deaf(AdmitAll):
    """It replaces the other method alone, and takes many in the form that it brings itself."""

    def __init__(self) -> None:
        self.heard: list[Hashable] = []

    def hit(self, key: Hashable, now_s: float) -> None:
        self.heard.append(key)

    def offered_all(self, keys: Sequence[Hashable], now_s: float) -> list[bool]:
        return [False] * len(keys)


def test_a_subclass_that_replaces_the_decision_on_one_block_decides_on_many() -> None:
    keys = [key(number) for number in range(4)]
    odd = OddOnly(0.0)
    assert list(offer_all(odd, keys, 0.0)) == [False] * 4
    assert list(offer_all(odd, keys, 1.0)) == [False, True, False, True]
    deaf = Deaf()
    hit_all(deaf, keys, 0.0)
    assert (deaf.heard, list(offer_all(deaf, keys, 0.0))) == (keys, [False] * 4)
