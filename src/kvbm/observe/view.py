"""Two moments of a manager → rates: what a person looks at. Pure, so that every renderer shows the same numbers.

Rates are over the window between the two moments. A moment of another life of the manager is not compared with.
"""

from __future__ import annotations

import msgspec

from kvbm.admin_protocol import (
    EngineReport,
    Moment,
    PrefixReport,
    Series,
    SnapshotReply,
    SpaceReport,
)
from kvbm.observe.metric_table import CACHE_TIERS
from kvbm.observe.verdict import Finding, Signs, judge

FLOWS = (("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host"))
REMOTE_FLOWS = (("host", "remote"), ("remote", "host"))
_HOST, _DISK, _REMOTE = "host", "disk", "remote"


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, over all namespaces. `hit_share` is the part of the blocks asked for in the window that it held.

    Sizes are bytes; `used_share` and `leased_share` are parts of its capacity, `evicted_per_s` is in blocks. Of a
    remote tier nobody knows the capacity: that and the shares are 0, and `resident_blocks` are those that the manager
    knows of.
    """

    name: str
    capacity_blocks: int
    resident_blocks: int
    filling_blocks: int
    leased_blocks: int
    capacity_bytes: int
    used_bytes: int
    used_share: float
    leased_share: float
    hit_blocks: float
    hit_share: float
    evicted_per_s: float
    up: bool
    staging: bool


class FlowView(msgspec.Struct, frozen=True, kw_only=True):
    """What moved from one tier to another in the window; `mean_s` is the mean time of a transfer, or None."""

    source: str
    target: str
    bytes_per_s: float
    bytes_moved: float
    mean_s: float | None


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in the queues of all namespaces, those to and from remote stores apart, and the leases and reservations
    that are held."""

    onboarding: int
    offloading: int
    remote_onboarding: int
    remote_offloading: int
    leases: int
    reservations: int


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All that a screen shows. `asked`, `hit` and `lost` count in `unit`: tokens, or blocks where namespaces have
    blocks of different lengths. `saved_s` is the time of prefill that the loads of the window saved, as the engines
    estimate it; `lost_lookups` found nothing of a prefix that had been asked for before. `epoch` is another one in each
    life of the manager."""

    version: str
    pid: int
    epoch: int
    uptime_s: float
    window_s: float
    unit: str
    lookups_per_s: float
    asked: float
    hit: float
    loaded: float
    hit_rate: float
    saved_s: float
    lost_lookups: float
    findings: tuple[Finding, ...]
    tiers: tuple[TierView, ...]
    flows: tuple[FlowView, ...]
    flows_window_s: float
    queues: QueueView
    spaces: tuple[SpaceReport, ...]
    engines: tuple[EngineReport, ...]
    prefixes: tuple[PrefixReport, ...]


class Deltas:
    """By how much the series have grown from one moment to a later one."""

    def __init__(self, before: Moment, after: Moment) -> None:
        self._after = after.by_series()
        self._before = before.by_series()
        self.seconds = after.at_s - before.at_s

    def grown(self, name: str, *labels: str) -> float:
        """The growth of one series; all of it where it has begun anew."""
        series: Series = (name, labels)
        after = self._after.get(series, 0.0)
        before = self._before.get(series, 0.0)
        return after - before if after >= before else after

    def total(self, name: str) -> float:
        """The growth of a metric over all its labels."""
        return sum(self.grown(*_flat(series)) for series in self._after if series[0] == name)

    def per_s(self, name: str, *labels: str) -> float:
        """`grown` for each second of the window."""
        return self.grown(name, *labels) / self.seconds if self.seconds > 0 else 0.0

    def now(self, name: str, *labels: str, default: float = 0.0) -> float:
        """A gauge's present value."""
        return self._after.get((name, labels), default)


