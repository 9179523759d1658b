"""The present state of the tiers for the metrics table, summed over namespaces: labels never name one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics


def publish_gauges(spaces: Sequence[Space], metrics: Metrics) -> None:
    """Bring occupancy, queues, evictions and the state of the tiers up to date."""
    capacity: Counter[str] = Counter()
    leased: Counter[str] = Counter()
    blocks: Counter[tuple[str, str]] = Counter()
    queues: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for space in spaces:
        for pool in space.pools:
            tier, counts = pool.tier.name.lower(), pool.counts()
            capacity[tier] += pool.slot_count
            leased[tier] += counts.leased
            for state in ("free", "filling", "resident"):
                blocks[tier, state] += getattr(counts, state)
            metrics.add("kvbm_evicted_blocks_total", pool.evicted_count, tier=tier)
            pool.evicted_count = 0
        if space.disk is not None:
            queues["onboard"] += space.disk.onboarder.queued_count
            queues["offload"] += space.disk.offloader.queued_count
            faults["disk"] += bool(space.disk.fault or space.failure)
        faults["host"] += bool(space.failure)
    metrics.set("kvbm_leases", sum(len(space.leases) for space in spaces))
    for tier in capacity:
        metrics.set("kvbm_pool_capacity_blocks", capacity[tier], tier=tier)
        metrics.set("kvbm_leased_blocks", leased[tier], tier=tier)
        if tier != "host" or not all(space.options.staging for space in spaces):
            metrics.set("kvbm_tier_up", 0 if faults[tier] else 1, tier=tier)
    for (tier, state), number in blocks.items():
        metrics.set("kvbm_pool_blocks", number, tier=tier, state=state)
    for queue, waiting in queues.items():
        metrics.set("kvbm_queue_blocks", waiting, queue=queue)
    if hit_bytes := metrics.value("kvbm_hit_bytes_total", tier="disk"):
        written_bytes = metrics.value("kvbm_transfer_bytes_total", source="host", target="disk")
        metrics.set("kvbm_disk_write_bytes_per_hit_byte", written_bytes / hit_bytes)
