"""The learning policy told what clients say: who goes, who stays, and who is believed."""

from __future__ import annotations

import random

import pytest

from kvbm.hints import Hint
from kvbm.policy.contract import ClientWord, tell_hint
from kvbm.policy.favours import Favours
from kvbm.policy.gittins.features import Said
from kvbm.policy.gittins.policy import Gittins
from kvbm.policy.gittins.words import UNIT_S
from kvbm.policy.lru import LeafFirstLru
from kvbm.sim.replay.replay import replay
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.said import Kind, Told, told
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace

BLOCKS = 4
SHAPE = ChatShape(conversations=400)


class Chats:
    """A tier in which conversations of `BLOCKS` blocks take their first turn, one a second."""

    def __init__(self, conversations: int) -> None:
        self.policy = Gittins(BLOCKS * conversations)
        self.tier = SimulatedTier(BLOCKS * conversations, self.policy)
        self.now_s = 0.0
        self.count = 0

    def turn(self, hint: Hint | None, late: bool = False) -> int:
        """One more conversation; its number."""
        blocks = self.blocks(self.count)
        self.count += 1
        hits = self.tier.requested(blocks, self.now_s)
        if hint is not None and not late:
            self.tier.hinted(blocks[-1], hint, self.now_s)
        self.tier.insert(blocks, hits, self.now_s)
        self.now_s += 1.0
        if hint is not None and late:
            self.tier.hinted(blocks[-1], hint, self.now_s)
        self.tier.finished(blocks[-1], 10, self.now_s)
        return self.count - 1

    def blocks(self, number: int) -> list[int]:
        return list(range(number * BLOCKS, (number + 1) * BLOCKS))

    def said(self, number: int) -> set[int]:
        """What the policy believes of the runs of a conversation that is resident."""
        slots = self.tier.find_all(self.blocks(number))
        tree = self.policy.tree
        kinds = {tree.kind[tree.run_of[slot]] for slot in slots if slot is not None}
        return {self.policy.learner.model.class_of[kind] for kind in kinds}


@pytest.mark.parametrize("late", [False, True])
def test_a_word_is_for_all_runs_of_the_request(late: bool) -> None:
    chat = Chats(3)
    assert chat.said(chat.turn(Hint(session="a", final=True), late)) == {Said.ENDS}
    assert chat.said(chat.turn(Hint(session="b", expect_s=50.0), late)) == {Said.RETURNS}
    assert chat.said(chat.turn(None)) == {Said.NOTHING}


def test_a_run_ages_in_units_of_what_was_said() -> None:
    chat = Chats(1)
    chat.turn(Hint(session="a", expect_s=50.0))
    slot = chat.tier.find_all(chat.blocks(0))[0]
    assert slot is not None
    tree = chat.policy.tree
    assert tree.scale[tree.run_of[slot]] == pytest.approx(UNIT_S / 50.0)


def test_a_word_does_not_outlive_the_next_turn() -> None:
    chat = Chats(1)
    chat.turn(Hint(session="a", final=True))
    chat.tier.requested(chat.blocks(0), chat.now_s)
    assert chat.said(0) == {Said.NOTHING}


def test_a_prefix_of_two_sessions_is_neither_ones() -> None:
    policy = Gittins(8)
    tier = SimulatedTier(8, policy)
    for last, session in ((2, "a"), (3, "b"), (2, "a")):
        blocks = [0, 1, last]
        tier.insert(blocks, tier.requested(blocks, 0.0), 0.0)
        tier.hinted(last, Hint(session=session, final=True), 0.0)
        tier.finished(last, 1, 0.0)
    tree, model = policy.tree, policy.learner.model
    said = [
        model.class_of[tree.kind[tree.run_of[slot]]]
        for slot in tier.find_all([0, 1, 2, 3])
        if slot is not None
    ]
    assert said == [Said.NOTHING, Said.NOTHING, Said.ENDS, Said.ENDS]


def test_policies_that_do_not_listen_are_told_nothing() -> None:
    word = ClientWord("c", "s", final=True)
    tell_hint(LeafFirstLru(4), 0, word, 0.0)
    inner = Gittins(4)
    inner.requested([7], [-1], 0.0)
    tell_hint(Favours(inner, 4, 0.5), 7, word, 0.0)
    assert inner.turns.said[1] == Said.ENDS


# ---- on a trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return chats(SHAPE)


def hits(trace: Trace, said: Told | None) -> float:
    size = trace.unique_blocks // 20
    return replay(trace, size, Gittins(size), told=said).hit_rate


@pytest.fixture(scope="module")
def alone(trace: Trace) -> float:
    return hits(trace, None)


@pytest.mark.parametrize("kind", [Kind.TRUE, Kind.LATE])
def test_true_hints_are_worth_a_lot(trace: Trace, alone: float, kind: Kind) -> None:
    assert hits(trace, told(trace, kind)) > alone + 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_random_hints_cost_at_most_a_point(trace: Trace, alone: float, seed: int) -> None:
    assert hits(trace, told(trace, Kind.RANDOM, seed)) > alone - 0.01


def test_sessions_alone_change_nothing(trace: Trace, alone: float) -> None:
    sessions = [Hint(session=hint.session) for hint in told(trace, Kind.TRUE).hints]
    assert hits(trace, Told(Kind.TRUE, sessions, at_end=False)) == pytest.approx(alone, abs=0.002)


def test_one_client_that_lies_does_not_spoil_the_hints_of_another(trace: Trace, alone: float) -> None:
    """Half of the conversations say what is true, half what is random: the first ones' client stays believed."""
    size = trace.unique_blocks // 20
    policy = Gittins(size)
    tier = SimulatedTier(size, policy)
    true, chance = told(trace, Kind.TRUE).hints, told(trace, Kind.RANDOM).hints
    honest = {hint.session: random.Random(hint.session).random() < 0.5 for hint in true}
    found = 0
    for number, request in enumerate(trace.requests):
        blocks, now_s, session = request.blocks, request.arrived_s, true[number].session
        reached = tier.requested(list(blocks), now_s)
        hint, client = (true[number], "honest") if honest[session] else (chance[number], "random")
        policy.hinted(blocks[-1], ClientWord(client, session or "", hint.final, hint.expect_s), now_s)
        tier.insert(blocks, reached, now_s)
        found += reached
    assert policy.words.belief.believes("honest")
    assert not policy.words.belief.believes("random")
    assert found / trace.accesses > alone
