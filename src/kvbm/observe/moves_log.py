"""The log lines about blocks that move, in the words that KVBM's guides tell a user to look for.

All but one are debug lines. Each call asks once whether they are wanted, however many blocks it is about.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from kvbm.clock import Clock
from kvbm.observe.log import key_values

log = logging.getLogger("kvbm.moves")

FULL_INTERVAL_S = 60.0
"""A tier that stays full is warned of no more often."""
LOOK_INTERVAL_S = 1.0
"""Nobody looks more often whether a tier is full: it takes a look at all of its slots, 0.7 ms for 1.5 million."""


def offloading(keys: Iterable[object], source: str, target: str) -> None:
    """Copies of these blocks to a lower tier begin."""
    if log.isEnabledFor(logging.DEBUG):
        way = key_values(source=source, target=target)
        for key in keys:
            name = key.hex() if isinstance(key, bytes) else key
            log.debug("Offloading block with sequence hash %s to target pool. %s", name, way)


def onboarding(blocks: int, source: str, target: str, request: str = "") -> None:
    """So many blocks of one request are brought up."""
    if log.isEnabledFor(logging.DEBUG):
        way = key_values(source=source, target=target, request=request or None)
        log.debug("Onboarding %d blocks to target pool. %s", blocks, way)


def matched(host: int, disk: int, asked: int, request: str) -> None:
    """A lookup was answered: so many blocks were found in each tier, of those that were asked for."""
    if log.isEnabledFor(logging.DEBUG):
        facts = key_values(asked=asked, request=request or None)
        log.debug(
            "successfully matched %d host blocks and %d disk blocks; %d total blocks %s",
            host,
            disk,
            host + disk,
            facts,
        )


def added(blocks: int, tier: str) -> None:
    """So many blocks can be found in the tier from now on."""
    if blocks and log.isEnabledFor(logging.DEBUG):
        log.debug("Adding blocks to pool %s", key_values(blocks=blocks, tier=tier))


def returned(blocks: int, tier: str) -> None:
    """So many blocks of the tier are in use by one request less."""
    if blocks and log.isEnabledFor(logging.DEBUG):
        log.debug("Returning blocks to pool %s", key_values(blocks=blocks, tier=tier))


class FullPool:
    """Warns that every block of a tier is in use, so that new ones are not stored: once a minute at most."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._due_s = -math.inf

    def skipped(self, blocks: int, all_in_use: Callable[[], bool]) -> None:
        """So many blocks were not stored; warn if every block of the tier is leased or being filled.

        `all_in_use` may be slow: it is asked once in `LOOK_INTERVAL_S` at most, and not while no warning is due.
        """
        now_s = self._clock()
        if now_s < self._due_s:
            return
        full = all_in_use()
        self._due_s = now_s + (FULL_INTERVAL_S if full else LOOK_INTERVAL_S)
        if full:
            log.warning(
                "Target pool full. Skipping offload. "
                "This should only ever happen with very small pool sizes. %s",
                key_values(target=self._tier, blocks=blocks),
            )