def look(state: SnapshotReply, before: Moment | None = None, recent: Moment | None = None) -> View:
    """The view of the window from `before`, or from about a minute ago, to the state's moment. Flows and evictions,
    which change from second to second, begin at `recent` where it is given."""
    deltas = Deltas(_within(state, before) or state.earlier, state.now)
    lately = Deltas(_within(state, recent) or _within(state, before) or state.earlier, state.now)
    lengths = {space.block_tokens for space in state.manager.spaces}
    one_length = len(lengths) <= 1
    tokens = lengths.pop() if len(lengths) == 1 else 1
    asked = deltas.grown("kvbm_queried_blocks_total") * tokens
    hits = {tier: deltas.grown("kvbm_hit_blocks_total", tier) for tier in CACHE_TIERS}
    loaded = sum(
        deltas.grown(name)
        for name in ("kvbm_onboard_blocks_h2d", "kvbm_onboard_blocks_d2d", "kvbm_onboard_blocks_o2d")
    )
    hit = sum(hits.values()) * tokens
    tiers = _tiers(state, deltas, lately, hits)
    view = View(
        version=state.manager.version,
        pid=state.manager.pid,
        epoch=state.manager.epoch,
        uptime_s=state.manager.uptime_s,
        window_s=deltas.seconds,
        unit="tokens" if one_length else "blocks",
        lookups_per_s=_share(deltas.total("kvbm_lookups_total"), deltas.seconds),
        asked=asked,
        hit=hit,
        loaded=loaded * tokens,
        hit_rate=_share(hit, asked),
        saved_s=deltas.grown("kvbm_saved_prefill_seconds_total"),
        lost_lookups=deltas.grown("kvbm_lost_prefixes_total"),
        findings=(),
        tiers=tiers,
        flows=_flows(lately, FLOWS + (REMOTE_FLOWS if any(tier.name == _REMOTE for tier in tiers) else ())),
        flows_window_s=lately.seconds,
        queues=QueueView(
            onboarding=sum(space.onboard_blocks for space in state.manager.spaces),
            offloading=sum(space.offload_blocks for space in state.manager.spaces),
            remote_onboarding=sum(each.up_blocks for space in state.manager.spaces for each in space.remotes),
            remote_offloading=sum(
                each.down_blocks for space in state.manager.spaces for each in space.remotes
            ),
            leases=sum(space.leases for space in state.manager.spaces),
            reservations=sum(space.reservations for space in state.manager.spaces),
        ),
        spaces=state.manager.spaces,
        engines=state.manager.engines,
        prefixes=state.prefixes,
    )
    return msgspec.structs.replace(view, findings=judge(_signs(view, deltas)))


def _within(state: SnapshotReply, moment: Moment | None) -> Moment | None:
    """The moment, if it is an earlier one of this life of the manager; a millisecond is for rounding."""
    began_s = state.now.at_s - state.manager.uptime_s - 0.001
    return moment if moment is not None and began_s <= moment.at_s < state.now.at_s else None


def _tiers(
    state: SnapshotReply, deltas: Deltas, lately: Deltas, hits: dict[str, float]
) -> tuple[TierView, ...]:
    asked = deltas.grown("kvbm_queried_blocks_total")
    found = {tier.tier for space in state.manager.spaces for tier in space.tiers}
    views = []
    for name in sorted(found, key=CACHE_TIERS.index):
        parts = [(space, tier) for space in state.manager.spaces for tier in space.tiers if tier.tier == name]
        capacity = sum(tier.blocks for _, tier in parts)
        used = sum(tier.resident + tier.filling for _, tier in parts)
        leased = sum(tier.leased for _, tier in parts)
        views.append(
            TierView(
                name=name,
                capacity_blocks=capacity,
                resident_blocks=sum(tier.resident for _, tier in parts),
                filling_blocks=sum(tier.filling for _, tier in parts),
                leased_blocks=leased,
                capacity_bytes=sum(space.block_bytes * tier.blocks for space, tier in parts),
                used_bytes=sum(space.block_bytes * (tier.resident + tier.filling) for space, tier in parts),
                used_share=_share(used, capacity),
                leased_share=_share(leased, capacity),
                hit_blocks=hits[name],
                hit_share=_share(hits[name], asked),
                evicted_per_s=lately.per_s("kvbm_evicted_blocks_total", name, "capacity"),
                up=deltas.now("kvbm_tier_up", name, default=1.0) > 0,
                staging=name == _HOST and all(space.staging for space, _ in parts),
            )
        )
    return tuple(views)


