"""A rank's reports to the leader by way of the manager, for engines that do not pass them on. Owned by the mover."""

from __future__ import annotations

from typing import TypeVar

from kvbm.client.channel import Channel
from kvbm.protocol import Report
from kvbm.step_plan import StepReport
from kvbm.worker.jobs import FinishedStore

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

UNSENT_MAX = 4096
"""Stores, or loads, that wait for a session; beyond that the oldest are forgotten, and never committed."""


class Reporting:
    """Collects what has ended and sends it while there is a session. Off, it does nothing."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._stored: dict[int, tuple[tuple[int, ...], float]] = {}
        self._loaded: dict[str, float] = {}

    def store_ended(self, store: FinishedStore) -> None:
        """A store is over."""
        if self.on:
            self._stored[store.store] = store.failed, store.seconds
            _bound(self._stored)

    def add(self, report: StepReport) -> None:
        """What the engine's thread found out itself."""
        assert self.on
        self._stored.update({number: (failed, s) for number, (_, failed, s) in report.stored.items()})
        self._loaded.update(report.loaded)
        _bound(self._stored)
        _bound(self._loaded)

    def send(self, channel: Channel | None) -> None:
        """Send what there is. Raises ManagerUnavailable; nothing is lost then, the next session gets it."""
        if channel is None or not (self._stored or self._loaded):
            return
        channel.send(Report(stored=self._stored, loaded=self._loaded))
        self._stored, self._loaded = {}, {}


def _bound(waiting: dict[KeyT, ValueT]) -> None:
    while len(waiting) > UNSENT_MAX:
        waiting.pop(next(iter(waiting)))
