"""The contract of an admission policy as tests. Subclass `AdmissionContract`, say how to make yours, and run pytest::

    class TestMyAdmission(AdmissionContract):
        def make_policy(self, slot_count, now_s):
            return MyAdmission(slot_count, now_s)

`CheckedAdmission` asks policies as the manager does and fails when an answer breaks the contract; use it alone to check
a policy under traffic of your own. Needs pytest and hypothesis: the extra `openkvbm[test]`.
"""

from __future__ import annotations

import abc
import gc
import hashlib
import random
import sys
import tracemalloc
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvbm.block import BlockKey
from kvbm.policy import AdmissionFactory, AdmissionPolicy
from kvbm.policy.contract import hit_all, offer_all

SLOT_COUNT = 64
YEARS_S = float(1 << 29)
"""Seventeen of them: longer than any manager runs, and no rounding in a sum with the times used here."""
_CLOCK_STARTS_S = (0.0, 1.0, float(1 << 24) + 0.5)
_ONE_OFF = 1 << 20
"""From this number on blocks come up once and never again."""

_OUTSIDE = frozenset(
    {"time", "posix", "nt", "io", "_io", "_socket", "_ssl", "select", "_posixsubprocess", "_sqlite3"}
)
_CLOCKS = frozenset({"now", "utcnow", "today"})


def make_key(number: int) -> Hashable:
    """The key of a block, 32 bytes as the manager's are; a new object each time, as they come from a message."""
    return hashlib.sha256(b"%d" % number).digest()


class CheckedAdmission:
    """Two equal policies that get the same calls; every answer is checked. Blocks are numbers here.

    `now_s` is the time that the policies get; move it on, never back. They are made at `start_s`.
    """

    def __init__(
        self,
        make_policy: AdmissionFactory,
        slot_count: int = SLOT_COUNT,
        start_s: float = 1.0,
        key_of: Callable[[int], Hashable] = make_key,
    ) -> None:
        self.now_s = start_s
        self._key_of = key_of
        self._policies: tuple[AdmissionPolicy, AdmissionPolicy] = (
            make_policy(slot_count, start_s),
            make_policy(slot_count, start_s),
        )

    def offered(self, number: int) -> bool:
        """The block could be stored below: whether it may."""
        key = self._key(number)
        one, other = self._policies
        # The second is asked in the form for many blocks, where it has that.
        answers = [one.offered(key, self.now_s), *offer_all(other, [key], self.now_s)]
        assert len(answers) == 2, "an offer of one block has one answer"
        for answer in answers:
            assert isinstance(answer, bool), f"an offer is answered with True or False, not {answer!r}"
        assert answers[0] is answers[1], "two policies answered the same calls differently"
        return answers[0]

    def hit(self, number: int) -> None:
        """The block was used again."""
        key = self._key(number)
        one, other = self._policies
        one.hit(key, self.now_s)
        hit_all(other, [key], self.now_s)

    def insist(self, number: int, offers_max: int) -> None:
        """Offer the block until it is admitted, which takes no more than so many offers."""
        for _ in range(offers_max):
            if self.offered(number):
                return
        raise AssertionError(f"block {number} was offered {offers_max} times in a row and not admitted")

    def _key(self, number: int) -> BlockKey:
        # In the simulator keys are numbers: a policy may only compare a key with others, and hash it.
        return cast(BlockKey, self._key_of(number))


def traffic(checked: CheckedAdmission, seed: int, requests: int) -> Iterator[bool]:
    """The answers to a manager's calls over some time: most blocks come again, some do not; some writes fail.

    A block on disk is hit. So is, now and then, one that the policy has never seen: disk outlives a manager.
    """
    rng = random.Random(seed)
    below: set[int] = set()
    for request in range(requests):
        checked.now_s += rng.choice((0.0, 0.0, 0.5, 30.0, 600.0))
        often = rng.random() < 0.8
        number = int(rng.expovariate(1 / 50)) if often else _ONE_OFF * (1 + seed) + request
        if number in below or rng.random() < 0.1:
            checked.hit(number)
            if rng.random() < 0.1:
                below.discard(number)
            continue
        admitted = checked.offered(number)
        if admitted and rng.random() < 0.9:
            below.add(number)
        yield admitted


