"""Is loading faster than recomputing, and down to which block? The answer comes from this engine's measurements.

Computing a token takes longer the more tokens lie before it: seconds = a · tokens + b · tokens · position is fitted to
the engine's steps. Loading is expected to take as long as recent loads did, per block and tier. The first blocks of a
run are loaded and the rest is computed; the cut lies where both together take least. While one of the two costs is
unknown, everything is loaded: so it becomes known. A decision against loading is tried again now and then. But blocks
that the manager expects later than computing them ends are never loaded: before the first prefill was measured, later
than computing takes at `WORST_TOKENS_PER_S`.

Other threads disturb measurements: a thread that waited for a processor makes a load look a hundred times as slow.
So no single measurement decides against loading.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from statistics import median_low

from kvbm.block import Tier

WORST_TOKENS_PER_S = 1000.0
"""How fast an engine computes a prompt at worst, until its own steps were measured; slower than most do."""
_WEIGHT = 0.2
_PREFILL_TOKENS_MIN = 64
_POSITION_SPREAD_MIN = 64.0
_RECHECK_EVERY = 16
_LEAST_SHARE = 0.1
_LOADS_KEPT = 5
_LOADS_MIN = 3


class PrefillFit:
    """Seconds of prefill by position: a token at position p takes a + b · p. b is never below zero, and a never below
    a tenth of the mean time of a token.

    Least squares over the latest steps, weighted by their tokens. Without weights b would come out too large: every
    step has a fixed cost, and the steps that follow a hit are short and deep. Each new step lowers the weight of
    earlier ones by a fifth. While all steps lie equally deep they say nothing about b, and its last value holds.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._position = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._slope = 0.0

    def add(self, tokens: int, seconds: float, position: float) -> None:
        """One step computed so many tokens, whose mean position this was."""
        self._tokens = (1.0 - _WEIGHT) * self._tokens + tokens
        weight = tokens / self._tokens
        further, slower = position - self._position, seconds / tokens - self._seconds
        self._position += weight * further
        self._seconds += weight * slower
        self._variance = (1.0 - weight) * (self._variance + weight * further * further)
        self._covariance = (1.0 - weight) * (self._covariance + weight * further * slower)
        if self._variance >= _POSITION_SPREAD_MIN**2:
            self._slope = max(0.0, self._covariance / self._variance)

    def span_s(self, start: int, end: int) -> float | None:
        """Expected seconds to compute the tokens from position `start` up to `end`; None before the first step."""
        if not self._tokens:
            return None
        a, b = self._seconds - self._slope * self._position, self._slope
        least = _LEAST_SHARE * self._seconds
        if a < least:
            # Steps of an engine that was busy with other work can give a line on which early tokens cost nothing.
            a, b = least, (self._seconds - least) / self._position
        return (end - start) * (a + b * (start + end) / 2.0)


