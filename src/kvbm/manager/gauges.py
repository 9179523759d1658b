"""The present state of the tiers for the metrics table: summed over namespaces, but for what each of them holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvbm.manager.remote_side import report_remote
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.observe.remote_metrics import BREAKER_STATES, REQUESTS, TRANSPORTS
from kvbm.remote_report import RemoteReport


def count_in_bulk(label: str, space: Space, metrics: Metrics) -> None:
    """Count the blocks that the space has dropped since the last time, and what its remote tiers have done; both are
    noted there, and counted in bulk.

    `label` is the space's name in metrics.
    """
    count_remotes(space, metrics)
    for pool in space.pools:
        tier = pool.tier.name.lower()
        metrics.add("kvbm_namespace_evicted_blocks_total", pool.evicted_count, namespace=label, tier=tier)
        for reason, blocks in pool.evicted.items():
            metrics.add("kvbm_evicted_blocks_total", blocks, tier=tier, reason=reason)
        pool.evicted.clear()
        if (favours := pool.favouring.favours) is not None:
            metrics.add("kvbm_evicted_retained_blocks_total", favours.evicted_retained, tier=tier)
            favours.evicted_retained = 0
            for favour, blocks in favours.spared.items():
                metrics.add("kvbm_spared_blocks_total", blocks, tier=tier, favour=favour)
                favours.spared[favour] = 0


def forget_blocks(label: str, space: Space, metrics: Metrics) -> None:
    """A space is closed: none of its blocks can be found until there is one of its name again."""
    for pool in space.pools:
        metrics.set("kvbm_namespace_blocks", 0, namespace=label, tier=pool.tier.name.lower())


def publish_gauges(named: Sequence[tuple[str, Space]], metrics: Metrics) -> None:
    """Bring occupancy, queues, evictions and the state of the tiers up to date; each space has its name in metrics."""
    spaces = [space for _, space in named]
    resident: Counter[tuple[str, str]] = Counter()
    capacity: Counter[str] = Counter()
    leased: Counter[str] = Counter()
    retained: Counter[str] = Counter()
    blocks: Counter[tuple[str, str]] = Counter()
    queues: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    ages_s: dict[str, float] = {}
    for label, space in named:
        count_in_bulk(label, space, metrics)
        for pool in space.pools:
            tier, counts = pool.tier.name.lower(), pool.counts()
            capacity[tier] += pool.slot_count
            leased[tier] += counts.leased
            retained[tier] += pool.favouring.retained_count
            resident[label, tier] += counts.resident
            for state in ("free", "filling", "resident"):
                blocks[tier, state] += getattr(counts, state)
        if space.disk is not None:
            for queue, lane in (("onboard", space.disk.onboarder), ("offload", space.disk.offloader)):
                queues[queue] += lane.queued_count
                ages_s[queue] = max(ages_s.get(queue, 0.0), lane.oldest_s())
            faults["disk"] += bool(space.disk.trouble or space.failure)
        faults["host"] += bool(space.failure)
    _publish_remotes(spaces, metrics)
    metrics.set("kvbm_leases", sum(len(space.leases) for space in spaces))
    for tier in capacity:
        metrics.set("kvbm_pool_capacity_blocks", capacity[tier], tier=tier)
        metrics.set("kvbm_leased_blocks", leased[tier], tier=tier)
        metrics.set("kvbm_retained_blocks", retained[tier], tier=tier)
        if tier != "host" or not all(space.options.staging for space in spaces):
            metrics.set("kvbm_tier_up", 0 if faults[tier] else 1, tier=tier)
    for (tier, state), number in blocks.items():
        metrics.set("kvbm_pool_blocks", number, tier=tier, state=state)
    for (label, tier), number in resident.items():
        metrics.set("kvbm_namespace_blocks", number, namespace=label, tier=tier)
    for queue, waiting in queues.items():
        metrics.set("kvbm_queue_blocks", waiting, queue=queue)
        metrics.set("kvbm_queue_age_seconds", ages_s[queue], queue=queue)
    if hit_bytes := metrics.value("kvbm_hit_bytes_total", tier="disk"):
        written_bytes = metrics.value("kvbm_transfer_bytes_total", source="host", target="disk")
        metrics.set("kvbm_disk_write_bytes_per_hit_byte", written_bytes / hit_bytes)


def count_remotes(space: Space, metrics: Metrics) -> None:
    """Count what the remote tiers of a space have done since the last time; they count from their start."""
    for side in space.remotes:
        report, before = report_remote(side), side.counted
        for name, labels, now in _grown(report):
            key = " ".join((name, *labels.values()))
            metrics.add(name, max(0, now - before[key]), **labels)
            before[key] = now


def _grown(report: RemoteReport) -> Iterator[tuple[str, dict[str, str], int]]:
    for kind in REQUESTS:
        yield "kvbm_remote_requests_total", {"kind": kind}, report.requests.get(kind, 0)
    yield "kvbm_remote_errors_total", {"operation": "read"}, report.read_errors
    yield "kvbm_remote_errors_total", {"operation": "write"}, report.write_errors
    yield "kvbm_remote_errors_total", {"operation": "touch"}, report.touch_errors
    yield "kvbm_remote_touched_packs_total", {}, report.touched
    yield "kvbm_remote_compressed_packs_total", {}, report.compressed_packs


def _publish_remotes(spaces: Sequence[Space], metrics: Metrics) -> None:
    """The queues between host memory and the remote tiers, how those are, and whether all of them work."""
    sides = [(space, side) for space in spaces for side in space.remotes]
    if not sides:
        return
    up = not any(side.fault or space.failure for space, side in sides)
    metrics.set("kvbm_tier_up", int(up), tier="remote")
    for queue, lanes in (
        ("remote_onboard", [side.onboarder for _, side in sides]),
        ("remote_offload", [side.writer for _, side in sides if side.writer is not None]),
    ):
        metrics.set("kvbm_queue_blocks", sum(lane.queued_count for lane in lanes), queue=queue)
        oldest_s = max((lane.oldest_s() for lane in lanes), default=0.0)
        metrics.set("kvbm_queue_age_seconds", oldest_s, queue=queue)
    reports = [report_remote(side) for _, side in sides]
    metrics.set("kvbm_remote_known_blocks", sum(report.blocks for report in reports))
    metrics.set("kvbm_remote_known_packs", sum(report.packs for report in reports))
    metrics.set("kvbm_remote_latency_seconds", max(report.latency_s for report in reports))
    for state in BREAKER_STATES:
        reading, writing = (
            sum(one == state for one in each)
            for each in zip(*((report.reading, report.writing) for report in reports), strict=True)
        )
        metrics.set("kvbm_remote_breakers", reading, operation="read", state=state)
        metrics.set("kvbm_remote_breakers", writing, operation="write", state=state)
    for transport in TRANSPORTS:
        links = sum(report.links.get(transport, 0) for report in reports)
        metrics.set("kvbm_peer_links", links, transport=transport)
    reached = sum(report.nodes_reached for report in reports)
    metrics.set("kvbm_peer_nodes", reached, reached="yes")
    metrics.set("kvbm_peer_nodes", sum(report.nodes for report in reports) - reached, reached="no")
    metrics.set("kvbm_peer_directory_away", int(any(report.directory_fault for report in reports)))