class AdmissionMachine(RuleBasedStateMachine):
    """Whatever may be asked of a policy, in any order. The clock stands still, or jumps."""

    numbers = st.integers(0, 5)

    def __init__(self, checked: CheckedAdmission, offers_max: int | None, recovers_s: float) -> None:
        super().__init__()
        self.checked = checked
        self.offers_max = offers_max
        self.recovers_s = recovers_s

    @rule(seconds=st.sampled_from([0.0, 0.5, 60.0, 600.0, 86_400.0, YEARS_S / 1024]))
    def time_passes(self, seconds: float) -> None:
        self.checked.now_s += seconds

    @rule(number=numbers)
    def offer(self, number: int) -> None:
        self.checked.offered(number)

    @rule(number=numbers)
    def hit(self, number: int) -> None:
        self.checked.hit(number)

    @precondition(lambda self: self.offers_max is not None)
    @rule(number=numbers)
    def insist(self, number: int) -> None:
        assert self.offers_max is not None
        self.checked.now_s += self.recovers_s
        self.checked.insist(number, self.offers_max)


class AdmissionContract(abc.ABC):
    """The duties of every admission policy. Override `make_policy`, and the attributes that do not fit.

    `offers_max`: a block that is offered so many times in a row is admitted at last, whatever came before and however
    often it was admitted already: the policy does not learn whether a block that it admitted was written, and such a
    block is offered again. None for a policy that refuses some blocks for good. `recovers_s`: how long the policy must
    have had no calls for that. `full_after_keys`: how many different blocks a policy of 64 slots has to see before it
    has its full size, and `growth_bytes_max` how much it may still grow after that. `lines_max`: how many lines of
    Python a call may run that comes after years without one. `examples`: how many examples hypothesis tries.
    """

    offers_max: int | None = 2
    recovers_s: float = 0.0
    full_after_keys: int = 5000
    growth_bytes_max: int = 32 * 1024
    lines_max: int = 20_000
    examples: int = 100

    @abc.abstractmethod
    def make_policy(self, slot_count: int, now_s: float) -> AdmissionPolicy:
        """A new policy for a tier of so many slots, from this time on; equal to the one before it."""

    def checked(
        self,
        slot_count: int = SLOT_COUNT,
        start_s: float = 1.0,
        key_of: Callable[[int], Hashable] = make_key,
    ) -> CheckedAdmission:
        return CheckedAdmission(self.make_policy, slot_count, start_s, key_of)

    def machine(self) -> type[AdmissionMachine]:
        contract = self

        class Machine(AdmissionMachine):
            def __init__(self) -> None:
                super().__init__(contract.checked(), contract.offers_max, contract.recovers_s)

        return Machine

    def test_any_order_of_calls_is_answered_within_the_contract(self) -> None:
        run_state_machine_as_test(
            self.machine(),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=40,
                deadline=None,
                report_multiple_bugs=False,
            ),
        )

    @pytest.mark.parametrize("slot_count", [1, 2, SLOT_COUNT])
    def test_long_traffic_is_answered_within_the_contract(self, slot_count: int) -> None:
        """A manager that is about to start makes one for a single slot, to see whether it can be made."""
        answers = list(traffic(self.checked(slot_count), 1, 1500))
        assert self.offers_max is None or any(answers), "nothing was admitted"

    def test_no_block_is_refused_for_good(self) -> None:
        """Neither a new one nor one that got in before, after a flood of others, or after years."""
        if self.offers_max is None:
            pytest.skip("a policy that refuses some blocks for good")
        checked = self.checked()
        for _ in traffic(checked, 2, 500):
            pass
        for _ in range(3):
            checked.now_s += self.recovers_s
            checked.insist(0, self.offers_max)
        for number in range(2 * _ONE_OFF, 2 * _ONE_OFF + self.full_after_keys):
            checked.offered(number)
        # The counts of the flood fade, or are pushed out; those of the newcomer are there at once.
        checked.now_s += self.recovers_s
        checked.insist(_ONE_OFF - 1, self.offers_max)
        checked.now_s += YEARS_S
        checked.insist(_ONE_OFF - 2, self.offers_max)

    def test_numbers_may_be_keys(self) -> None:
        """In the simulator they are."""
        answers = list(traffic(self.checked(key_of=lambda number: number), 3, 500))
        assert self.offers_max is None or any(answers), "nothing was admitted"

    def test_answers_depend_on_the_calls_alone(self) -> None:
        """Not on chance, nor on the hash of bytes or the order of a set, which differ from process to process."""
        state = random.getstate()
        answers = []
        try:
            for salt in (1, 2):
                random.seed(salt)
                answers.append(list(traffic(self.checked(key_of=_salted(salt)), 4, 1000)))
        finally:
            random.setstate(state)
        assert answers[0] == answers[1], "another process would answer the same calls differently"

    def test_the_clock_may_start_anywhere(self) -> None:
        """Its time is that since an arbitrary start, and tells a policy no more than how much has passed."""
        answers = [list(traffic(self.checked(start_s=start_s), 5, 1000)) for start_s in _CLOCK_STARTS_S]
        for start_s, found in zip(_CLOCK_STARTS_S, answers, strict=True):
            assert found == answers[0], f"a clock that starts at {start_s} changes the answers"

    def test_policies_share_nothing(self) -> None:
        """Each namespace has its own disk, and a policy for it."""
        alone = list(traffic(self.checked(), 6, 1000))
        ours, others = traffic(self.checked(), 6, 1000), traffic(self.checked(), 7, 2000)
        beside_another = []
        for answer in ours:
            beside_another.append(answer)
            next(others, None)
        assert beside_another == alone, "the calls of another policy change the answers"

    def test_there_is_no_io_and_no_clock(self) -> None:
        """The thread that asks serves every engine. A policy reads and imports things when it is made, not later."""
        checked = self.checked()
        found = _outside_calls(lambda: list(traffic(checked, 8, 300)))
        assert not found, (
            f"a policy does no I/O and reads no clock, time comes as an argument; it called {found}"
        )

    def test_time_without_a_call_costs_nothing(self) -> None:
        """A pass per interval gone by would stop the manager in the morning."""
        checked = self.checked()
        for _ in traffic(checked, 9, 1000):
            pass
        checked.now_s += YEARS_S
        _run_within(self.lines_max, lambda: checked.offered(0))
        checked.now_s += YEARS_S
        _run_within(self.lines_max, lambda: checked.hit(1))

    @pytest.mark.parametrize("call", ["offered", "hit"])
    def test_memory_stays_bounded(self, call: str) -> None:
        """However many different blocks come by, and all in one moment."""
        tracemalloc.start()
        try:
            policy = self.make_policy(SLOT_COUNT, 0.0)
            tell = policy.offered if call == "offered" else policy.hit
            sizes_bytes = []
            for first, last in ((0, self.full_after_keys), (self.full_after_keys, 3 * self.full_after_keys)):
                for number in range(first, last):
                    # Made here, so that the memory of keys that the policy keeps is counted.
                    tell(cast(BlockKey, make_key(number)), 0.0)
                gc.collect()
                sizes_bytes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert sizes_bytes[1] - sizes_bytes[0] <= self.growth_bytes_max, (
            f"grew by {sizes_bytes[1] - sizes_bytes[0]} bytes"
        )