class CostModel:
    """The costs that one engine measured. `block_tokens` is the number of tokens per block; with `always`, every
    block is worth loading (for tests and measurements)."""

    def __init__(self, block_tokens: int, always: bool = False) -> None:
        self.block_tokens = block_tokens
        self._always = always
        self._prefill = PrefillFit()
        # Seconds per block of each tier's latest loads.
        self._loads: defaultdict[int, deque[float]] = defaultdict(partial(deque, maxlen=_LOADS_KEPT))
        self._declined_count = 0

    def prefilled(self, tokens: int, seconds: float, position: float = 0.0) -> None:
        """A step computed `tokens` prompt tokens in `seconds`; `position` is their mean position. Steps that are too
        small for a measurement are left out."""
        if tokens >= _PREFILL_TOKENS_MIN and seconds > 0.0 and position >= 0.0:
            self._prefill.add(tokens, seconds, position)

    def loaded(self, sources: bytes, seconds: float) -> None:
        """A load of blocks that were found in `sources` (one tier each) took `seconds` from plan to device."""
        if not sources or seconds <= 0.0:
            return
        # Blocks of the other tiers are given their usual time; the rest of the time belongs to the deepest tier.
        deepest = max(sources)
        others = sources.replace(bytes((deepest,)), b"")
        explained_s = sum((self._per_block_s(tier) or 0.0) * others.count(tier) for tier in set(others))
        rest_s = max(0.0, seconds - explained_s)
        self._loads[deepest].append(rest_s / (len(sources) - len(others)))

    def load_s(self, sources: bytes) -> float | None:
        """Expected seconds to load these blocks, or None while a tier has too few measurements to decide by."""
        total_s = 0.0
        for tier in set(sources):
            per_block = self._per_block_s(tier)
            if per_block is None or len(self._loads[tier]) < _LOADS_MIN:
                return None
            total_s += per_block * sources.count(tier)
        return total_s

    def prefill_s(self, blocks: int, first: int = 0) -> float | None:
        """Expected seconds to compute this many blocks after the prompt's first `first`; None while it is unknown."""
        tokens = self.block_tokens
        return self._prefill.span_s(first * tokens, (first + blocks) * tokens)

    def prefill_s_at_most(self, blocks: int, first: int = 0) -> float:
        """The same; while it is unknown, seconds on a slow engine."""
        expected_s = self.prefill_s(blocks, first)
        return blocks * self.block_tokens / WORST_TOKENS_PER_S if expected_s is None else expected_s

    def worth_loading(self, sources: bytes, first: int = 0, arrival_s: float = 0.0) -> int:
        """How many leading blocks of a run to load; the run begins after the prompt's first `first` blocks. The rest
        is computed sooner than loaded. Of cuts that take equally long the deepest is taken: it spares the engine.

        The manager expects the blocks that are below host memory there in `arrival_s` seconds. That is known also
        before any load was measured, and counts where it is longer than loads took so far.
        """
        measured = self.prefill_s(1) is not None
        if self._always or (not arrival_s and (not measured or self.load_s(sources) is None)):
            return len(sources)
        # Inside a run of one tier every block takes equally long to load, and each takes longer to compute than the
        # one before it. So the best cut is at one of the run's ends.
        found, depth, load_s = len(sources), 0, 0.0
        per_block_s = {tier: (self._per_block_s(tier) or 0.0) if measured else 0.0 for tier in set(sources)}
        if below := len(sources) - sources.count(Tier.HOST):
            for tier in per_block_s.keys() - {Tier.HOST}:
                per_block_s[tier] = max(per_block_s[tier], arrival_s / below)
        best, best_s = 0, self.prefill_s_at_most(found, first)
        worst_s = best_s
        for tier, blocks in _runs(sources):
            depth += blocks
            load_s += per_block_s[tier] * blocks
            seconds = load_s + self.prefill_s_at_most(found - depth, first + depth)
            if seconds <= best_s:
                best, best_s = depth, seconds
        if best < found and arrival_s <= worst_s and self._is_tried_again():
            return found
        return best

    def worth_loading_all(self, sources: bytes, first: int, blocks: int, arrival_s: float = 0.0) -> bool:
        """Whether to load a run that is of use as a whole only (several groups): it stands for `blocks` blocks of the
        prompt after its first `first`. Otherwise as `worth_loading`."""
        if self._always:
            return True
        compute_s, load_s = self.prefill_s_at_most(blocks, first), self.load_s(sources)
        if arrival_s > compute_s:
            return False
        measured = self.prefill_s(1) is not None
        return not measured or load_s is None or load_s <= compute_s or self._is_tried_again()

    def _is_tried_again(self) -> bool:
        """Whether loading is tried although it was measured to be slower."""
        self._declined_count += 1
        return self._declined_count % _RECHECK_EVERY == 0

    def _per_block_s(self, tier: int) -> float | None:
        """Seconds to load one block: the median of the latest loads, or the very latest where that was faster.

        So it takes several slow ones to say no, and one fast one to say yes again.
        """
        loads = self._loads.get(tier)
        return min(median_low(loads), loads[-1]) if loads else None


def _runs(sources: bytes) -> Iterator[tuple[int, int]]:
    """The tiers in order, each with its number of consecutive blocks."""
    while sources:
        rest = sources.lstrip(sources[:1])
        yield sources[0], len(sources) - len(rest)
        sources = rest
