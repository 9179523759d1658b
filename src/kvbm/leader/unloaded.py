"""Why blocks that were found are computed all the same: counted by reason, in all and for each lookup."""

from __future__ import annotations

from kvbm.leader.link import Link
from kvbm.leader.search import Search
from kvbm.protocol import UNLOADED_REASONS


class Unloaded:
    """`by_reason` counts blocks that the device lacked, that were found, and that were computed all the same."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.by_reason = dict.fromkeys(UNLOADED_REASONS, 0)

    def note(self, search: Search, computed: int, taken: int) -> None:
        """Count found blocks that are computed: all but the first `computed` and the `taken` after them."""
        end = search.skip + search.blocks
        held = computed + taken if computed >= search.skip else search.skip
        left = max(0, end - max(held, search.skip))
        missing = min(left, search.missing)
        self.count(search, search.why_missing, missing)
        why = "stale" if search.life != self._link.life else search.why or "unused"
        self.count(search, why, left - missing)
        for reason, cut in (("refused", search.refused), ("no_room", search.no_room)):
            end += cut
            self.count(search, reason, min(cut, max(0, end - computed)))

    def count(self, search: Search, reason: str, blocks: int) -> None:
        """Count so many blocks of the lookup as computed for this reason."""
        assert blocks >= 0, (reason, blocks)
        if blocks:
            self.by_reason[reason] += blocks
            search.unloaded[reason] = search.unloaded.get(reason, 0) + blocks

    def why_failed(self, search: Search) -> str:
        """Why blocks of a load that ended did not arrive, as far as the leader can tell."""
        assert search.plan is not None
        if search.epoch < 0 or search.life != self._link.life:
            return "stale"
        if search.ready >= search.plan.offset + len(search.plan.slots):
            return "failed"
        return "refused" if search.final else "deadline"