def _salted(salt: int) -> Callable[[int], Hashable]:
    """Keys whose hash, and thereby their order in sets, depends on `salt`, as that of bytes does on the process."""

    class SaltedKey(bytes):
        def __hash__(self) -> int:
            return hash((salt, bytes(self)))

    return lambda number: SaltedKey(hashlib.sha256(b"%d" % number).digest())


def _outside_calls(work: Callable[[], object]) -> list[str]:
    """The built-in functions that Python code called in `work` and that read a clock or reach outside of the process.

    However they were imported: a name that a policy module took out of `time` cannot be replaced from here.
    """
    found: list[str] = []

    def watch(_frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        owner = owner if isinstance(owner, type) else type(owner)
        module = getattr(function, "__module__", None) or owner.__module__
        clock = owner.__module__ == "datetime" and function.__name__ in _CLOCKS
        if module in _OUTSIDE or clock or function in (print, input):
            found.append(f"{module}.{function.__name__}")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what others do when garbage is collected, hypothesis among them, is none of the policy's
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return sorted(set(found))


def _run_within(lines_max: int, work: Callable[[], object]) -> None:
    """Count the lines that run: a measure of work that is the same on every machine."""
    lines = 0

    def watch(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        assert lines <= lines_max, f"a call after a long time ran more than {lines_max} lines"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        work()
    finally:
        sys.settrace(before)
