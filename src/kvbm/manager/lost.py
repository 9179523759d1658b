"""Why a block that was here is in no tier now: the fates of a block in each tier, and the one reason of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.block import BlockKey
from kvbm.manager.departed import CORRUPT, EVICTED, GONE, Fate, Missing
from kvbm.manager.pool import EXPIRED, RESET
from kvbm.manager.space import Space
from kvbm.policy import AdmissionPolicy, AdmitAll, WriteBudget
from kvbm.tiers.remote.contract import NOWHERE

NOT_STORED = "not_stored"
NOT_WRITTEN = "not_written"
FILTERED = "refused_by_filter"
FAILED_CHECKSUM = "failed_checksum"
STORE_OFF = "store_off"
"""It lies in a remote store that is off."""


class Fates(NamedTuple):
    """What became of a missing block in each tier; None where nothing is known."""

    host: Fate | None
    disk: Fate | None
    remote: Fate | None


NO_FATES = Fates(None, None, None)


def fates(space: Space, why: Missing) -> Fates:
    """What became of a missing block in host memory, on disk and in the store.

    Blocks that admission refuses while they are in host memory have no entry: nearly all are, again and again. But
    whatever else keeps a block from the tiers below has one. So a block that host memory evicted, and that has none
    there, was refused.
    """
    known = Fates(why.host, why.disk, why.remote)
    if why.host is None or why.host.what != EVICTED or space.departed.forgotten:
        return known
    refused = Fate(why.host.at_s, "filter")
    if (
        why.disk is None
        and space.disk is not None
        and not space.disk.trouble
        and _refuses(space.disk.admission)
    ):
        known = known._replace(disk=refused)
    if why.remote is None and any(
        side.writer is not None and not side.fault and _refuses(side.admission) for side in space.remotes
    ):
        known = known._replace(remote=refused)
    return known


def reason_of(known: Fates) -> str:
    """The one reason of a block that was here: what the deepest tier did with it counts."""
    host = known.host
    deepest = known.remote or known.disk
    if deepest is not None and not (host is not None and host.what == RESET and host.at_s > deepest.at_s):
        names = {
            CORRUPT: FAILED_CHECKSUM,
            EVICTED: EVICTED,
            GONE: EVICTED,
            RESET: RESET,
            EXPIRED: EXPIRED,
            "filter": FILTERED,
        }
        # Host memory may hold a block that is refused; it is lost when it leaves there.
        return names.get(deepest.what, NOT_WRITTEN)
    assert host is not None
    return host.what if host.what in (EVICTED, RESET, EXPIRED) else NOT_STORED


def behind_a_fault(space: Space, keys: Sequence[BlockKey]) -> int:
    """How many of these blocks, from the first on, lie in a remote store that is off now, as far as is known."""
    most = 0
    for side in space.remotes:
        if side.fault:
            places = side.tier.places(keys)
            most = max(most, places.index(NOWHERE) if NOWHERE in places else len(places))
    return most


def _refuses(admission: AdmissionPolicy) -> bool:
    return not isinstance(admission, AdmitAll | WriteBudget)