def _flows(deltas: Deltas, pairs: tuple[tuple[str, str], ...]) -> tuple[FlowView, ...]:
    flows = []
    for source, target in pairs:
        transfers = deltas.grown("kvbm_transfer_seconds_count", source, target)
        seconds = deltas.grown("kvbm_transfer_seconds_sum", source, target)
        flows.append(
            FlowView(
                source=source,
                target=target,
                bytes_per_s=deltas.per_s("kvbm_transfer_bytes_total", source, target),
                bytes_moved=deltas.grown("kvbm_transfer_bytes_total", source, target),
                mean_s=seconds / transfers if transfers else None,
            )
        )
    return tuple(flows)


def _signs(view: View, deltas: Deltas) -> Signs:
    tiers = {tier.name: tier for tier in view.tiers}
    host, disk = tiers.get(_HOST), tiers.get(_DISK)
    unloaded = "kvbm_unloaded_blocks_total"
    found = sum(tier.hit_blocks for tier in view.tiers)
    return Signs(
        window_s=view.window_s,
        uptime_s=view.uptime_s,
        unit=view.unit,
        engines=len(view.engines),
        incomplete=tuple(
            (engine.engine, engine.rank_count - len(engine.ranks), engine.rank_count)
            for engine in view.engines
            if len(engine.ranks) < engine.rank_count
        ),
        faults=tuple(
            (space.namespace, fault)
            for space in view.spaces
            for fault in (
                space.fault,
                *(f"{tier.tier}: {tier.fault}" for tier in space.tiers if tier.fault),
                *(
                    f"{_REMOTE}: {each.store_fault}"
                    for each in space.remotes
                    if each.store_fault and not each.fault
                ),
                *(f"{_REMOTE}: {each.fleet_fault}" for each in space.remotes if each.fleet_fault),
            )
            if fault
        ),
        lookups=view.lookups_per_s * view.window_s,
        asked=view.asked,
        hit_rate=view.hit_rate,
        loaded=view.loaded,
        saved_s=view.saved_s,
        lost_lookups=view.lost_lookups,
        corrupt=sum(deltas.grown("kvbm_failures_total", tier, "corrupt") for tier in (_HOST, _DISK)),
        corrupt_remote=deltas.grown("kvbm_failures_total", _REMOTE, "corrupt"),
        failed=sum(
            deltas.grown("kvbm_failures_total", tier, kind) for tier in CACHE_TIERS for kind in ("io", "load")
        ),
        host_full=host is not None and not host.staging and host.used_share > 0.95,
        host_evicted_per_s=deltas.per_s("kvbm_evicted_blocks_total", _HOST, "capacity"),
        host_leased_share=host.leased_share if host is not None else 0.0,
        has_disk=disk is not None,
        has_remote=_REMOTE in tiers,
        remote_hit_share=_share(tiers[_REMOTE].hit_blocks, found) if _REMOTE in tiers else 0.0,
        remote_written_blocks=deltas.grown("kvbm_offload_blocks_d2o"),
        remote_too_late_blocks=deltas.grown("kvbm_remote_skipped_blocks_total", "evicted"),
        remote_over_budget_blocks=deltas.grown("kvbm_remote_skipped_blocks_total", "budget"),
        disk_full=disk is not None and disk.used_share > 0.95,
        disk_evicted_per_s=deltas.per_s("kvbm_evicted_blocks_total", _DISK, "capacity"),
        disk_hit_share=_share(disk.hit_blocks, found) if disk is not None else 0.0,
        cost_share=_share(deltas.grown(unloaded, "cost"), found),
        late_share=_share(deltas.grown(unloaded, "deadline"), found),
        no_room_share=_share(deltas.grown(unloaded, "no_room"), found),
        refused_stores=deltas.grown("kvbm_skipped_offloads_total", "full"),
        written_bytes=sum(
            deltas.grown("kvbm_transfer_bytes_total", _HOST, tier) for tier in (_DISK, _REMOTE)
        ),
        stored_bytes=deltas.grown("kvbm_transfer_bytes_total", "device", _HOST),
        onboarding=view.queues.onboarding + view.queues.remote_onboarding,
    )


def _flat(series: Series) -> tuple[str, ...]:
    return (series[0], *series[1])


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def start_of(state: SnapshotReply) -> Moment:
    """The moment at which the manager began: nothing was counted yet."""
    return Moment(at_s=state.now.at_s - state.manager.uptime_s)
