"""The learning of the policy: features of runs, the hazard model over them, and when that is fitted."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvbm.policy.gittins.features import Position
from kvbm.policy.gittins.hazard import _WIDTH_S, BIN_COUNT, EDGES_S, HazardModel, bins_of
from kvbm.policy.gittins.learning import Fitting
from kvbm.policy.gittins.policy import Gittins, features
from kvbm.policy.gittins.runs import RunTree
from kvbm.sim.replay.replay import replay
from kvbm.sim.traces.synthetic import ChatShape, chats

# ---- features


def test_a_code_says_all_that_was_put_in() -> None:
    request = features.request_code(turn=3, output_tokens=300, new_blocks=7, blocks=40)
    code = request * features.RUN_CODES + features.run_code(uses=9, position=Position.OLD)
    uses_turn, place, output, new, length, left_behind = features.values_of(code)
    assert (uses_turn, place, output, new, length, left_behind) == (6 * 11 + 2, Position.OLD, 8, 3, 2, 0)
    assert features.position_of(code) == Position.OLD
    assert features.values_of(features.superseded(code)) == (uses_turn, place, output, new, length, 1)
    rough = features.values_of(features.plain(code))
    assert (rough[0] // 11, rough[1], rough[2]) == (6, Position.OLD, output)
    other = features.request_code(turn=9, output_tokens=300, new_blocks=1, blocks=900)
    same = other * features.RUN_CODES + features.run_code(uses=9, position=Position.OLD)
    assert features.plain(same) == features.plain(code)
    assert all(value < size for value, size in zip(features.values_of(code), features.SIZES, strict=True))


# ---- the model


def observed(
    model: HazardModel, kind: int, ages_s: list[float], unused_until_s: float = 0.0, unused: int = 0
) -> None:
    """Runs of a kind that were used again at these ages, and some that were not."""
    count = len(ages_s)
    model.used(np.full(count, kind), np.array(ages_s), np.ones(count, np.float32))
    model.left(np.full(unused, kind), np.full(unused, unused_until_s), np.ones(unused, np.float32))
    model.begin_fit()
    model.fit()


def test_the_index_is_the_best_ratio_of_all_horizons() -> None:
    model = HazardModel((2,), (0,))
    kind = model.add_kind((1,))
    choice = random.Random(5)
    observed(model, kind, [choice.lognormvariate(3.5, 1.0) for _ in range(400)], 2000.0, 200)
    hazard = np.minimum(model._base[0] * model._product[kind][_octave()], 0.98)
    for age_bin in range(BIN_COUNT):
        stays, time_s, best = 1.0, 0.0, 0.0
        for later in range(age_bin, BIN_COUNT):
            chance, width = hazard[later], _WIDTH_S[later]
            if later == age_bin:
                chance, width = 1 - (1 - chance) ** 0.5, width / 2
            time_s += stays * width * (1 - chance / 2)
            stays *= 1 - chance
            best = max(best, (1 - stays) / time_s)
        assert model.index_of(kind, age_bin) == pytest.approx(best, rel=1e-5)
    one_by_one = [model.index_of(kind, age_bin) for age_bin in range(BIN_COUNT)]
    model._index[:] = np.nan
    together = model.index(np.full(BIN_COUNT, kind), np.arange(BIN_COUNT))
    assert together == pytest.approx(one_by_one, rel=1e-5)


def _octave() -> np.ndarray:
    from kvbm.policy.gittins import hazard

    return hazard._OCTAVE


def test_what_comes_back_sooner_is_worth_more_and_what_never_does_less() -> None:
    model = HazardModel((3,), (0,))
    soon, late, never = (model.add_kind((value,)) for value in range(3))
    choice = random.Random(7)
    observed(model, soon, [choice.expovariate(1 / 20) for _ in range(300)])
    observed(model, late, [choice.expovariate(1 / 600) for _ in range(300)])
    observed(model, never, [], 3000.0, 300)
    at_birth = [model.index_of(kind, 0) for kind in (soon, late, never)]
    assert at_birth[0] > 3 * at_birth[1] > 9 * at_birth[2]
    assert model.index_of(soon, int(bins_of(np.array([900.0]))[0])) < at_birth[0], "long overdue"


def test_without_evidence_what_is_younger_is_worth_more() -> None:
    model = HazardModel((2,), ())
    kind = model.add_kind((0,))
    worth = [
        model.index_of(kind, int(age_bin))
        for age_bin in bins_of(np.array([8.0, 60.0, 300.0, 1800.0, 86400.0]))
    ]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > 100 * worth[-1] > 0.0


def test_ages_fall_into_bins() -> None:
    assert list(bins_of(np.array([0.0, 0.5, 1.0, 3.9, 4.0, 1e9]))) == [0, 0, 1, 2, 3, BIN_COUNT - 1]
    assert all(np.diff(EDGES_S) > 0)


def test_a_bin_holds_its_beginning_and_not_its_end() -> None:
    later, bins = EDGES_S[1:], np.arange(1, BIN_COUNT)
    assert list(bins_of(later)) == list(bins)
    assert list(bins_of(np.nextafter(later, np.inf))) == list(bins)
    assert list(bins_of(np.nextafter(later, 0.0))) == list(bins - 1)
    ages_s = np.random.default_rng(1).exponential(3000.0, 2000)
    assert list(bins_of(ages_s)) == list(np.searchsorted(EDGES_S, ages_s, side="right") - 1)


# ---- when it is fitted


def taught(
    runs_per_step: int, between: Callable[[Gittins, int], None] = lambda policy, step: None
) -> Gittins:
    """A policy that has seen some chats, and is then fitted in steps; `between` is called after each but the last."""
    trace = chats(ChatShape(conversations=60), seed=9)
    policy = Gittins(50)
    replay(trace, 50, policy)
    fitting = Fitting(policy.tree, policy.turns, policy.learner, runs_per_step)
    now_s, step = trace.requests[-1].arrived_s + 30.0, 0
    while not fitting.step(now_s):
        step += 1
        between(policy, step)
    assert step == (len(policy.tree.start) - 1) // runs_per_step
    policy.fitting = fitting
    return policy


def test_a_fit_in_many_steps_is_that_in_one() -> None:
    at_once, in_steps = taught(1 << 20), taught(7)
    model = at_once.learner.model
    kinds = np.repeat(np.arange(model.kind_count), BIN_COUNT)
    bins = np.tile(np.arange(BIN_COUNT), model.kind_count)
    assert in_steps.learner.model.index(kinds, bins) == pytest.approx(model.index(kinds, bins), rel=1e-4)


def test_what_becomes_known_during_a_fit_is_learnt_in_the_next() -> None:
    """New kinds, and events of them, while the runs are counted."""
    codes: list[int] = []

    def learn_more(policy: Gittins, step: int) -> None:
        learner = policy.learner
        kind = learner.kind(1_000_000 + step)
        learner.used.add(kind, 5.0, 1.0)
        tree = policy.tree
        tree.kind[next(run for run in reversed(range(len(tree.start))) if tree.weight[run])] = kind
        codes.append(kind)

    policy = taught(40, learn_more)
    model = policy.learner.model
    assert len(set(codes)) > 3
    assert not model._events[codes].any()
    policy.learner.begin_fit()
    model.fit()
    assert model._events[codes].any(axis=1).all()
    assert np.isfinite(model.index(np.array(codes), np.zeros(len(codes), np.int64))).all()


def test_the_next_fit_waits_for_requests_as_there_are_runs_to_count() -> None:
    policy = taught(1 << 20)
    fitting, turns = policy.fitting, policy.turns
    assert fitting._due_request == turns.latest + max(25, int(0.15 * turns.latest))
    for runs, requests in ((1000, 400), (128_000, 1000)):
        tree = policy.tree = RunTree(1)
        for _ in range(runs):
            tree._new_run()
        turns.latest = 1_000_000
        fitting = Fitting(tree, turns, policy.learner, 1 << 20)
        assert fitting.step(0.0)
        assert fitting._due_request == 1_000_000 + requests
        assert not fitting.step(0.0)
