"""What a manager says of itself at one moment: values, without a transport and without a picture.

`manager.snapshots` fills it in, an admin message carries it, `observe.view` turns two moments into rates.
"""

from __future__ import annotations

import msgspec

PREFIXES_MAX = 12
"""The most prefixes of one namespace in a snapshot."""

Series = tuple[str, tuple[str, ...]]
"""A metric's name and its label values in the table's order; of a histogram, the name ends in `_count` or `_sum`."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """All counters and gauges at `at_s` on the manager's clock."""

    at_s: float
    values: tuple[tuple[str, tuple[str, ...], float], ...] = ()

    def by_series(self) -> dict[Series, float]:
        """The values by name and labels."""
        return {(name, labels): value for name, labels, value in self.values}


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one tier of one namespace, in blocks; `staging`: host memory is only the way to disk."""

    name: str
    capacity: int
    free: int
    filling: int
    resident: int
    leased: int
    staging: bool = False


class SpaceState(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace. `fault` says why its disk, or all of it, is off; empty while it works.

    `onboarding` and `offloading` blocks wait in the queues between disk and host memory, or are in flight from them.
    """

    namespace: str
    model: str
    block_tokens: int
    block_bytes: int
    tiers: tuple[TierState, ...]
    fault: str = ""
    onboarding: int = 0
    offloading: int = 0
    leases: int = 0
    reservations: int = 0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: `ranks` of `rank_count` are attached. `led`: its scheduler's side is connected too."""

    name: str
    model: str
    namespace: str
    ranks: int
    rank_count: int
    led: bool
    leases: int = 0
    leased_blocks: int = 0


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


class ManagerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a view of a manager needs, in one bounded answer. `earlier` is about a minute ago, or the start."""

    version: str
    pid: int
    epoch: int
    uptime_s: float
    now: Moment
    earlier: Moment
    spaces: tuple[SpaceState, ...] = ()
    engines: tuple[EngineState, ...] = ()
    engines_left_out: int = 0
    prefixes: tuple[PrefixState, ...] = ()


def start_of(state: ManagerState) -> Moment:
    """The moment at which the manager began: nothing was counted yet."""
    return Moment(at_s=state.now.at_s - state.uptime_s)
