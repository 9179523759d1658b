"""A manager's `ManagerState`: its counters now and about a minute ago, its namespaces, engines and hottest prefixes.

An answer is bounded whatever the load: so many engines, so many prefixes, a fixed table of metrics. It is made in
slices, so that no turn of the loop gets longer by it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator
from itertools import islice

from kvbm import __version__
from kvbm.block import KEY_BYTES, BlockKey
from kvbm.clock import Clock
from kvbm.hashing import split_keys
from kvbm.layout import Namespace
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.engines import Engine
from kvbm.manager.membership import Membership
from kvbm.manager.prefix_heat import HotPrefix
from kvbm.manager.space import Space
from kvbm.observe.metrics import Histogram, Metrics
from kvbm.snapshot import (
    PREFIXES_MAX,
    EngineState,
    ManagerState,
    Moment,
    PrefixState,
    SpaceState,
    TierState,
)

KEPT_EVERY_S = 5.0
KEPT_FOR_S = 60.0
ENGINES_MAX = 256
_NAME_BYTES = 6


class Snapshots:
    """Keeps the counters of the last minute, and makes snapshots. Owned by the manager's thread."""

    def __init__(
        self, membership: Membership, spaces: SpaceTable, metrics: Metrics, epoch: int, clock: Clock
    ) -> None:
        self._membership = membership
        self._spaces = spaces
        self._metrics = metrics
        self._epoch = epoch
        self._clock = clock
        self._began_s = clock()
        self._kept: deque[Moment] = deque([self._moment()])

    def tick(self) -> None:
        """Keep the counters where it is time; those from before the last minute go, but for the latest of them."""
        now_s = self._clock()
        if now_s - self._kept[-1].at_s >= KEPT_EVERY_S:
            self._kept.append(self._moment())
        while len(self._kept) > 1 and now_s - self._kept[1].at_s >= KEPT_FOR_S:
            self._kept.popleft()

    def take(self) -> Generator[None, None, ManagerState]:
        """Make one, in slices."""
        prefixes: list[PrefixState] = []
        for namespace, space in self._spaces:
            for key, prefix in () if space.failure else space.heat.hottest(PREFIXES_MAX):
                prefixes.append(_prefix_state(namespace, space, key, prefix))
                yield
        prefixes.sort(key=lambda prefix: -prefix.heat)
        engines = list(islice(self._membership, ENGINES_MAX))
        now = self._moment()
        return ManagerState(
            version=__version__,
            pid=os.getpid(),
            epoch=self._epoch,
            uptime_s=now.at_s - self._began_s,
            now=now,
            earlier=self._kept[0],
            spaces=tuple(_space_state(namespace, space) for namespace, space in self._spaces),
            engines=tuple(self._engine_state(engine) for engine in engines),
            engines_left_out=len(self._membership) - len(engines),
            prefixes=tuple(prefixes[:PREFIXES_MAX]),
        )

    def _moment(self) -> Moment:
        return Moment(at_s=self._clock(), values=tuple(_values(self._metrics)))

    def _engine_state(self, engine: Engine) -> EngineState:
        namespace = self._spaces.namespace_of(engine.space)
        leases = engine.space.leases.of(engine.leader.number) if engine.leader is not None else []
        return EngineState(
            name=engine.name,
            model=namespace.model,
            namespace=namespace.short,
            ranks=len(engine.workers),
            rank_count=engine.rank_count,
            led=engine.leader is not None,
            leases=len(leases),
            leased_blocks=sum(len(lease.slots) for lease in leases),
        )


def _values(metrics: Metrics) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for metric, rows in metrics.series():
        for labels, number in rows:
            if isinstance(number, Histogram):
                yield f"{metric.name}_count", labels, float(sum(number.counts))
                yield f"{metric.name}_sum", labels, number.total
            else:
                yield metric.name, labels, float(number)


def _space_state(namespace: Namespace, space: Space) -> SpaceState:
    tiers = []
    for pool in space.pools:
        counts, name = pool.counts(), pool.tier.name.lower()
        tiers.append(
            TierState(
                name=name,
                capacity=pool.slot_count,
                free=counts.free,
                filling=counts.filling,
                resident=counts.resident,
                leased=counts.leased,
                staging=name == "host" and space.options.staging,
            )
        )
    disk = space.disk
    return SpaceState(
        namespace=namespace.short,
        model=namespace.model,
        block_tokens=space.layout.block_tokens,
        block_bytes=space.layout.block_bytes,
        tiers=tuple(tiers),
        fault=space.failure or (disk.fault if disk is not None else ""),
        onboarding=disk.onboarder.queued_count if disk is not None else 0,
        offloading=disk.offloader.queued_count if disk is not None else 0,
        leases=len(space.leases),
        reservations=len(space.reservations),
    )


def _prefix_state(namespace: Namespace, space: Space, key: BlockKey, prefix: HotPrefix) -> PrefixState:
    tokens = space.layout.block_tokens
    keys = split_keys(prefix.chain[: max(prefix.shared, 1) * KEY_BYTES])
    held = {
        pool.tier.name.lower(): tokens * sum(pool.find(part) is not None for part in keys)
        for pool in space.pools
    }
    return PrefixState(
        name=key[:_NAME_BYTES].hex(),
        namespace=namespace.short,
        tokens=tokens * prefix.shared,
        requests=prefix.requests,
        lost=prefix.lost,
        asked_tokens=tokens * prefix.asked,
        found_tokens=tokens * prefix.found,
        heat=prefix.heat,
        tiers=held,
    )
