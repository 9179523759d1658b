"""How long the calls of one engine step may wait for the manager."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.leader.link import Link

STEP_WAIT_S = 0.002
"""How long an engine step with work to do may wait for the manager's answers, in all."""
IDLE_WAIT_S = 0.005
"""How long an engine step without work waits for the answer to a lookup."""
LAST_STORES_WAIT_S = 0.02
"""How long an idle step waits for slots for the last blocks of requests that ended."""


MESSAGES_MAX = 64
"""Of other matters, that may come before an answer."""


class StepBudget:
    """What is left of the time of a step; `wait` spends it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.left_s = STEP_WAIT_S

    def begin(self) -> float:
        """The next step's time begins; what was left of the one before."""
        left_s, self.left_s = self.left_s, STEP_WAIT_S
        return max(0.0, left_s)

    def wait(self, seconds: float, take_in: Callable[[], None], awaited: Callable[[], object]) -> None:
        """Wait for messages, at most so long and as long as something is `awaited`; for one in any case.

        The manager tells of other matters too, and one of those may come before the answer.
        """
        for _ in range(MESSAGES_MAX):
            waited_s = self._link.wait(seconds)
            self.left_s -= waited_s
            seconds -= waited_s
            take_in()
            if seconds <= 0.0 or not awaited():
                return
