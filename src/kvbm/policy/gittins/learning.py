"""Kinds of runs by code, the observations since the model was fitted last, and the time of the next fit."""

from __future__ import annotations

from array import array

import numpy as np

from kvbm.policy.gittins import features
from kvbm.policy.gittins.hazard import Floats, HazardModel, Ints
from kvbm.policy.gittins.runs import RunTree
from kvbm.policy.gittins.turns import Turns

KINDS_MAX = 4096
_FIT_FIRST, _FIT_GROWTH, _FIT_REQUESTS_MAX = 25, 0.15, 400
_RUNS_PER_STEP = 1 << 15
_RUNS_PER_REQUEST = 128


class Observations:
    """Kinds, ages and weights that the model has not seen yet."""

    def __init__(self) -> None:
        self._kinds, self._ages_s, self._weights = array("i"), array("d"), array("f")

    def add(self, kind: int, age_s: float, weight: float) -> None:
        """Add an observation; a kind below 0 stands for none."""
        if kind >= 0:
            self._kinds.append(kind)
            self._ages_s.append(age_s)
            self._weights.append(weight)

    def take(self) -> tuple[Ints, Floats, Floats]:
        """Take all of them out, as arrays."""
        taken = (
            np.frombuffer(self._kinds, np.int32).astype(np.int64),
            np.frombuffer(self._ages_s),
            np.frombuffer(self._weights, np.float32),
        )
        self._kinds, self._ages_s, self._weights = array("i"), array("d"), array("f")
        return taken


class Learner:
    """The hazard model, asked by codes (`features`) and taught in batches.

    Past `kinds_max` kinds, runs of further codes count for rougher ones, of which there are at most as many as
    `features.plain` tells apart.
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._kinds_max = kinds_max
        self.model = HazardModel(features.SIZES, features.BY_AGE, len(features.Said))
        self.used, self.left, self.joined = Observations(), Observations(), Observations()
        self.codes = array("q")
        self._kinds: dict[int, int] = {}

    def kind(self, code: int) -> int:
        """The kind of runs with this code."""
        kind = self._kinds.get(code)
        return self._new_kind(code) if kind is None else kind

    def begin_fit(self) -> None:
        """Give the model all observations. The fit also needs the runs that wait to be used (`HazardModel.waiting`)."""
        self.model.used(*self.used.take())
        self.model.left(*self.left.take())
        self.model.joined(*self.joined.take())
        self.model.begin_fit()

    def _new_kind(self, code: int) -> int:
        if len(self.codes) >= self._kinds_max:
            code = features.plain(code)
            kind = self._kinds.get(code)
            if kind is not None:
                return kind
        kind = self._kinds[code] = self.model.add_kind(features.values_of(code), features.said_of(code))
        self.codes.append(code)
        return kind


class Fitting:
    """Fits the model of `learner` now and then to the runs of `tree`, in steps, one with each request.

    A step counts the runs that wait to be used, up to `runs_per_step`, and the last one fits: no request pays for
    more than some milliseconds. A run that changes during a long count is counted as it was or as it becomes.
    """

    def __init__(
        self, tree: RunTree, turns: Turns, learner: Learner, runs_per_step: int = _RUNS_PER_STEP
    ) -> None:
        self._tree = tree
        self._turns = turns
        self._learner = learner
        self._runs_per_step = runs_per_step
        self._due_request = _FIT_FIRST
        self._counted = 0

    def step(self, now_s: float) -> bool:
        """Go on with a fit that is due; True when the model has changed."""
        if self._turns.latest < self._due_request:
            return False
        if not self._counted:
            self._learner.begin_fit()
        end = self._counted + self._runs_per_step
        self._count(slice(self._counted, end), now_s)
        if end < len(self._tree.start):
            self._counted = end
            return False
        self._learner.model.fit()
        self._counted = 0
        latest, runs = self._turns.latest, len(self._tree.start)
        # The more is known, the less one request changes; and counting many runs has to pay.
        requests = min(max(_FIT_REQUESTS_MAX, runs // _RUNS_PER_REQUEST), int(latest * _FIT_GROWTH))
        self._due_request = latest + max(_FIT_FIRST, requests)
        return True

    def _count(self, runs: slice, now_s: float) -> None:
        """Count the waiting ones of these runs: under their present kind, and under the kind they had at first."""
        tree = self._tree
        weights = np.frombuffer(tree.weight, np.float32)[runs]
        waiting = np.flatnonzero(weights)
        weights = weights[waiting]
        kinds = np.frombuffer(tree.kind, np.int32)[runs][waiting].astype(np.int64)
        ages_s = now_s - np.frombuffer(tree.used_s)[runs][waiting]
        ages_s *= np.frombuffer(tree.scale, np.float32)[runs][waiting]
        early_kinds = np.frombuffer(tree.early_kind, np.int32)[runs][waiting].astype(np.int64)
        early = np.flatnonzero(early_kinds >= 0)
        at = np.frombuffer(tree.turn, np.int32)[runs][waiting[early]] % self._turns.capacity
        early_ages_s = now_s - np.frombuffer(self._turns.arrived_s)[at]
        model = self._learner.model
        expected = model.class_of[early_kinds[early]] == features.Said.RETURNS
        early_ages_s[expected] *= np.frombuffer(self._turns.early_scale)[at[expected]]
        model.waiting(kinds, ages_s, weights)
        model.waiting(early_kinds[early], early_ages_s, weights[early])
