"""The manager's machine over a tier that misbehaves, with sessions: prefetches and demotions amid everything else."""

from __future__ import annotations

from collections import Counter
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvbm.hints import ClientHint, read_hint
from kvbm.manager import prefetching
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.prefetching import Cause
from kvbm.slices import at_once
from kvbm.tiers.contract import RunTier
from model.manager_machine import CHAINS, DISK_SLOTS, LAYOUT, ManagerMachine, chains, pick, positions
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.property_tests import scale_examples

tenants = st.sampled_from(["", "one"])
names = st.sampled_from(["a", "b", None])


class SessionsMachine(ManagerMachine):
    """Clients name sessions, expect, demand and end; operators prefetch; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.medium = FakeMedium(LAYOUT, DISK_SLOTS)
        self.patches = [
            mock.patch.object(prefetching, "PREFETCHED_SHARE", 1.0),
            mock.patch.object(prefetching, "PIECE_BLOCKS", 2),
        ]
        for patch in self.patches:
            patch.start()

    def make_tier(self) -> RunTier | None:
        return FakeTier(self.medium, pending_limit=3)

    @rule(first=positions)
    def one_completes(self, first: int) -> None:
        self.fake.release(1, first)
        self.space.pump()

    @rule()
    def all_complete(self) -> None:
        for _ in range(4):
            self.fake.release()
            self.space.pump()

    @precondition(lambda self: self.calm)
    @rule(slot=st.integers(0, DISK_SLOTS - 1), byte=pick)
    def flip_a_bit(self, slot: int, byte: int) -> None:
        self.medium.corrupt(slot, byte)

    @rule(
        tenant=tenants,
        name=names,
        parent=names,
        chain=chains,
        length=positions,
        expect_s=st.sampled_from([None, 0.0, 3.0, 600.0]),
        flags=st.sets(st.sampled_from(["prefetch", "demote", "final"])),
        again=st.booleans(),
    )
    def a_client_says(
        self,
        tenant: str,
        name: str | None,
        parent: str | None,
        chain: int,
        length: int,
        expect_s: float | None,
        flags: set[str],
        again: bool,
    ) -> None:
        keys = CHAINS[chain][: length + 1]
        said = {"session": name, "parent": parent, "expect_s": expect_s, **dict.fromkeys(flags, True)}
        asker = ClientHint(tenant, *read_hint(said))
        reached = next(
            (n for n, key in enumerate(keys) if all(pool.find(key) is None for pool in self.space.pools)),
            len(keys),
        )
        decided = at_once(self.space.heard(asker, keys, reached, again))
        parts = [verdict.part for verdict in decided]
        assert len(parts) == len(set(parts)), "one verdict for each part"
        assert set(parts) <= {"session", "parent", "prefetch", "demote"}
        assert not (again and decided)

    @rule(chain=chains, length=positions)
    def a_request_ends(self, chain: int, length: int) -> None:
        keys = CHAINS[chain]
        self.space.finished(keys[min(length, len(keys) - 1)], 3)
        self.space.pump()

    @rule(chain=chains)
    def an_operator_prefetches(self, chain: int) -> None:
        brings = self.space.foresight.prefetching
        brings.begin(at_once(brings.needed(CHAINS[chain])), Cause.OPERATOR)

    @rule(seconds=st.sampled_from([0.6, 2.0, 20.0, 700.0]))
    def time_passes_for_sessions(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.space.pump()

    @invariant()
    def what_is_brought_up_is_accounted_for(self) -> None:
        if not hasattr(self, "space"):
            return
        brings, taken = self.space.foresight.prefetching, Counter[str]()
        coming = sum(job.left for job in brings._jobs)
        for job in brings._jobs:
            assert job.left >= 0
            if job.payer is not None:
                taken[job.payer] += job.left
        if (piece := brings._piece) is not None:
            coming += len(piece.keys)
            if piece.job.payer is not None:
                taken[piece.job.payer] += len(piece.keys)
        for key, entry in brings._unasked.items():
            assert self.space.host_pool.holds(key)
            if entry.payer is not None:
                taken[entry.payer] += 1
        assert brings.coming == coming <= brings.blocks_max
        assert brings._taken == +taken
        assert taken.total() <= brings.blocks_max

    @precondition(lambda self: self.calm)
    @rule()
    def break_down(self) -> None:
        self.calm_steps = 0
        self.fake.break_down()

    @rule()
    def mend(self) -> None:
        self.fake.mend()
        self.clock.advance(HEAL_S_MAX)
        self.space.pump()

    def _heal_everything(self) -> None:
        self.fake.mend()
        self.clock.advance(HEAL_S_MAX)

    def teardown(self) -> None:
        try:
            super().teardown()
            if hasattr(self, "space"):
                assert self.space.foresight.prefetching._piece is None
        finally:
            self.medium.close()
            for patch in self.patches:
                patch.stop()


SessionsMachine.TestCase.settings = settings(
    max_examples=scale_examples(150), stateful_step_count=60, deadline=None
)
TestSessions = SessionsMachine.TestCase
