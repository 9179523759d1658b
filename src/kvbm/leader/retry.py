"""When blocks that the manager had no slot for are offered again: later and later, and at once after a success."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_S = 0.05
RETRY_S_MAX = 5.0
_DOUBLINGS_MAX = 20


@dataclass(slots=True)
class Retry:
    """`failures` counts the refusals in a row; nothing is offered before `due_s`."""

    failures: int = 0
    due_s: float = 0.0

    def failed(self, now_s: float) -> None:
        """The manager refused."""
        self.due_s = now_s + min(RETRY_S * (1 << self.failures), RETRY_S_MAX)
        self.failures = min(self.failures + 1, _DOUBLINGS_MAX)

    def succeeded(self) -> None:
        """The manager took something."""
        self.failures = 0
