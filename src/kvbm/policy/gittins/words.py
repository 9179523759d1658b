"""What clients said of the latest requests, and what that makes of the runs that these requests used.

A run whose conversation is expected back ages in units of what was expected: at `UNIT_S` of these "seconds" it is
due. So the hazard model learns for all such runs together how soon before or after that they are used (`hazard`), and
its index, times the same scale, is uses per second again. Nobody has to say by how much clients err, or how long an
overdue conversation deserves to be waited for.
"""

from __future__ import annotations

from zlib import crc32

from kvbm.policy.contract import ClientWord
from kvbm.policy.gittins import features
from kvbm.policy.gittins.belief import Belief
from kvbm.policy.gittins.features import Said
from kvbm.policy.gittins.learning import Learner
from kvbm.policy.gittins.runs import RunTree
from kvbm.policy.gittins.turns import Turns

UNIT_S = 64.0
_EXPECT_S_MIN = 1.0
_SHARED_BRANCHES = 4
NOBODY, SHARED = 0, -1
"""Owners of a run besides the sessions (`RunTree.owner`)."""
_TOOK_S, _TOOK_MOVES = 5.0, 0.05


class Words:
    """Writes what is said into `turns`, and into the runs of `tree` that it concerns."""

    def __init__(self, tree: RunTree, turns: Turns, learner: Learner) -> None:
        self._tree, self._turns, self._learner = tree, turns, learner
        self.belief = Belief()
        self._took_s = _TOOK_S
        """How long requests take, as a moving mean."""

    def told(self, at: int, word: ClientWord, now_s: float) -> list[int]:
        """Note what is said of the request at this index of the ring. Returns the runs that are worth something else
        now; of a request that arrived before, its word counts from its end on."""
        turns, number = self._turns, self._turns.number[at]
        session = f"{word.client}\0{word.session or number}"
        self._own(at, 1 + (crc32(session.encode(errors="surrogatepass")) >> 2))
        if not word.final and word.expect_s is None:
            return []
        self.belief.claimed(number, word.client, None if word.final else word.expect_s, now_s)
        if not self.belief.believes(word.client):
            turns.said[at] = Said.NOTHING
            return []
        turns.said[at] = Said.ENDS if word.final else Said.RETURNS
        turns.expect_s[at] = max(word.expect_s or 0.0, _EXPECT_S_MIN)
        if now_s > turns.arrived_s[at]:
            return []
        turns.early_scale[at] = UNIT_S / (turns.expect_s[at] + self._took_s)
        return [run for run in self._runs(at) if self._say(run, at)]

    def ended(self, at: int, now_s: float) -> None:
        """The request at this index has ended."""
        self._took_s += _TOOK_MOVES * (now_s - self._turns.arrived_s[at] - self._took_s)
        self.belief.ended(self._turns.number[at], now_s)

    def output(self, run: int, at: int) -> None:
        """The new run holds generated blocks of the request at this index."""
        self._tree.owner[run] = self._turns.session[at]
        self._say(run, at)

    def said_of(self, run: int, at: int) -> int:
        """What was said of the request, as far as it concerns this run: nothing where others use it too."""
        owner = self._tree.owner[run]
        return self._turns.said[at] if owner > NOBODY and owner == self._turns.session[at] else Said.NOTHING

    def scale(self, said: int, at: int) -> float:
        """How fast runs age after the request, of which this was said."""
        return UNIT_S / self._turns.expect_s[at] if said == Said.RETURNS else 1.0

    def early_age_s(self, run: int, now_s: float) -> float:
        """The run's age by its early kind, since its request arrived (`used_s` is when it finished, once it has)."""
        at = self._tree.turn[run] % self._turns.capacity
        age_s = now_s - self._turns.arrived_s[at]
        said = features.said_of(self._learner.codes[self._tree.early_kind[run]])
        return age_s * self._turns.early_scale[at] if said == Said.RETURNS else age_s

    def _say(self, run: int, at: int) -> bool:
        said, tree = self.said_of(run, at), self._tree
        if not said:
            return False
        tree.kind[run] = self._learner.kind(features.with_word(self._learner.codes[tree.kind[run]], said))
        tree.scale[run] = self._turns.early_scale[at] if said == Said.RETURNS else 1.0
        return True

    def _own(self, at: int, session: int) -> None:
        """The request's runs are its session's, unless another one uses them as well."""
        self._turns.session[at] = session
        tree = self._tree
        for run in self._runs(at):
            if tree.owner[run] == NOBODY and tree.branches[run] < _SHARED_BRANCHES:
                tree.owner[run] = session
            elif tree.owner[run] != session:
                tree.owner[run] = SHARED

    def _runs(self, at: int) -> list[int]:
        tree, number, run = self._tree, self._turns.number[at], self._turns.last_run[at]
        found = []
        while run >= 0 and tree.turn[run] == number:
            found.append(run)
            run = tree.parent[run]
        return found
