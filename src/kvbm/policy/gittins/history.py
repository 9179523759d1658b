"""What is known of blocks that left the tier, and how much of it is kept."""

from __future__ import annotations

from kvbm.policy.gittins.duel import Duel
from kvbm.policy.gittins.learning import Learner
from kvbm.policy.gittins.runs import RunTree


class History:
    """The runs of `tree` without resident blocks: at most `runs_max`, of `blocks_max` blocks."""

    def __init__(self, tree: RunTree, learner: Learner, duel: Duel, runs_max: int, blocks_max: int) -> None:
        self._tree, self._learner, self._duel = tree, learner, duel
        self._runs_max, self._blocks_max = runs_max, blocks_max

    def shorten(self, now_s: float) -> None:
        """If there is too much, drop the oldest, a tenth of the bound."""
        if not self._surplus(1.0):
            return
        tree = self._tree
        while self._surplus(0.9):
            oldest = tree.oldest_gone()
            if not oldest:
                return
            for run in oldest:
                if weight := tree.weight[run]:
                    age_s = (now_s - tree.used_s[run]) * tree.scale[run]
                    for kind in (tree.kind[run], tree.early_kind[run]):
                        self._learner.left.add(kind, age_s, weight)
                self._duel.forgotten(tree.turn[run], tree.length[run])
                tree.forget(run)

    def _surplus(self, share: float) -> bool:
        """Whether it is more than this share of its bound."""
        tree = self._tree
        gone_runs, gone_blocks = len(tree) - tree.resident_runs, tree.live_blocks - tree.resident_blocks
        return gone_runs > share * self._runs_max or gone_blocks > share * self._blocks_max
