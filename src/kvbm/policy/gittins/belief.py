"""Which clients are believed: a duel, for each client, between its hints and what is usual for it.

A claim is settled when its conversation goes on, or by its deadline. Two forecasters bet on the octave in which it
goes on, or on *never*. One knows only what happened to this client's conversations so far. The other also knows the
hint, takes it for true within a factor of two (Bayes), and leaves `_DOUBT` of its bet to the first one. The score is
the difference of their logarithms, so one claim costs at most `-log(_DOUBT)`. A client whose score falls to `_REFUSED`
is ignored until it is back at 0.

What is looked at is whether blocks are asked for again, which no client can claim.
"""

from __future__ import annotations

import heapq
from array import array
from math import log, log2
from operator import mul

CLIENTS_MAX = 1024
PENDING_MAX = 1 << 16
_DOUBT = 0.1
_NEAR = {-2: 0.1, -1: 0.7, 0: 1.0, 1: 0.7, 2: 0.1}
"""How well an outcome fits a hint, by octaves between them; `_FAR` if it is further away, or the other of end and
return."""
_FAR = 0.02
_REFUSED, _SCORE_MAX = -6.0, 20.0
_FINAL_S, _OVERDUE, _DEADLINE_S_MIN, _DEADLINE_S_MAX = 600.0, 8.0, 60.0, 3600.0
_OCTAVES = 13
_NEVER = _OCTAVES


class _Client:
    """The score of a client, and how often its conversations went on in each octave, or never did."""

    __slots__ = ("believed", "outcomes", "score")

    def __init__(self) -> None:
        self.believed = True
        self.score = 0.0
        self.outcomes = array("d", [0.5]) * (_OCTAVES + 1)


class Belief:
    """The clients by name, the latest `clients_max` of them, and at most `pending_max` claims that wait."""

    def __init__(self, clients_max: int = CLIENTS_MAX, pending_max: int = PENDING_MAX) -> None:
        self._clients: dict[str, _Client] = {}
        self._clients_max = clients_max
        self._pending_max = pending_max
        # By the request's number: whose claim it is, the seconds in which its conversation goes on (below 0: it is
        # final), and from when on they count.
        self._pending: dict[int, tuple[str, float, float]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def believes(self, client: str) -> bool:
        """Whether this client's hints count. One that is not known is believed until it is wrong."""
        known = self._clients.get(client)
        return known is None or known.believed

    def claimed(self, number: int, client: str, expect_s: float | None, now_s: float) -> None:
        """The client says of this request when its conversation goes on, or that it does not (None)."""
        self.settle_due(now_s)
        if number not in self._pending and len(self._pending) >= self._pending_max:
            return
        self._pending[number] = (client, -1.0 if expect_s is None else expect_s, now_s)
        self._wait(number)

    def ended(self, number: int, now_s: float) -> None:
        """The request has ended: what was claimed counts from now on."""
        if claim := self._pending.get(number):
            self._pending[number] = (*claim[:2], now_s)
            self._wait(number)

    def went_on(self, number: int, now_s: float) -> None:
        """A request continues the conversation of this one."""
        if claim := self._pending.pop(number, None):
            client, expect_s, since_s = claim
            self._settle(client, expect_s, _octave(max(0.0, now_s - since_s)))

    def settle_due(self, now_s: float) -> None:
        """Settle the claims whose conversations are overdue, or were final indeed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            claim = self._pending.get(number)
            if claim is not None and _deadline_s(*claim[1:]) <= now_s:
                del self._pending[number]
                self._settle(claim[0], claim[1], _NEVER)

    def _wait(self, number: int) -> None:
        _, expect_s, since_s = self._pending[number]
        heapq.heappush(self._deadlines, (_deadline_s(expect_s, since_s), number))
        if len(self._deadlines) > 4 * self._pending_max:  # most are of claims that were settled
            waiting = [(_deadline_s(*claim[1:]), each) for each, claim in self._pending.items()]
            heapq.heapify(waiting)
            self._deadlines = waiting

    def _settle(self, name: str, expect_s: float, outcome: int) -> None:
        client = self._clients.pop(name, None) or _Client()
        self._clients[name] = client  # the latest is the last
        if len(self._clients) > self._clients_max:
            del self._clients[next(iter(self._clients))]
        # What the second forecaster bets on each outcome, as a multiple of what the first one does.
        fits = [_fit(expect_s, each) for each in range(_OCTAVES + 1)]
        mean = sum(map(mul, fits, client.outcomes)) / sum(client.outcomes)
        won = log(_DOUBT + (1 - _DOUBT) * fits[outcome] / mean)
        client.outcomes[outcome] += 1.0
        client.score = min(max(client.score + won, -_SCORE_MAX), _SCORE_MAX)
        client.believed = client.score > (_REFUSED if client.believed else 0.0)


def _fit(expect_s: float, outcome: int) -> float:
    """How well an outcome fits a hint."""
    if expect_s < 0:
        return 1.0 if outcome == _NEVER else _FAR
    return _FAR if outcome == _NEVER else _NEAR.get(outcome - _octave(expect_s), _FAR)


def _octave(gap_s: float) -> int:
    return min(_OCTAVES - 1, int(log2(gap_s + 1)))


def _deadline_s(expect_s: float, since_s: float) -> float:
    if expect_s < 0:
        return since_s + _FINAL_S
    return since_s + min(max(_OVERDUE * expect_s, _DEADLINE_S_MIN), _DEADLINE_S_MAX)
