"""Many replays of one trace, as rows: policies by sizes, hit rates or times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

import msgspec

from kvbm.grouping import Grouping
from kvbm.policy import make_policy
from kvbm.present.numbers import quantile
from kvbm.sim.replay import optimum
from kvbm.sim.replay.grouped import grouped_replay
from kvbm.sim.replay.published import NAMES as PUBLISHED
from kvbm.sim.replay.published import published_replay
from kvbm.sim.replay.replay import Replay, replay
from kvbm.sim.replay.sampling import Sample
from kvbm.sim.serving.disk import DiskRules
from kvbm.sim.serving.engine import Served, SimulatedEngine
from kvbm.sim.serving.hybrid import Slots
from kvbm.sim.serving.machine import Machine
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.said import Told
from kvbm.sim.traces.trace import Trace

BASELINE = "lru"
HIT_RATES_ALONE = (optimum.NAME, *PUBLISHED)
"""Without times, groups or hints: no policy object can be driven by them."""

Progress = Callable[[int], None]
"""Called with the number of requests of the run that are done."""


class Setup(NamedTuple):
    """The tiers that serve a trace: each a size as written and its blocks; a tier of 0 blocks is off."""

    policy: str = ""
    host: tuple[str, int] = ("", 0)
    disk: tuple[str, int] = ("", 0)
    rules: DiskRules = DiskRules()
    told: Told | None = None


class HitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one size. `gap_closed`: 0 is LRU's hit rate at this size, 1 the optimum's. `hints` is what it was
    told (a `said.Kind`; empty: nothing).

    `sampling_error` is what sampling alone did to LRU's hit rate at this size; None without sampling.
    """

    trace: str
    seed: int
    policy: str
    size: str
    blocks: int
    hit_rate: float
    accesses_per_s: float
    gap_closed: float | None = None
    sampling_error: float | None = None
    hints: str = ""


class TimeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy with its tiers on one machine; `policy` is empty where there is no cache. Times in seconds.

    `skipped_writes`: blocks that were admitted to disk and did not get there.
    """

    trace: str
    seed: int
    policy: str
    host: str
    host_blocks: int
    disk: str
    disk_blocks: int
    host_hit_rate: float
    disk_hit_rate: float
    declined_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    load: float
    disk_written_bytes: int
    written_per_hit: float | None
    skipped_writes: int
    hints: str = ""


def label(row: HitRow | TimeRow) -> str:
    """The policy and what it was told, in words."""
    return f"{row.policy}, {row.hints} hints" if row.hints else row.policy


def hit_row(
    trace: Trace,
    seed: int,
    policy: str,
    size: str,
    blocks: int,
    sample: Sample | None,
    on_progress: Progress,
    clock: Callable[[], float] = time.perf_counter,
    slots: Slots | None = None,
    told: Told | None = None,
) -> HitRow:
    """Replay the trace, or the sample of it, through one tier of `blocks` blocks, of the groups of `slots` if given.

    `told` is of the trace that is replayed.
    """
    accesses, seconds = 0, 0.0

    def measured(replayed: Trace, capacity: int) -> float:
        nonlocal accesses, seconds
        started_s = clock()
        result = run_policy(replayed, policy, capacity, on_progress, slots, told)
        accesses, seconds = result.accesses, clock() - started_s
        return result.hit_rate

    error = None
    if sample is None:
        hit_rate = measured(trace, blocks)
    else:
        estimate = sample.estimate(blocks, measured)
        hit_rate, error = estimate.hit_rate, estimate.error
    return HitRow(
        trace=trace.name,
        seed=seed,
        policy=policy,
        size=size,
        blocks=blocks,
        hit_rate=hit_rate,
        accesses_per_s=accesses / seconds if seconds else 0.0,
        sampling_error=error,
        hints=told.kind.value if told is not None else "",
    )


def run_policy(
    trace: Trace,
    policy: str,
    capacity: int,
    on_progress: Progress,
    slots: Slots | None = None,
    told: Told | None = None,
) -> Replay:
    """One replay; `policy` is a name of the registry, or, without groups, one of `HIT_RATES_ALONE`."""
    if slots is not None:
        made = make_policy(policy, capacity)
        return grouped_replay(trace, Grouping(slots.groups), capacity, made, on_progress)
    if policy == optimum.NAME:
        return optimum.optimum(trace, capacity, on_progress)
    if policy in PUBLISHED:
        return published_replay(trace, policy, capacity, on_progress)
    return replay(trace, capacity, make_policy(policy, capacity), on_progress, told)


def with_gaps(rows: Sequence[HitRow]) -> list[HitRow]:
    """The same rows with `gap_closed`, wherever LRU and the optimum were run at the same size."""
    known = {(row.trace, row.seed, row.blocks, row.policy): row.hit_rate for row in rows if not row.hints}
    answer = []
    for row in rows:
        low = known.get((row.trace, row.seed, row.blocks, BASELINE))
        high = known.get((row.trace, row.seed, row.blocks, optimum.NAME))
        gap = None
        if low is not None and high is not None and high > low:
            gap = (row.hit_rate - low) / (high - low)
        answer.append(msgspec.structs.replace(row, gap_closed=gap))
    return answer


def time_row(
    trace: Trace, seed: int, machine: Machine, setup: Setup, closed_loop: bool, on_progress: Progress
) -> TimeRow:
    """Serve the trace."""
    (_, host_blocks), (_, disk_blocks), rules = setup.host, setup.disk, setup.rules
    host = disk = admission = None
    if host_blocks:
        host = SimulatedTier(host_blocks, make_policy(setup.policy, host_blocks), insist=bool(disk_blocks))
    if disk_blocks:
        disk = SimulatedTier(disk_blocks, make_policy(setup.policy, disk_blocks))
        admission = rules.admission_policy(disk_blocks, machine.block_bytes)
    engine = SimulatedEngine(trace, machine, host, disk, admission, closed_loop, told=setup.told)
    served = engine.run(on_progress)
    return _as_row(served, trace.name, seed, setup)


def _as_row(served: Served, trace: str, seed: int, setup: Setup) -> TimeRow:
    host, disk = setup.host, setup.disk
    return TimeRow(
        trace=trace,
        seed=seed,
        policy=setup.policy if host[1] else "",
        host=host[0],
        host_blocks=host[1],
        disk=disk[0],
        disk_blocks=disk[1],
        host_hit_rate=served.host_hit_rate,
        disk_hit_rate=served.disk_hit_rate,
        declined_rate=served.declined_blocks / served.blocks if served.blocks else 0.0,
        ttft_mean_s=fmean(served.ttft_s),
        ttft_p50_s=quantile(served.ttft_s, 0.5),
        ttft_p90_s=quantile(served.ttft_s, 0.9),
        ttft_p99_s=quantile(served.ttft_s, 0.99),
        load=served.load,
        disk_written_bytes=served.disk_written_bytes,
        written_per_hit=served.written_per_hit,
        skipped_writes=served.skipped_writes,
        hints=setup.told.kind.value if setup.told is not None else "",
    )


_Row = TypeVar("_Row", HitRow, TimeRow)
_NAMED = {"trace", "seed", "policy", "size", "host", "disk", "hints"}


def averaged(rows: Sequence[_Row]) -> list[_Row]:
    """One row for all seeds: the mean of every number."""
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        names = [str(getattr(row, field)) for field in row.__struct_fields__ if field in _NAMED - {"seed"}]
        groups.setdefault(tuple(names), []).append(row)
    return [_mean(group) for group in groups.values()]


def spread(rows: Sequence[HitRow], like: HitRow) -> float:
    """Half of the distance between the best and the worst hit rate that any seed gave."""
    same = (like.trace, label(like), like.size)
    rates = [row.hit_rate for row in rows if (row.trace, label(row), row.size) == same]
    return (max(rates) - min(rates)) / 2


def _mean(group: Sequence[_Row]) -> _Row:
    if len(group) == 1:
        return group[0]
    changes: dict[str, float | int | None] = {}
    for field in group[0].__struct_fields__:
        values = [value for row in group if (value := getattr(row, field)) is not None]
        if field not in _NAMED:
            mean = fmean(values) if values else None
            whole = values and isinstance(values[0], int)
            changes[field] = round(mean) if whole and mean is not None else mean
    return msgspec.structs.replace(group[0], **changes)
