"""Kinds of runs by code, and what was observed of them since the model was fitted last."""

from __future__ import annotations

from array import array

import numpy as np

from kvbm.policy import features
from kvbm.policy.hazard import Floats, HazardModel, Ints

KINDS_MAX = 4096


class Observations:
    """Kinds, ages and weights that the model has not seen yet."""

    def __init__(self) -> None:
        self._kinds, self._ages_s, self._weights = array("i"), array("d"), array("f")

    def add(self, kind: int, age_s: float, weight: float) -> None:
        """One more; a kind below 0 stands for none."""
        if kind >= 0:
            self._kinds.append(kind)
            self._ages_s.append(age_s)
            self._weights.append(weight)

    def take(self) -> tuple[Ints, Floats, Floats]:
        """All of them, as arrays; none are left."""
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
        self.model = HazardModel(features.SIZES, features.BY_AGE)
        self.used, self.left, self.joined = Observations(), Observations(), Observations()
        self.codes = array("q")
        self._kinds: dict[int, int] = {}

    def kind(self, code: int) -> int:
        """The kind of runs with this code."""
        kind = self._kinds.get(code)
        return self._new_kind(code) if kind is None else kind

    def fit(self, kinds: Ints, ages_s: Floats, weights: Floats) -> None:
        """Fit the model to all that was observed; the arguments are the runs that wait to be used now."""
        self.model.used(*self.used.take())
        self.model.left(*self.left.take())
        self.model.joined(*self.joined.take())
        self.model.fit(kinds, ages_s, weights)

    def _new_kind(self, code: int) -> int:
        if len(self.codes) >= self._kinds_max:
            code = features.plain(code)
            kind = self._kinds.get(code)
            if kind is not None:
                return kind
        kind = self._kinds[code] = self.model.add_kind(features.values_of(code))
        self.codes.append(code)
        return kind
