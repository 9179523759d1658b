"""How likely a run is to be used next, by its age and its features: learned online, from nothing.

Time since the last use is cut into bins, four to the octave from 4 s to 68 min and two beyond. For every *kind* of
run (a combination of feature values, see `features`) two sums are kept per bin: how much was there at the bin's
start (exposure), and how much of that was used again within it (events). The hazard of kind k in bin b is modelled as

    base[said in k, b] · Π_f factor_f[value of f in k] · Π_f factor_f[value, octave of b] · rest[k, octave of b]

Every factor is (events + κ) / (expected events without it + κ): 1 until there is evidence. The factors are fitted
in turn (backfitting of a Poisson model with gamma priors), a pass or two each time, starting from the last fit. What a
client said of a run (`features.Said`) divides the kinds into classes, whose ages may be in different units. Classes
share no factor: the feature values of one are none of another.

The worth of a run is its Gittins index: the best ratio, over all horizons τ, of the probability that it is used
within τ to the time that it is expected to stay until then (J. C. Gittins, "Bandit processes and dynamic
allocation indices", 1979). Keeping the blocks with the highest index hits most per block and second.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

EDGES_S = np.array(
    [0.0, 1.0, 2.0, *(2 ** (k / 4) for k in range(8, 48)), *(2 ** (k / 2) for k in range(24, 35))]
)
"""Where the age bins begin, in seconds; the last has no end."""
BIN_COUNT = len(EDGES_S)
_WIDTH_S = np.diff(np.append(EDGES_S, 2 * EDGES_S[-1]))
_HALF_WIDTH_S = _WIDTH_S / 2
_OCTAVE = np.unique(np.log2(np.maximum(EDGES_S, 1)).astype(int).clip(max=13), return_inverse=True)[1]
# The leading 16 bits of a float say its octave and the 16th of that it lies in, where one bin ends at most.
_FIRST_BIN = np.searchsorted(EDGES_S, (np.arange(1 << 15) << 48).view(np.float64), side="right") - 1
_ENDS_S = np.append(EDGES_S[1:], np.inf)
_OCTAVES = int(_OCTAVE[-1]) + 1
_OCTAVE_BINS = [slice(*np.searchsorted(_OCTAVE, (octave, octave + 1))) for octave in range(_OCTAVES)]

PRIOR_HAZARD = 0.01
_KAPPA_BASE = 3.0
_KAPPA = 3.0
_KAPPA_OCTAVE = 50.0
_KAPPA_REST = 50.0
_HAZARD_MAX = 0.98
_PASSES = 1


class HazardModel:
    """Exposure and events by kind and age bin, the fit, and the indices that follow from it.

    `sizes[f]` is the number of values of feature f, `by_age` the features whose factor differs by age too, `classes`
    the number of classes. Kinds are rows, added by `add_kind`. A fit is `begin_fit`, then `waiting` for all runs that
    wait to be used, in any number of calls, then `fit`. Memory: 440 bytes a kind for the sums, 300 for the indices, and
    220 during a fit.
    """

    def __init__(self, sizes: Sequence[int], by_age: Sequence[int], classes: int = 1) -> None:
        self._base = np.full((classes, BIN_COUNT), PRIOR_HAZARD)
        self.class_of: Ints = np.zeros(0, np.int64)
        self._factor = [np.ones(size) for size in sizes]
        self._factor_by_age = {f: np.ones((_OCTAVES, sizes[f])) for f in by_age}
        self._values = np.zeros((0, len(sizes)), np.int16)
        self._events: Floats = np.zeros((0, BIN_COUNT), np.float32)
        self._left: Floats = np.zeros((0, BIN_COUNT + 1), np.float32)
        self._index: Floats = np.zeros((0, BIN_COUNT), np.float32)
        self._product: Floats = np.ones((0, _OCTAVES), np.float32)
        # By bin and kind, for the fit that has begun: how much left there, so far.
        self._leaving: Floats = np.zeros((BIN_COUNT + 1, 0), np.float32)
        self.kind_count = 0

    def add_kind(self, values: Sequence[int], of_class: int = 0) -> int:
        """A new kind of this class with these feature values; its row."""
        kind = self.kind_count
        if kind == len(self._values):
            room = max(256, kind)
            self._values = np.vstack([self._values, np.zeros((room, self._values.shape[1]), np.int16)])
            self._events = np.vstack([self._events, np.zeros((room, BIN_COUNT), np.float32)])
            self._left = np.vstack([self._left, np.zeros((room, BIN_COUNT + 1), np.float32)])
            self._index = np.vstack([self._index, np.full((room, BIN_COUNT), np.nan, np.float32)])
            self._product = np.vstack([self._product, np.ones((room, _OCTAVES), np.float32)])
            self.class_of = np.append(self.class_of, np.zeros(room, np.int64))
        self._values[kind], self.class_of[kind] = values, of_class
        product = np.ones(_OCTAVES)
        for feature, value in enumerate(values):
            product *= self._factor[feature][value]
            if feature in self._factor_by_age:
                product *= self._factor_by_age[feature][:, value]
        self._product[kind] = product
        self.kind_count = kind + 1
        return kind

    # ---- observations

    def used(self, kinds: Ints, ages_s: Floats, weights: Floats) -> None:
        """Runs of these kinds were used again at these ages."""
        bins = bins_of(ages_s)
        np.add.at(self._events, (kinds, bins), weights)
        np.add.at(self._left, (kinds, bins + 1), weights)

    def left(self, kinds: Ints, ages_s: Floats, weights: Floats) -> None:
        """Runs of these kinds were not used up to these ages, and are not observed any longer."""
        np.add.at(self._left, (kinds, bins_of(ages_s)), weights)

    def joined(self, kinds: Ints, ages_s: Floats, weights: Floats) -> None:
        """Runs became of these kinds at these ages."""
        np.add.at(self._left, (kinds, bins_of(ages_s)), -weights)

    # ---- fit

    def begin_fit(self) -> None:
        """Begin to learn from everything observed so far; `waiting` and `fit` follow."""
        self._leaving = np.ascontiguousarray(self._left[: self.kind_count].T)

    def waiting(self, kinds: Ints, ages_s: Floats, weights: Floats) -> None:
        """Runs of these kinds have waited so long to be used again. Kinds added since `begin_fit` are left out."""
        known = kinds < self._leaving.shape[1]
        np.add.at(self._leaving, (bins_of(ages_s[known]), kinds[known]), weights[known])

    def fit(self) -> None:
        """Fit the factors. All sums are kept by bin (or octave) and kind, so that a step is one over all kinds."""
        leaving, self._leaving = self._leaving, self._leaving[:, :0]
        # Runs that left in bin b were there at the start of every bin before b.
        for later in range(BIN_COUNT, 0, -1):
            leaving[later - 1] += leaving[later]
        exposure = np.maximum(leaving[1:], 0)
        count = exposure.shape[1]
        events = np.ascontiguousarray(self._events[:count].T)
        events_octave = _by_octave(events)
        values = self._values[:count].T.astype(np.int64)
        class_of = self.class_of[:count]
        product = self._factors(values)
        for _ in range(_PASSES):
            expected = exposure * product[_OCTAVE]
            bases = []
            for each in range(len(self._base)):
                of = class_of == each
                whole = bool(of.all())  # no copy where there is only one
                seen, there = (events, expected) if whole else (events[:, of], expected[:, of])
                base = (seen.sum(axis=1) + _KAPPA_BASE) / (there.sum(axis=1) + _KAPPA_BASE / PRIOR_HAZARD)
                bases.append(base)
                if whole:
                    expected *= base.astype(np.float32)[:, None]
                else:
                    expected[:, of] = there * base.astype(np.float32)[:, None]
            self._base = np.stack(bases)
            expected_octave = _by_octave(expected)
            self._fit_factors(values, expected_octave, events_octave)
            product = self._factors(values)
        rest = (events_octave + _KAPPA_REST) / (expected_octave + _KAPPA_REST)
        self._product[:count] = (product * rest).T
        self._index[:] = np.nan

    def _fit_factors(self, values: Ints, expected: Floats, events: Floats) -> None:
        """One pass over all factors; `expected` and `events` per octave and kind, `expected` is kept up to date."""
        by_kind = events.sum(axis=0)
        for feature, factor in enumerate(self._factor):
            of = values[feature]
            there = np.bincount(of, expected.sum(axis=0), len(factor))
            new = (np.bincount(of, by_kind, len(factor)) + _KAPPA) / (there / factor + _KAPPA)
            expected *= (new / factor).astype(np.float32).take(of)
            self._factor[feature] = new
        octaves = np.arange(_OCTAVES)[:, None]
        for feature, factor in self._factor_by_age.items():
            of = values[feature]
            cells = (of + octaves * factor.shape[1]).ravel()
            there = np.bincount(cells, expected.ravel(), factor.size).reshape(factor.shape)
            seen = np.bincount(cells, events.ravel(), factor.size).reshape(factor.shape)
            new = (seen + _KAPPA_OCTAVE) / (there / factor + _KAPPA_OCTAVE)
            expected *= (new / factor).astype(np.float32).take(of, axis=1)
            self._factor_by_age[feature] = new

    def _factors(self, values: Ints) -> Floats:
        """The product of all factors, per octave and kind."""
        alone = np.ones(values.shape[1])
        for feature, factor in enumerate(self._factor):
            alone *= factor.take(values[feature])
        product = np.repeat(alone[None, :], _OCTAVES, axis=0)
        for feature, factor in self._factor_by_age.items():
            product *= factor.take(values[feature], axis=1)
        return product.astype(np.float32)

    # ---- worth

    def index(self, kinds: Ints, bins: Ints) -> Floats:
        """The Gittins index of runs of these kinds in these age bins: uses per second of keeping one block."""
        found = self._index[kinds, bins]
        unknown = np.isnan(found)
        if unknown.any():
            # `np.unique` would import modules at its first call: 9 ms in which a full tier makes room.
            cells = np.array(sorted({*(kinds[unknown] * BIN_COUNT + bins[unknown]).tolist()}))
            self._compute(cells // BIN_COUNT, cells % BIN_COUNT)
            found = self._index[kinds, bins]
        return found

    def index_of(self, kind: int, age_bin: int) -> float:
        """`index` of one."""
        found = self._index.item(kind, age_bin)
        return found if found == found else self._compute_one(kind, age_bin)

    def _compute_one(self, kind: int, age_bin: int) -> float:
        """`_compute` for one pair, without the arrays."""
        hazard = self._base[self.class_of.item(kind), age_bin:] * self._product[kind].take(_OCTAVE[age_bin:])
        np.minimum(hazard, _HAZARD_MAX, out=hazard)
        width = _HALF_WIDTH_S[age_bin:].copy()
        hazard[0] = 1 - sqrt(1 - hazard[0])
        width[0] /= 2
        stays = np.multiply.accumulate(1 - hazard)
        width[1:] *= stays[:-1] + stays[1:]
        width[0] *= 1 + stays[0]
        worth = float(((1 - stays) / np.add.accumulate(width)).max())
        self._index[kind, age_bin] = worth
        return worth

    def _compute(self, kinds: Ints, bins: Ints) -> None:
        hazard = np.minimum(self._base[self.class_of[kinds]] * self._product[kinds][:, _OCTAVE], _HAZARD_MAX)
        columns = np.arange(BIN_COUNT)
        hazard[columns < bins[:, None]] = 0
        rows = np.arange(len(kinds))
        # A run is on average in the middle of the bin it is in: half of the hazard and of the width are left.
        here = hazard[rows, bins]
        hazard[rows, bins] = 1 - np.sqrt(1 - here)
        stays = np.cumprod(1 - hazard, axis=1)
        before = np.hstack([np.ones((len(kinds), 1)), stays[:, :-1]])
        width = np.where(columns < bins[:, None], 0.0, _WIDTH_S)
        width[rows, bins] /= 2
        time_s = np.cumsum(width * (before + stays) / 2, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(time_s > 0, (1 - stays) / time_s, 0.0)
        self._index[kinds, bins] = ratio.max(axis=1)


def _by_octave(by_bin: Floats) -> Floats:
    """Sums over the bins of each octave."""
    return np.stack([by_bin[bins].sum(axis=0) for bins in _OCTAVE_BINS])


def bins_of(ages_s: Floats) -> Ints:
    """The age bin of each age in seconds, none of which is below 0."""
    bins = _FIRST_BIN.take(ages_s.view(np.int64) >> 48)
    bins += ages_s >= _ENDS_S.take(bins)
    return bins
