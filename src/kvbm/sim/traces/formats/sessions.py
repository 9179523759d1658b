"""Requests as files give them, in sessions with their own time; and sessions made into one stream of arrivals."""

from __future__ import annotations

import random
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SECONDS_PER_HOUR = 3600.0
NAMES_END = 1 << 40
"""Names of a session's blocks are below this; what is above says which session it is."""


class RecordedRequest(NamedTuple):
    """One request of a source. Equal `prefixes` mean an equal whole prefix, across all sessions of the source.

    `at_s` counts from the session's start; `seconds` is how long the request took, where the source says so.
    """

    at_s: float
    prefixes: Sequence[Hashable]
    prompt_tokens: int
    output_tokens: int
    seconds: float | None


@dataclass
class Source:
    """The content of a file or a directory. A source without sessions of its own is one session that starts at 0."""

    block_tokens: int
    sessions: list[list[RecordedRequest]] = field(default_factory=list)
    has_sessions: bool = False


class ChainedNames:
    """Names for prefixes, made of names for single blocks: equal exactly when all blocks up to there are equal."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def prefixes(self, blocks: Iterable[Hashable]) -> array[int]:
        """The prefix that ends with each block."""
        numbers = self._numbers
        chain = array("q")
        parent = 0
        for block in blocks:
            parent = numbers.setdefault((parent, block), len(numbers) + 1)
            chain.append(parent)
        return chain


def scoped_prefixes(scope: int | None, runs: Iterable[range]) -> array[int]:
    """Names for the prefixes of a session with that number, of runs of its own numbers (below `NAMES_END`).

    No other session has one of them; with scope None every session has the same.
    """
    base = 0 if scope is None else (scope + 1) * NAMES_END
    chain = array("q")
    for run in runs:
        chain.extend(range(base + run.start, base + run.stop))
    return chain


def regroup(prefixes: Sequence[Hashable], blocks_per_group: int) -> Sequence[Hashable]:
    """The same chain in larger blocks: a prefix is named by its last block, and names that fill none are left out."""
    return prefixes[blocks_per_group - 1 :: blocks_per_group]


def start_times_s(count: int, seed: int, hours: float) -> list[tuple[int, float]]:
    """In which order sessions start, and when: (session, seconds).

    The order is shuffled and the starts are a Poisson process with as many arrivals as there are sessions in `hours`
    hours on average. The same seed gives the same stream on every machine.
    """
    # The Mersenne twister under both calls is specified by Python; a simulation needs no secrecy.
    chance = random.Random(seed)
    order = list(range(count))
    chance.shuffle(order)
    rate = count / (hours * SECONDS_PER_HOUR)
    starts = []
    now_s = 0.0
    for session in order:
        now_s += chance.expovariate(rate)
        starts.append((session, now_s))
    return starts
