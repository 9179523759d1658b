"""Snapshots: the manager's counters now and about a minute ago, its description, and the hottest prefixes.

A reply is bounded whatever the load: so many prefixes, a fixed table of metrics. It is made in slices, so that no turn
of the loop gets longer by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvbm.admin_protocol import Description, Moment, PrefixReport, Snapshot, SnapshotReply
from kvbm.block import KEY_BYTES, BlockKey
from kvbm.clock import Clock
from kvbm.hashing import split_keys
from kvbm.layout import Namespace
from kvbm.manager.administration import refuse_other_roles
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.gauges import publish_gauges
from kvbm.manager.prefix_heat import HotPrefix
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.observe.metrics import Histogram, Metrics

KEPT_EVERY_S = 5.0
KEPT_FOR_S = 60.0
PREFIXES_MAX = 12
"""The most prefixes in a snapshot."""
_NAME_BYTES = 6


class Snapshots:
    """Keeps the counters of the last minute, and answers with snapshots. Owned by the manager's thread."""

    def __init__(
        self, describe: Callable[[], Description], spaces: SpaceTable, metrics: Metrics, clock: Clock
    ) -> None:
        self._describe = describe
        self._spaces = spaces
        self._metrics = metrics
        self._clock = clock
        self._kept: deque[Moment] = deque([self._moment()])

    def tick(self) -> None:
        """Keep the counters where it is time; of those from before the last minute only the latest stay."""
        now_s = self._clock()
        if now_s - self._kept[-1].at_s >= KEPT_EVERY_S:
            self._kept.append(self._moment())
        while len(self._kept) > 1 and now_s - self._kept[1].at_s >= KEPT_FOR_S:
            self._kept.popleft()

    def answer(self, session: Session, message: Snapshot) -> Iterator[None]:
        """Send a snapshot, made in slices."""
        refuse_other_roles(session, message)
        prefixes: list[PrefixReport] = []
        for namespace, space in self._spaces:
            for key, prefix in () if space.failure else space.heat.hottest(PREFIXES_MAX):
                prefixes.append(_prefix_state(namespace, space, key, prefix))
                yield
        prefixes.sort(key=lambda prefix: -prefix.heat)
        # Evictions since the last tick are not counted yet.
        publish_gauges(self._spaces.named(), self._metrics)
        session.send(
            SnapshotReply(
                manager=self._describe(),
                now=self._moment(),
                earlier=self._kept[0],
                prefixes=tuple(prefixes[:PREFIXES_MAX]),
            )
        )

    def _moment(self) -> Moment:
        return Moment(at_s=self._clock(), values=tuple(_values(self._metrics)))


def _values(metrics: Metrics) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for metric, rows in metrics.series():
        for labels, number in rows:
            if isinstance(number, Histogram):
                yield f"{metric.name}_count", labels, float(sum(number.counts))
                yield f"{metric.name}_sum", labels, number.total
            else:
                yield metric.name, labels, float(number)


def _prefix_state(namespace: Namespace, space: Space, key: BlockKey, prefix: HotPrefix) -> PrefixReport:
    tokens = space.layout.block_tokens
    keys = split_keys(prefix.chain[: max(prefix.shared, 1) * KEY_BYTES])
    held = {
        pool.tier.name.lower(): tokens * sum(pool.find(part) is not None for part in keys)
        for pool in space.pools
    }
    if space.remotes:
        held["remote"] = tokens * sum(space.below.away(keys))
    return PrefixReport(
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
