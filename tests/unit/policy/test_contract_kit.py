"""The policy contract finds what it forbids: every kind of broken policy fails, and the sound one that they come from
does not."""

from __future__ import annotations

import random
import time
from collections.abc import Container, Hashable, Iterable, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvbm.policy import EvictionPolicy
from kvbm.testing.policy_contract import PolicyContract


class Plain:
    """Leaf-first, in the order of slots; plain enough to be right at a glance."""

    def __init__(self, slot_count: int) -> None:
        self.parents: dict[int, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.ready: set[int] = set()

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        return

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        return

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        for key, slot in zip(keys, slots, strict=True):
            self.keys[slot], self.parents[slot] = key, parent
            parent = slot

    def evictable(self, slots: Iterable[int]) -> None:
        self.ready.update(slots)

    def removed(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.forget(slot)

    def forget(self, slot: int) -> None:
        del self.parents[slot], self.keys[slot]
        self.ready.discard(slot)
        for child, parent in self.parents.items():
            if parent == slot:
                self.parents[child] = -1

    def candidates(self, leased: Container[int]) -> list[int]:
        busy = set(self.parents.values())
        return [slot for slot in sorted(self.ready) if slot not in busy and slot not in leased]

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < needed and (candidates := self.candidates(leased)):
            chosen.append(candidates[0])
            self.forget(chosen[-1])
        return chosen


class ParentsFirst(Plain):
    def candidates(self, leased: Container[int]) -> list[int]:
        return [slot for slot in sorted(self.ready) if slot not in leased]


class IgnoresLeases(Plain):
    def candidates(self, leased: Container[int]) -> list[int]:
        return super().candidates(())


class TakesWhatIsFilling(Plain):
    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        super().inserted(keys, slots, parent, now_s)
        self.ready.update(slots)


class GivesTooMany(Plain):
    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        return super().victims(needed + 1, incoming, leased, now_s)


class GivesOneTwice(Plain):
    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        chosen = super().victims(needed, incoming, leased, now_s)
        return chosen[:-1] + chosen[:1] if len(chosen) > 1 else chosen


class GivesTooFew(Plain):
    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        return super().victims(min(needed, 2), incoming, leased, now_s)


class LosesWhatWasLeased(Plain):
    """Takes a leased block off its list, and does not put it back when the lease ends."""

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count)
        self.lost: set[int] = set()

    def candidates(self, leased: Container[int]) -> list[int]:
        self.lost |= {slot for slot in self.ready if slot in leased}
        return [slot for slot in super().candidates(leased) if slot not in self.lost]


class RemembersTheDead(Plain):
    def removed(self, slots: Iterable[int]) -> None:
        return


class Dices(Plain):
    def candidates(self, leased: Container[int]) -> list[int]:
        return random.sample(found := super().candidates(leased), len(found))


class AsksASet(Plain):
    """Chooses whatever comes first in a set of keys."""

    def candidates(self, leased: Container[int]) -> list[int]:
        slots = {self.keys[slot]: slot for slot in super().candidates(leased)}
        return [slots[key] for key in set(slots)]


class LooksAtTheClock(Plain):
    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.used_s = time.monotonic()


class NeverForgets(Plain):
    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count)
        self.seen: set[Hashable] = set()

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.seen.update(keys)


class Declines(Plain):
    """Takes no newcomer that would cost a block; sound, for a policy that does not claim to admit all."""

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        return [] if incoming else super().victims(needed, incoming, leased, now_s)


class LosesTails(Plain):
    """Knows tails, and never gives one up."""

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        self.inserted(keys, slots, parent, now_s)
        self.kept |= set(slots)

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count)
        self.kept: set[int] = set()

    def candidates(self, leased: Container[int]) -> list[int]:
        return [slot for slot in super().candidates(leased) if slot not in self.kept]


class StumblesOverTails(Plain):
    """Takes every block of a tail for one that is here."""

    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.evictable(slots)


def contract(policy: type[Plain], admits_all: bool = True) -> PolicyContract:
    class Contract(PolicyContract):
        examples = 30

        def make_policy(self, slot_count: int) -> EvictionPolicy:
            return policy(slot_count)

    made = Contract()
    made.admits_all = admits_all
    return made


def check_all(checked: PolicyContract, patch: pytest.MonkeyPatch) -> None:
    checked.test_any_order_of_calls_is_answered_within_the_contract()
    checked.test_long_traffic_is_answered_within_the_contract(10)
    checked.test_a_whole_chain_goes_from_its_end()
    checked.test_numbers_may_be_keys()
    checked.test_answers_depend_on_the_calls_alone()
    checked.test_no_clock_is_read(patch)
    checked.test_memory_stays_bounded()


def test_a_sound_policy_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all(contract(Plain), monkeypatch)


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (ParentsFirst, "continuation"),
        (IgnoresLeases, "is leased"),
        (TakesWhatIsFilling, "being filled"),
        (GivesTooMany, "were needed"),
        (GivesOneTwice, "chosen twice"),
        (GivesTooFew, "may go"),
        (LosesWhatWasLeased, "may go"),
    ],
)
def test_a_wrong_answer_is_found(policy: type[Plain], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        contract(policy).test_long_traffic_is_answered_within_the_contract(10)


@pytest.mark.parametrize(
    "policy", [ParentsFirst, IgnoresLeases, GivesTooFew, RemembersTheDead, LosesTails, StumblesOverTails]
)
def test_any_order_of_calls_finds_it_too(policy: type[Plain]) -> None:
    unshrunk = settings(
        max_examples=300, phases=[Phase.generate], deadline=None, report_multiple_bugs=False, derandomize=True
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(contract(policy).machine(), settings=unshrunk)


def test_chance_is_found() -> None:
    with pytest.raises(AssertionError, match="the same calls"):
        contract(Dices).test_answers_depend_on_the_calls_alone()


def test_the_order_of_a_set_is_found() -> None:
    contract(AsksASet).test_long_traffic_is_answered_within_the_contract(10)
    with pytest.raises(AssertionError):
        contract(AsksASet).test_answers_depend_on_the_calls_alone()


def test_a_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="reads no clock"):
        contract(LooksAtTheClock).test_no_clock_is_read(monkeypatch)


def test_unbounded_memory_is_found() -> None:
    with pytest.raises(AssertionError):
        contract(NeverForgets).test_memory_stays_bounded()


def test_declining_newcomers_is_allowed_unless_all_are_admitted() -> None:
    contract(Declines, admits_all=False).test_any_order_of_calls_is_answered_within_the_contract()
    with pytest.raises(AssertionError, match="may go"):
        contract(Declines).test_long_traffic_is_answered_within_the_contract(10)
