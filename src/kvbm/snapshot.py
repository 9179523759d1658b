"""A manager's counters at one moment, and the prefixes that are asked for most: values, without a transport.

`manager.snapshots` fills them in, an admin message carries them, `observe.view` turns two moments into rates.
"""

from __future__ import annotations

import msgspec

PREFIXES_MAX = 12
"""The most prefixes in a snapshot."""

Series = tuple[str, tuple[str, ...]]
"""A metric's name and its label values in the table's order; of a histogram, the name ends in `_count` or `_sum`."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """All counters and gauges at `at_s` on the manager's clock."""

    at_s: float
    values: tuple[tuple[str, tuple[str, ...], float], ...] = ()

    def by_series(self) -> dict[Series, float]:
        """The values by name and labels."""
        return {(name, labels): value for name, labels, value in self.values}


class PrefixState(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that requests share: they begin with the same block, and `name` is the head of that block's key.

    `tokens` is the length that its last two requests have in common. Of its `requests` so far, `lost` found nothing
    although an earlier one had the same first block. `tiers` has the tokens of it that each tier holds.
    """

    name: str
    namespace: str
    tokens: int
    requests: int
    lost: int
    asked_tokens: int
    found_tokens: int
    heat: float
    tiers: dict[str, int] = {}
