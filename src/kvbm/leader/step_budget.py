"""How long the calls of one engine step may wait for the manager."""

from __future__ import annotations

from kvbm.leader.link import ManagerLink

STEP_WAIT_S = 0.002
"""How long an engine step with work to do may wait for the manager's answers, in all."""
IDLE_WAIT_S = 0.005
"""How long an engine step without work waits for the answer to a lookup."""
LAST_STORES_WAIT_S = 0.02
"""How long an idle step waits for slots for the last blocks of requests that ended."""


class StepBudget:
    """What is left of the time of a step; `wait` spends it. Messages are to be taken in afterwards."""

    def __init__(self, link: ManagerLink) -> None:
        self._link = link
        self.left_s = STEP_WAIT_S

    def begin(self) -> float:
        """The next step's time begins; what was left of the one before."""
        left_s, self.left_s = self.left_s, STEP_WAIT_S
        return max(0.0, left_s)

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most so long."""
        self.left_s -= self._link.wait(seconds)
