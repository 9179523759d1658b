"""The prefill of one engine: it computes one prompt after the other, and loads the next ones meanwhile."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from kvbm.sim.serving.events import Events

JobT = TypeVar("JobT")
JobT_contra = TypeVar("JobT_contra", contravariant=True)


class PrefillUser(Protocol[JobT_contra]):
    """The user of a server: answers its questions about jobs, and is notified of them."""

    def begin(self, now_s: float, job: JobT_contra) -> float | None:
        """The server turns to the job. When its cached blocks will be on the device; None if nothing is loaded."""

    def loaded(self, now_s: float, job: JobT_contra) -> None:
        """The blocks that `begin` loads have arrived on the device."""

    def prefill_s(self, job: JobT_contra) -> float:
        """How long it takes to compute the rest of the prompt."""

    def computed(self, now_s: float, job: JobT_contra, seconds: float) -> None:
        """The prompt is computed, after so many seconds: the first token is there."""


class PrefillServer(Generic[JobT]):
    """Jobs are begun first come, first served. Those whose blocks are loaded come before those that wait."""

    def __init__(self, events: Events, user: PrefillUser[JobT]) -> None:
        self.expected_free_s = 0.0
        """When all waiting jobs will be computed, by the estimates that the user adds as they arrive."""
        self._events = events
        self._user = user
        self._waiting: deque[JobT] = deque()
        self._ready: deque[JobT] = deque()
        self._busy = False

    def arrive(self, now_s: float, job: JobT) -> None:
        """A job joins the line."""
        self._waiting.append(job)
        self._take_next(now_s)

    def _take_next(self, now_s: float) -> None:
        while not self._busy and (self._ready or self._waiting):
            if self._ready:
                self._compute(now_s, self._ready.popleft())
                continue
            job = self._waiting.popleft()
            loaded_s = self._user.begin(now_s, job)
            if loaded_s is None:
                self._ready.append(job)
            else:
                self._events.at(loaded_s, self._loaded, job)

    def _loaded(self, now_s: float, job: JobT) -> None:
        self._user.loaded(now_s, job)
        self._ready.append(job)
        self._take_next(now_s)

    def _compute(self, now_s: float, job: JobT) -> None:
        self._busy = True
        seconds = self._user.prefill_s(job)
        self._events.at(now_s + seconds, self._computed, (job, seconds))

    def _computed(self, now_s: float, subject: tuple[JobT, float]) -> None:
        self._busy = False
        self._user.computed(now_s, *subject)
        self._take_next(now_s)
        if not self._busy:
            self.expected_free_s = now_s
