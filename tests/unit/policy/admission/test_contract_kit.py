"""The admission contract finds what it forbids: every kind of broken policy fails, and the sound one that they come
from does not."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import datetime, timezone
from time import monotonic
from typing import ClassVar

import pytest

from kvbm.block import BlockKey
from kvbm.policy import AdmissionPolicy
from kvbm.testing.admission_contract import AdmissionContract

REMEMBERED = 200


class Plain:
    """A block gets in when it is offered again while it is remembered; plain enough to be right at a glance."""

    def __init__(self, slot_count: int, now_s: float) -> None:
        self.seen: dict[BlockKey, None] = {}

    def offered(self, key: BlockKey, now_s: float) -> bool:
        known = key in self.seen
        self.note(key)
        return known

    def hit(self, key: BlockKey, now_s: float) -> None:
        return

    def note(self, key: BlockKey) -> None:
        self.seen[key] = None
        if len(self.seen) > REMEMBERED:
            self.forget()

    def forget(self) -> None:
        del self.seen[next(iter(self.seen))]


class Forgetful(Plain):
    """Forgets a block when it was not offered for an hour, in one step; sound."""

    def __init__(self, slot_count: int, now_s: float) -> None:
        super().__init__(slot_count, now_s)
        self.round_s = now_s

    def offered(self, key: BlockKey, now_s: float) -> bool:
        if now_s - self.round_s >= 3600.0:
            self.seen.clear()
            self.round_s = now_s
        return super().offered(key, now_s)


class RefusesAll(Plain):
    """Sound, for a policy that says so."""

    def offered(self, key: BlockKey, now_s: float) -> bool:
        return False


class AdmitsOnce(Plain):
    """Takes it that what was admitted is on disk."""

    def __init__(self, slot_count: int, now_s: float) -> None:
        super().__init__(slot_count, now_s)
        self.admitted: set[BlockKey] = set()

    def offered(self, key: BlockKey, now_s: float) -> bool:
        if key in self.admitted or not super().offered(key, now_s):
            return False
        self.admitted.add(key)
        return True


class FillsUpForGood(Plain):
    """Bounded, by taking no newcomers."""

    def note(self, key: BlockKey) -> None:
        if len(self.seen) < REMEMBERED:
            self.seen[key] = None


class RunsDry(Plain):
    """A budget that time takes from."""

    def offered(self, key: BlockKey, now_s: float) -> bool:
        return super().offered(key, now_s) and now_s < 1e8


class AnswersWithACount(Plain):
    def offered(self, key: BlockKey, now_s: float) -> bool:
        return int(super().offered(key, now_s))  # type: ignore[return-value]


class ForgetsToAnswer(Plain):
    def offered(self, key: BlockKey, now_s: float) -> bool:
        super().offered(key, now_s)
        return None  # type: ignore[return-value]


class HitsOnlyWhatItKnows(Plain):
    def hit(self, key: BlockKey, now_s: float) -> None:
        del self.seen[key]
        self.seen[key] = None


class TellsKeysByIdentity(Plain):
    def __init__(self, slot_count: int, now_s: float) -> None:
        super().__init__(slot_count, now_s)
        self.places: dict[int, BlockKey] = {}

    def offered(self, key: BlockKey, now_s: float) -> bool:
        known = id(key) in self.places
        self.places[id(key)] = key  # and keeps the key, so that no other one gets its place
        return known


class ReadsTheKey(Plain):
    def offered(self, key: BlockKey, now_s: float) -> bool:
        return key[0] < 128 and super().offered(key, now_s)


class Dices(Plain):
    def offered(self, key: BlockKey, now_s: float) -> bool:
        return super().offered(key, now_s) and random.random() < 0.5


class AsksASet(Plain):
    """Forgets whichever comes first in a set of keys."""

    def forget(self) -> None:
        del self.seen[next(iter(set(self.seen)))]


class AsksTheHash(Plain):
    def offered(self, key: BlockKey, now_s: float) -> bool:
        return hash(key) % 2 == 0 or super().offered(key, now_s)


class LooksAtTheClock(Plain):
    def offered(self, key: BlockKey, now_s: float) -> bool:
        self.offered_s = time.perf_counter()
        return super().offered(key, now_s)


class LooksAtAClockOfItsOwn(Plain):
    def hit(self, key: BlockKey, now_s: float) -> None:
        self.hit_s = monotonic()


class LooksAtTheDate(Plain):
    def hit(self, key: BlockKey, now_s: float) -> None:
        self.hit_on = datetime.now(timezone.utc)


class WritesALog(Plain):
    def hit(self, key: BlockKey, now_s: float) -> None:
        with open(os.devnull, "w") as log:
            log.write(str(key))


class Prints(Plain):
    def hit(self, key: BlockKey, now_s: float) -> None:
        print("hit")  # noqa: T201


class TakesAnyTimeForItsFirst(Forgetful):
    """Is told when it is made, and does not listen."""

    def __init__(self, slot_count: int, now_s: float) -> None:
        super().__init__(slot_count, 0.0)

    def offered(self, key: BlockKey, now_s: float) -> bool:
        if (now_s // 3600.0) > (self.round_s // 3600.0):
            self.seen.clear()
        self.round_s = now_s
        return Plain.offered(self, key, now_s)


class SharesWhatItSaw(Plain):
    common: ClassVar[dict[BlockKey, None]] = {}

    def __init__(self, slot_count: int, now_s: float) -> None:
        self.seen = self.common


class SharesANumber(Plain):
    """Counts offers in one place for all policies, and lets every seventh of two that hear the same in."""

    offers = 0

    def offered(self, key: BlockKey, now_s: float) -> bool:
        SharesANumber.offers += 1
        return super().offered(key, now_s) or SharesANumber.offers % 14 in (1, 2)


class PassesThroughTheNight(Plain):
    """Forgets one block in each minute, minute by minute."""

    def __init__(self, slot_count: int, now_s: float) -> None:
        super().__init__(slot_count, now_s)
        self.done_s = now_s

    def offered(self, key: BlockKey, now_s: float) -> bool:
        while now_s - self.done_s >= 60.0:
            self.done_s += 60.0
            if self.seen:
                self.forget()
        return super().offered(key, now_s)


class NeverForgets(Plain):
    def forget(self) -> None:
        return


class NeverForgetsAHit(Plain):
    def __init__(self, slot_count: int, now_s: float) -> None:
        super().__init__(slot_count, now_s)
        self.hits: dict[BlockKey, float] = {}

    def hit(self, key: BlockKey, now_s: float) -> None:
        self.hits[key] = now_s


Made = Callable[[int, float], AdmissionPolicy]


def contract(policy: Made, offers_max: int | None = 2) -> AdmissionContract:
    class Contract(AdmissionContract):
        examples = 30

        def make_policy(self, slot_count: int, now_s: float) -> AdmissionPolicy:
            return policy(slot_count, now_s)

    made = Contract()
    made.offers_max = offers_max
    return made


def check_all(checked: AdmissionContract) -> None:
    checked.test_any_order_of_calls_is_answered_within_the_contract()
    checked.test_long_traffic_is_answered_within_the_contract(1)
    checked.test_numbers_may_be_keys()
    checked.test_answers_depend_on_the_calls_alone()
    checked.test_the_clock_may_start_anywhere()
    checked.test_policies_share_nothing()
    checked.test_there_is_no_io_and_no_clock()
    checked.test_time_without_a_call_costs_nothing()
    checked.test_memory_stays_bounded("offered")
    checked.test_memory_stays_bounded("hit")


@pytest.mark.parametrize("policy", [Plain, Forgetful])
def test_a_sound_policy_passes(policy: Made) -> None:
    checked = contract(policy)
    check_all(checked)
    checked.test_no_block_is_refused_for_good()


def test_refusing_blocks_for_good_is_allowed_where_it_is_said() -> None:
    check_all(contract(RefusesAll, offers_max=None))


@pytest.mark.parametrize("policy", [RefusesAll, AdmitsOnce, FillsUpForGood, RunsDry, TellsKeysByIdentity])
def test_refusing_blocks_for_good_is_found(policy: Made) -> None:
    with pytest.raises(AssertionError, match="not admitted"):
        contract(policy).test_no_block_is_refused_for_good()


@pytest.mark.parametrize("policy", [RefusesAll, AdmitsOnce, TellsKeysByIdentity])
def test_any_order_of_calls_finds_it_too(policy: Made) -> None:
    with pytest.raises(AssertionError, match="not admitted"):
        contract(policy).test_any_order_of_calls_is_answered_within_the_contract()


def test_asking_for_more_offers_than_said_is_found() -> None:
    contract(Plain, offers_max=2).test_no_block_is_refused_for_good()
    with pytest.raises(AssertionError, match="offered 1 times in a row"):
        contract(Plain, offers_max=1).test_no_block_is_refused_for_good()


@pytest.mark.parametrize("policy", [AnswersWithACount, ForgetsToAnswer])
def test_an_answer_that_is_none_is_found(policy: Made) -> None:
    with pytest.raises(AssertionError, match="True or False"):
        contract(policy).test_long_traffic_is_answered_within_the_contract(2)


def test_an_error_about_an_unknown_block_is_found() -> None:
    with pytest.raises(KeyError):
        contract(HitsOnlyWhatItKnows).test_long_traffic_is_answered_within_the_contract(2)


def test_a_key_that_must_be_bytes_is_found() -> None:
    with pytest.raises(TypeError):
        contract(ReadsTheKey).test_numbers_may_be_keys()


@pytest.mark.parametrize("policy", [Dices, SharesWhatItSaw])
def test_two_equal_policies_with_different_answers_are_found(policy: Made) -> None:
    with pytest.raises(AssertionError, match="the same calls"):
        contract(policy).test_long_traffic_is_answered_within_the_contract(2)


def test_a_policy_that_hears_of_the_calls_of_another_is_found() -> None:
    contract(SharesANumber).test_long_traffic_is_answered_within_the_contract(2)
    SharesANumber.offers = 0
    with pytest.raises(AssertionError, match="the calls of another policy change the answers"):
        contract(SharesANumber).test_policies_share_nothing()


@pytest.mark.parametrize("policy", [AsksASet, AsksTheHash])
def test_the_order_of_a_set_and_the_hash_of_bytes_are_found(policy: Made) -> None:
    contract(policy).test_long_traffic_is_answered_within_the_contract(2)
    with pytest.raises(AssertionError, match="another process"):
        contract(policy).test_answers_depend_on_the_calls_alone()


def test_a_time_of_day_in_the_clock_is_found() -> None:
    contract(TakesAnyTimeForItsFirst).test_long_traffic_is_answered_within_the_contract(2)
    with pytest.raises(AssertionError, match="a clock that starts at"):
        contract(TakesAnyTimeForItsFirst).test_the_clock_may_start_anywhere()


@pytest.mark.parametrize(
    ("policy", "called"),
    [
        (LooksAtTheClock, "time.perf_counter"),
        (LooksAtAClockOfItsOwn, "time.monotonic"),
        (LooksAtTheDate, "now"),
        (WritesALog, "open"),
        (Prints, "print"),
    ],
)
def test_a_clock_and_io_are_found(policy: Made, called: str) -> None:
    with pytest.raises(AssertionError, match=f"no I/O and reads no clock.*{called}"):
        contract(policy).test_there_is_no_io_and_no_clock()


def test_a_pass_per_interval_is_found() -> None:
    with pytest.raises(AssertionError, match="after a long time"):
        contract(PassesThroughTheNight).test_time_without_a_call_costs_nothing()


@pytest.mark.parametrize(("policy", "call"), [(NeverForgets, "offered"), (NeverForgetsAHit, "hit")])
def test_unbounded_memory_is_found(policy: Made, call: str) -> None:
    with pytest.raises(AssertionError, match="grew by"):
        contract(policy).test_memory_stays_bounded(call)
