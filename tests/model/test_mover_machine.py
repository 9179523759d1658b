"""A mover whose copies run by themselves, against an oracle: loads, stores and fences in any order, copies that end
late or fail, slots that change hands, blocks that come later, sessions that are lost."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm.protocol import Fence, FenceDone, Progress
from kvbm.step_plan import LoadPlan
from kvbm.worker.loading import WINDOW_BYTES
from rigs.copies_beside import (
    PIECE_BLOCKS,
    WINDOW_BLOCKS,
    Copying,
    Device,
    Finder,
    Line,
    job_of,
    make_mover,
    step,
    store_job,
)
from rigs.property_tests import scale_examples

LONGEST = WINDOW_BLOCKS + PIECE_BLOCKS


class MoverMachine(RuleBasedStateMachine):
    """Each load has slots and device blocks of its own, so that every copy is one load's."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.device = Line(), Device()
        self.device.patient = True
        self.mover = make_mover(Finder(self.line), self.device)
        self.numbers = iter(range(1, 10_000))
        self.plans: dict[str, LoadPlan] = {}
        self.ready: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.stored: set[int] = set()
        self.fences: dict[int, set[int]] = {}
        self.failed_copies: list[Copying] = []
        self._reported: set[int] = set()
        self.stale: set[int] = set()

    @precondition(lambda self: len(self.plans) < 5)
    @rule(blocks=st.integers(1, LONGEST), share=st.sampled_from([1.0, 1.0, 0.6, 0.0]))
    def load(self, blocks: int, share: float) -> None:
        number = next(self.numbers)
        places = tuple(range(number * 1000, number * 1000 + blocks))
        ready = round(blocks * share)
        plan = LoadPlan(
            request=f"r{number}",
            lookup=number,
            epoch=1,
            slots=places,
            generations=(0,) * blocks,
            device_blocks=places,
            offset=0,
            ready=ready,
        )
        self.plans[plan.request], self.ready[plan.request] = plan, ready
        self.mover.put(job_of(self.device, plan))

    @precondition(lambda self: self.plans and not self.line.closed)
    @rule(pick=st.integers(0, 100), more=st.integers(0, LONGEST), final=st.booleans())
    def progress(self, pick: int, more: int, final: bool) -> None:
        plan = list(self.plans.values())[pick % len(self.plans)]
        ready = min(self.ready[plan.request] + more, len(plan.slots))
        self.ready[plan.request] = ready
        self.line.say(Progress(lookup=plan.lookup, ready=ready, final=final))

    @rule()
    def store(self) -> None:
        number = next(self.numbers)
        self.stored.add(number)
        self.mover.put(store_job(self.device, number))

    @precondition(lambda self: not self.line.closed)
    @rule(fence=st.integers(1, 10_000))
    def fence(self, fence: int) -> None:
        self.turn()  # it has taken what was put
        self.fences[fence] = self.storing()
        self.line.say(Fence(fence=fence, stores=()))

    @rule(
        what=st.sampled_from(["load", "load", "store"]),
        outcomes=st.lists(st.sampled_from("wwww!"), max_size=8),
    )
    def end(self, what: str, outcomes: list[str]) -> None:
        """The oldest of a kind end: each kind has a stream."""
        copies = [copying for copying in self.under_way() if copying.what == what]
        for copying, outcome in zip(copies, outcomes, strict=False):
            self.stale |= self.device.changed.intersection(slot for _, slot in copying.pairs)
            copying.end(RuntimeError("device-side error") if outcome == "!" else None)
            if outcome == "!":
                self.failed_copies.append(copying)
        self.turn()

    @rule(pick=st.integers(0, 100_000), copying=st.booleans())
    def change_slot(self, pick: int, copying: bool) -> None:
        """A lease ran out, while the slot is being copied or at some other time."""
        slots = [slot for plan in self.plans.values() for slot in plan.slots]
        if copying:
            slots = [pair[1] for each in self.under_way() for pair in each.pairs if each.what == "load"]
        if slots:
            self.device.changed.add(slots[pick % len(slots)])

    @rule(turns=st.integers(1, 2))
    def turn(self, turns: int = 1) -> None:
        step(self.mover, turns)
        self.look()

    @precondition(lambda self: not self.line.closed)
    @rule(chance=st.integers(0, 15))
    def lose_session(self, chance: int) -> None:
        if chance != 7:
            return  # once in a while: most of a run has a session
        self.line.hang_up()
        step(self.mover)
        self.look()
        assert self.line.closed
        assert not self.under_way(), "to a manager that lives its end says that nobody writes any more"
        assert not self.plans, "no load outlives its session"

    # ---- what must hold

    def under_way(self) -> list[Copying]:
        return [copying for copying in self.device.begun if not copying.over]

    def storing(self) -> set[int]:
        """Stores that are under way, as far as the mover can tell: they end in order."""
        unreported = self.stored - self.reported_stores
        return {pairs[0][1] for pairs in self.store_pairs() if pairs[0][1] in unreported}

    def store_pairs(self) -> list[list[tuple[int, int]]]:
        return [copying.pairs for copying in self.device.begun if copying.what == "store"]

    @property
    def reported_stores(self) -> set[int]:
        while not self.mover.stores.empty():
            self._reported.add(self.mover.stores.get_nowait().store)
        return self._reported

    def look(self) -> None:
        """Judge what was reported."""
        while not self.mover.loads.empty():
            load = self.mover.loads.get_nowait()
            plan = self.plans.pop(load.request)
            copied = len(plan.slots) - len(load.failed)
            assert load.failed == plan.device_blocks[copied:]
            arrived: set[int] = set()
            for copying in self.device.begun:
                if copying.what == "load" and copying.pairs[0][1] in plan.slots:
                    assert copying.over, "reported while a copy still writes to its blocks"
                    if copying not in self.failed_copies:
                        arrived.update(slot for _, slot in copying.pairs)
            assert set(plan.slots[:copied]) <= arrived, "reported blocks that never arrived"
            assert not self.stale.intersection(plan.slots[:copied]), (
                "reported what changed hands before it arrived"
            )
            assert copied <= self.ready[load.request]
        for message in self.line.sent:
            if isinstance(message, FenceDone) and message.fence in self.fences:
                late = self.fences.pop(message.fence) & self.storing()
                assert not late, "a fence was answered before its stores were over"

    @invariant()
    def the_window_holds(self) -> None:
        loading = sum(len(copying.pairs) for copying in self.under_way() if copying.what == "load")
        assert loading * self.device.slot_bytes <= WINDOW_BYTES + PIECE_BLOCKS * self.device.slot_bytes

    @invariant()
    def nothing_is_waited_for(self) -> None:
        assert self.line.closed or not any(copying.awaited.is_set() for copying in self.device.begun)

    @invariant()
    def no_block_is_copied_twice(self) -> None:
        slots = [slot for copying in self.device.begun for _, slot in copying.pairs]
        assert len(slots) == len(set(slots))

    def teardown(self) -> None:
        """All that was put is answered, whatever becomes of it."""
        self.device.at_once = True
        self.device.end_all()
        step(self.mover, 50)
        self.look()
        if not self.line.closed:
            self.line.hang_up()
            step(self.mover)
            self.look()
        assert not self.plans
        assert self.stored == self.reported_stores
        self.mover.stop()


TestMoverMachine = pytest.mark.swallows("^RuntimeError: device-side error$")(MoverMachine.TestCase)
TestMoverMachine.settings = settings(max_examples=scale_examples(60), stateful_step_count=40, deadline=None)
