"""The contract of an eviction policy as tests. Subclass `PolicyContract`, say how to make yours, and run pytest::

    class TestMyPolicy(PolicyContract):
        def make_policy(self, slot_count):
            return MyPolicy(slot_count)

`checked_tier.CheckedTier` drives policies as the manager does and fails when an answer breaks the contract; use it
alone to check a policy under traffic of your own. Needs pytest and hypothesis: the extra `openkvbm[test]`.
"""

from __future__ import annotations

import abc
import gc
import hashlib
import random
import time
import tracemalloc
from collections.abc import Callable, Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvbm.policy import EvictionPolicy
from kvbm.policy.contract import ClientWord
from kvbm.testing.checked_tier import CheckedTier, HeldBlock, Path, chain_of, make_key, traffic

SLOT_COUNT = 8
TAIL = 2
TRAFFIC_SLOT_COUNT = 64
WARM_REQUESTS = 1000


class PolicyMachine(RuleBasedStateMachine):
    """Whatever may happen to a small tier, in any order."""

    pick = st.integers(0, 1000)
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)

    def __init__(self, tier: CheckedTier) -> None:
        super().__init__()
        self.tier = tier
        self.running: list[Path] = []

    def choose(self, which: int, wanted: Callable[[HeldBlock], bool]) -> list[int]:
        """One of the slots that are as wanted, if any."""
        slots = sorted(slot for slot, block in self.tier.blocks.items() if wanted(block))
        return [slots[which % len(slots)]] if slots else []

    @rule(seconds=st.sampled_from([0.0, 0.5, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.tier.now_s += seconds

    @precondition(lambda self: self.running)
    @rule(
        pick=pick,
        session=st.sampled_from(["", "a", "b"]),
        final=st.booleans(),
        expect_s=st.none() | st.floats(0.0, 1e4),
    )
    def hint(self, pick: int, session: str, final: bool, expect_s: float | None) -> None:
        path = self.running[pick % len(self.running)]
        self.tier.hint(path, ClientWord("client", session, final, expect_s))

    @rule(path=paths, reserve=st.booleans(), commit=st.booleans())
    def request(self, path: Path, reserve: bool, commit: bool) -> None:
        self.tier.request(path)
        self.running.append(path)
        if reserve:
            self.tier.reserve(path)
        if commit:
            self.commit_all()

    @precondition(lambda self: self.running)
    @rule(output_tokens=st.integers(0, 100))
    def finish(self, output_tokens: int) -> None:
        self.tier.finish(self.running.pop(0), output_tokens)

    @rule(path=paths)
    def reserve_unasked(self, path: Path) -> None:
        self.tier.reserve(path)

    @rule(path=paths, length=st.integers(1, 2), asked=st.booleans())
    def reserve_tail(self, path: Path, length: int, asked: bool) -> None:
        """What a model of several groups needs where this chain ends, beside what the chain goes on with."""
        tail = path + (TAIL,) * length
        if asked:
            self.tier.request(path)
            self.tier.request_tail(tail, length)
        self.tier.reserve(tail, tail=self.tier.find(path) >= 0)

    @rule(which=pick)
    def commit(self, which: int) -> None:
        self.tier.commit(self.choose(which, lambda block: not block.resident))

    @rule()
    def commit_all(self) -> None:
        self.tier.commit([slot for slot, block in self.tier.blocks.items() if not block.resident])

    @rule(which=pick)
    def lease(self, which: int) -> None:
        self.tier.lease(self.choose(which, lambda block: block.resident))

    @rule(which=pick)
    def unlease(self, which: int) -> None:
        self.tier.unlease(self.choose(which, lambda block: block.leases > 0))

    @rule(which=pick)
    def remove(self, which: int) -> None:
        self.tier.remove(self.choose(which, lambda block: not block.leases))

    @rule(needed=st.integers(1, SLOT_COUNT))
    def evict(self, needed: int) -> None:
        self.tier.evict(needed)

    def teardown(self) -> None:
        self.tier.empty()


class PolicyContract(abc.ABC):
    """The duties of every eviction policy. Override `make_policy`, and the attributes that do not fit.

    `admits_all`: the policy takes every newcomer as long as any block may be evicted. `growth_bytes_max`: how much a
    policy of 64 slots may still grow after its first thousand requests. `examples`: how many examples hypothesis tries.
    """

    admits_all: bool = False
    growth_bytes_max: int = 32 * 1024
    examples: int = 100

    @abc.abstractmethod
    def make_policy(self, slot_count: int) -> EvictionPolicy:
        """A new policy for a tier of so many slots; equal to the one before it."""

    def make_tier(
        self, slot_count: int = TRAFFIC_SLOT_COUNT, key_of: Callable[[Path], Hashable] = make_key
    ) -> CheckedTier:
        return CheckedTier(self.make_policy, slot_count, self.admits_all, key_of)

    def machine(self) -> type[PolicyMachine]:
        contract = self

        class Machine(PolicyMachine):
            def __init__(self) -> None:
                super().__init__(contract.make_tier(SLOT_COUNT))

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

    @pytest.mark.parametrize("slot_count", [1, 2, 3, 10, TRAFFIC_SLOT_COUNT])
    def test_long_traffic_is_answered_within_the_contract(self, slot_count: int) -> None:
        tier = self.make_tier(slot_count)
        assert sum(map(len, traffic(tier, 1, 1500))) > 0, "the traffic must evict"
        tier.empty()

    def test_a_whole_chain_goes_from_its_end(self) -> None:
        tier = self.make_tier(SLOT_COUNT)
        path = tuple(range(SLOT_COUNT))
        tier.reserve(path)
        tier.commit(sorted(tier.blocks))
        slots = [tier.find(block) for block in chain_of(path)]
        assert list(tier.evict(3)) == slots[:-4:-1]
        tier.lease(slots[2:3])
        assert list(tier.evict(SLOT_COUNT)) == slots[4:2:-1], "what comes before a leased block is no leaf"
        tier.unlease(slots[2:3])
        assert list(tier.evict(SLOT_COUNT)) == slots[2::-1]

    def test_numbers_may_be_keys(self) -> None:
        """In the simulator they are."""
        numbers: dict[Path, int] = {}
        tier = self.make_tier(key_of=lambda path: numbers.setdefault(path, len(numbers)))
        assert sum(map(len, traffic(tier, 2, 500))) > 100
        tier.empty()

    def test_answers_depend_on_the_calls_alone(self) -> None:
        """Not on chance, nor on the order of a set, which differs from process to process."""
        state = random.getstate()
        answers = []
        try:
            for salt in (1, 2):
                random.seed(salt)
                answers.append(list(traffic(self.make_tier(key_of=_salted(salt)), 3, 1000)))
        finally:
            random.setstate(state)
        assert answers[0] == answers[1]

    def test_no_clock_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def clock() -> float:
            raise AssertionError("a policy reads no clock: time comes as an argument")

        with monkeypatch.context() as patch:
            for name in ("time", "monotonic", "perf_counter", "process_time"):
                patch.setattr(time, name, clock)
                patch.setattr(time, f"{name}_ns", clock)
            answers = list(traffic(self.make_tier(), 4, 300))
        assert any(answers)

    def test_memory_stays_bounded(self) -> None:
        tracemalloc.start()
        try:
            tier = self.make_tier()
            sizes_bytes = []
            for seed, request_count in ((5, WARM_REQUESTS), (6, 4 * WARM_REQUESTS)):
                for _ in traffic(tier, seed, request_count):
                    pass
                gc.collect()
                sizes_bytes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert sizes_bytes[1] - sizes_bytes[0] <= self.growth_bytes_max


def _salted(salt: int) -> Callable[[Path], Hashable]:
    """Keys whose hash, and thereby their order in sets, depends on `salt`, as that of bytes does on the process."""

    class SaltedKey(bytes):
        def __hash__(self) -> int:
            return hash((salt, bytes(self)))

    return lambda path: SaltedKey(hashlib.sha256(repr(path).encode()).digest())
