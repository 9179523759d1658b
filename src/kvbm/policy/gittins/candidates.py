"""The leaves that may go next: a heap by worth, filled by rating all leaves now and then.

Between two ratings the worth of a leaf changes with its age, mostly downwards. A candidate is rated anew when its
turn comes; others may have fallen below it meanwhile, which is accepted for `_RATING_S` seconds.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Container, Iterable
from math import inf

import numpy as np

from kvbm.policy.gittins.duel import Duel
from kvbm.policy.gittins.hazard import EDGES_S, HazardModel, bins_of
from kvbm.policy.gittins.runs import NO_RUN, RunTree

_EDGES = EDGES_S.tolist()
_COUNT_MIN, _SHARE = 64, 50
_RATING_S = 1.0
_LEAVES_PER_REQUEST = 300
_HELD = 1e6
"""More than any index: the hazard of the shortest bin is below 4 a second, and hints scale it by 64 at most."""


class Candidates:
    """The leaves of `tree` by their worth in `model`. The owner keeps `now_s` and `request_number` up to date.

    Leaves that are not among the candidates were worth more than `_ceiling` when all were rated. A `_ceiling` below 0
    means that all leaves have to be rated first.
    """

    def __init__(self, tree: RunTree, model: HazardModel, duel: Duel) -> None:
        self.now_s = 0.0
        self.request_number = 0
        self._tree = tree
        self._model = model
        self._duel = duel
        self._heap: list[tuple[float, float, int]] = []
        self._heap_max = 0
        self._ceiling = -1.0
        self._due_request, self._due_s = 0, 0.0
        self._passed_over = False
        # The last slots of leaves that could not go: such a leaf is not rated until it may.
        self._in_use: set[int] = set()

    @property
    def passed_over(self) -> bool:
        """Leaves that could not go were dropped from the candidates; they have to be offered again."""
        return self._passed_over

    def may_go(self, slots: Iterable[int]) -> None:
        """No lease and no filling keeps these slots any more."""
        self._in_use.difference_update(slots)

    def worth(self, run: int) -> float:
        """The run's index now. What is held goes after all else, and in LRU's order."""
        tree = self._tree
        if self._duel.holds and tree.turn[run] >= self._duel.cutoff:
            return _HELD + tree.turn[run]
        scale = tree.scale[run]
        age = bisect_right(_EDGES, (self.now_s - tree.used_s[run]) * scale) - 1
        return self._model.index_of(tree.kind[run], age) * scale

    def newcomers(self, names: array[int]) -> list[tuple[float, int]]:
        """(worth, blocks) of the runs that these blocks would be, in the order of the chain."""
        tree = self._tree
        found: list[tuple[float, int]] = []
        position, end = 0, len(names)
        while position < end:
            run = tree.first.get(names[position], NO_RUN)
            if run >= 0:
                length = min(tree.length[run], end - position)
                found.append((self.worth(run), length))
                position += length
            else:  # no request asked for it: it is worth as much as the run that it continues
                position += 1
                if found:
                    found[-1] = (found[-1][0], found[-1][1] + 1)
        return found

    def offer(self, run: int) -> None:
        """The run may go if it is a leaf."""
        if self._ceiling < 0:
            return  # all leaves are rated before the next answer anyway
        if len(self._heap) > self._heap_max:
            self.expire()
            return
        tree = self._tree
        if run >= 0 and tree.resident[run] and not tree.resident_children[run]:
            heapq.heappush(self._heap, (self.worth(run), tree.used_s[run], run))

    def expire(self) -> None:
        """Rate all leaves again before the next answer: the model has changed."""
        self._heap, self._ceiling = [], -1.0

    def is_affordable(self) -> bool:
        """Whether to `expire` costs little for the requests since the last time: that grows with the leaves."""
        return self.request_number >= self._due_request

    def expire_if_due(self) -> None:
        """`expire` once a second, and less often where that is not affordable."""
        if self.is_affordable() and self.now_s >= self._due_s:
            self.expire()

    def least(self, leased: Container[int], filling: Container[int]) -> tuple[float, int]:
        """The least worth of any leaf, and that leaf, which is no candidate any more; NO_RUN when no leaf may go."""
        tree, heap = self._tree, self._heap
        wanted = 0
        while True:
            if not heap or heap[0][0] > self._ceiling:
                if not heap and wanted and self._ceiling == inf:
                    return 0.0, NO_RUN
                wanted = max(_COUNT_MIN, 2 * wanted)
                self._rate_all(wanted)
                heap = self._heap
                if not heap:
                    return 0.0, NO_RUN
            run = heapq.heappop(heap)[2]
            if not tree.resident[run] or tree.resident_children[run]:
                continue
            tail = tree.tail_slot(run)
            if tail in leased or tail in filling:
                self._passed_over = True
                self._in_use.add(tail)
                continue
            worth = self.worth(run)
            if worth > self._ceiling or (heap and worth > heap[0][0]):
                heapq.heappush(heap, (worth, tree.used_s[run], run))
                continue
            return worth, run

    def _rate_all(self, wanted: int) -> None:
        """Rate every leaf now, and keep those that are worth least: `wanted`, or a share of many."""
        tree = self._tree
        resident = np.frombuffer(tree.resident, np.int32)
        leaf = (resident > 0) & (np.frombuffer(tree.resident_children, np.int32) == 0)
        for slot in self._in_use:
            run = tree.run_of[slot]
            if run >= 0 and tree.resident[run] and tree.tail_slot(run) == slot:
                leaf[run] = False
        leaves = np.flatnonzero(leaf)
        used_s = np.frombuffer(tree.used_s)[leaves]
        kinds = np.frombuffer(tree.kind, np.int32)[leaves].astype(np.int64)
        scale = np.frombuffer(tree.scale, np.float32)[leaves]
        worth = self._model.index(kinds, bins_of((self.now_s - used_s) * scale)) * scale
        if self._duel.holds:
            turn = np.frombuffer(tree.turn, np.int32)[leaves]
            worth = np.where(turn >= self._duel.cutoff, _HELD + turn, worth)
        self._due_request = self.request_number + 1 + len(leaves) // _LEAVES_PER_REQUEST
        self._due_s = self.now_s + _RATING_S
        self._heap_max = 2 * len(leaves) + _COUNT_MIN
        self._ceiling = inf
        wanted = max(wanted, len(leaves) // _SHARE)
        if wanted < len(leaves):
            least = np.argpartition(worth, wanted)[: wanted + 1]
            self._ceiling = float(worth[least].max())
            leaves, used_s, worth = leaves[least], used_s[least], worth[least]
        self._heap = list(zip(worth.tolist(), used_s.tolist(), leaves.tolist(), strict=True))
        heapq.heapify(self._heap)
