"""The ranks' reports of an engine that cannot pass them to the leader: they come through the manager, one by one.

An engine that merges them itself hands the leader one report of all ranks (`StepReport.merge`). Here a store or a load
is told only once every rank has reported it, and a rank counts once, however often it says the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbm.protocol import RankReport
from kvbm.step_plan import StepReport

OPEN_MAX = 8192
"""Stores or loads of which some ranks have reported; beyond that the oldest are forgotten, and never committed."""


@dataclass(slots=True)
class _Part:
    ranks: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def add(self, rank: int, failed: tuple[int, ...], seconds: float) -> int:
        """How many ranks have reported by now."""
        self.ranks.add(rank)
        self.failed.update(failed)
        self.seconds = max(self.seconds, seconds)
        return len(self.ranks)


class RankReports:
    """Reports that some ranks have yet to give. Owned by the leader's thread."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._stores: dict[int, _Part] = {}
        self._loads: dict[str, _Part] = {}

    def add(self, report: RankReport) -> StepReport | None:
        """A rank's report; what all ranks have reported with it, if anything."""
        stored: dict[int, tuple[int, tuple[int, ...], float]] = {}
        loaded: dict[str, float] = {}
        for store, (failed, seconds) in report.stored.items():
            part = self._stores.setdefault(store, _Part())
            if part.add(report.rank, failed, seconds) >= self._rank_count:
                stored[store] = self._rank_count, tuple(sorted(part.failed)), part.seconds
                del self._stores[store]
        for request, seconds in report.loaded.items():
            part = self._loads.setdefault(request, _Part())
            if part.add(report.rank, (), seconds) >= self._rank_count:
                loaded[request] = part.seconds
                del self._loads[request]
        for store in list(self._stores)[: max(0, len(self._stores) - OPEN_MAX)]:
            del self._stores[store]
        for request in list(self._loads)[: max(0, len(self._loads) - OPEN_MAX)]:
            del self._loads[request]
        return StepReport(stored=stored, loaded=loaded) if stored or loaded else None

    def forget_load(self, request: str) -> None:
        """The request's load has ended without all reports: what comes later is of no load."""
        self._loads.pop(request, None)

    def clear(self) -> None:
        """The session has ended: nothing of it is waited for."""
        self._stores.clear()
        self._loads.clear()
