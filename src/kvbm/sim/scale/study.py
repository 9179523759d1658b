"""Simulates many clusters on one trace: rows of nodes, routers, remote tiers and loads."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec

from kvbm.errors import SettingsError
from kvbm.policy import eviction_policies
from kvbm.present.numbers import quantile
from kvbm.sim.scale.cluster import Cluster, ClusterRun, ClusterShape, Remote
from kvbm.sim.scale.routing import ROUTERS, Loads
from kvbm.sim.scale.traffic import ClusterTraffic, trace_load
from kvbm.sim.serving.machine import Machine
from kvbm.sim.simulate.simulation import SYNTHETIC, Watch, open_trace
from kvbm.sim.simulate.sizes import parse_sizes
from kvbm.sim.traces.formats import ReadOptions
from kvbm.sim.traces.trace import Trace


class ScaleStudy(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one call of `kvbm scale`. `loads`: seconds of prefill for each node and second, without cache."""

    trace: str
    nodes: list[int]
    routers: list[str]
    remotes: list[str]
    loads: list[float]
    total_load: float | None
    host: str
    remote_size: str
    bytes_per_token: int
    chunk_tokens: int | None
    minutes: float
    warm_up_minutes: float
    seeds: list[int]
    policy: str
    closed_loop: bool
    prefill_tokens_per_s: float
    network_bytes_per_s: float
    store_bytes_per_s: float | None

    def check(self) -> None:
        """`SettingsError` for options that cannot be run, whatever the trace holds."""
        for name in self.routers:
            if name not in ROUTERS:
                raise SettingsError("--router", name, f"one of {', '.join(ROUTERS)}")
        for name in self.remotes:
            if name not in {kind.value for kind in Remote}:
                raise SettingsError("--remote", name, f"one of {', '.join(kind.value for kind in Remote)}")
        if self.policy not in (known := eviction_policies()):
            raise SettingsError("--policy", self.policy, f"one of {', '.join(known)}")
        if not 0.0 <= self.warm_up_minutes < float("inf"):
            raise SettingsError("--warm-up", self.warm_up_minutes, "a number, 0 or above")
        for option, text in (("--host", self.host), ("--remote-size", self.remote_size)):
            if len(parse_sizes(option, text)) > 1:
                raise SettingsError(option, text, "one size; a call for each to compare")
        if self.bytes_per_token < 1:
            raise SettingsError("--bytes-per-token", self.bytes_per_token, "at least one byte")
        if self.trace != SYNTHETIC and not Path(self.trace).exists():
            raise SettingsError("TRACE", self.trace, f"an existing file or directory, or {SYNTHETIC}")


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster. Rates are shares of the blocks asked for, times are seconds, loads are for the mean node.

    Counted were `measured_s` seconds after `warm_up_s`, less than asked for where the trace is shorter. `offered_load`:
    prefill of all that arrived, without a cache; `load`: prefill that was left; `imbalance`: the busiest node over the
    mean one. `read` and `written`: remote tier, bytes a second of the mean node.
    """

    trace: str
    nodes: int
    router: str
    remote: str
    wanted_load: float
    seeds: int
    warm_up_s: float
    measured_s: float
    requests: int
    host_hit_rate: float
    hit_rate: float
    declined_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    offered_load: float
    load: float
    imbalance: float
    read_bytes_per_s: float
    written_bytes_per_s: float


def run(study: ScaleStudy, watch: Watch) -> list[ScaleRow]:
    """Simulate everything. `SettingsError` where a size does not fit the trace."""
    watch(f"reading {Path(study.trace).name}", 0)
    trace = open_trace(study.trace, ReadOptions(chunk_tokens=study.chunk_tokens))
    rows = []
    for load in [study.total_load] if study.total_load is not None else study.loads:
        for nodes in study.nodes:
            found = [_at(study, trace, nodes, load, seed, watch) for seed in study.seeds]
            rows += [_mean(same) for same in zip(*found, strict=True)]
    return rows


def _at(
    study: ScaleStudy, trace: Trace, nodes: int, wanted: float, seed: int, watch: Watch
) -> list[ScaleRow]:
    """All routers and remote tiers on the same traffic."""
    machine = Machine(study.bytes_per_token * trace.block_tokens, study.prefill_tokens_per_s)
    per_node = wanted / nodes if study.total_load is not None else wanted
    copies = per_node / trace_load(trace, machine)
    seconds = 60.0 * (study.warm_up_minutes + study.minutes)
    traffic = ClusterTraffic(trace, copies * nodes, seconds, seed, study.closed_loop)
    # A trace that is shorter than asked for is divided in the same proportion.
    warm_up_s = 60.0 * study.warm_up_minutes * min(1.0, traffic.seconds / seconds)
    host = parse_sizes("--host", study.host)[0].blocks_of(trace, study.bytes_per_token)
    below = parse_sizes("--remote-size", study.remote_size)[0].blocks_of(trace, study.bytes_per_token)
    rows = []
    for remote in map(Remote, study.remotes):
        shape = ClusterShape(
            nodes=nodes,
            machine=machine,
            block_tokens=trace.block_tokens,
            host_blocks=host,
            remote=remote,
            remote_blocks=below,
            network_bytes_per_s=study.network_bytes_per_s,
            store_bytes_per_s=study.store_bytes_per_s if remote is Remote.SHARED else None,
            policy=study.policy,
        )
        for router in study.routers:
            on_progress = watch(f"{nodes} nodes, {router}, remote {remote.value}", len(traffic))
            loads = Loads(nodes)
            cluster = Cluster(shape, ROUTERS[router](nodes, loads, seed), loads)
            result = cluster.run(traffic, warm_up_s, on_progress)
            rows.append(_row(trace.name, shape, router, wanted, result, warm_up_s))
    return rows


def _row(
    trace: str,
    shape: ClusterShape,
    router: str,
    wanted: float,
    result: ClusterRun,
    warm_up_s: float,
) -> ScaleRow:
    waits = result.ttft_s
    return ScaleRow(
        trace=trace,
        nodes=shape.nodes,
        router=router,
        remote=shape.remote.value,
        wanted_load=wanted,
        seeds=1,
        warm_up_s=warm_up_s,
        measured_s=result.seconds,
        requests=len(waits),
        host_hit_rate=result.host_hit_rate,
        hit_rate=result.hit_rate,
        declined_rate=result.declined_blocks / result.blocks if result.blocks else 0.0,
        ttft_mean_s=fmean(waits) if waits else 0.0,
        ttft_p50_s=quantile(waits, 0.5),
        ttft_p99_s=quantile(waits, 0.99),
        offered_load=result.offered_load,
        load=result.load,
        imbalance=result.imbalance,
        read_bytes_per_s=result.read_bytes_per_s,
        written_bytes_per_s=result.written_bytes_per_s,
    )


def _mean(rows: tuple[ScaleRow, ...]) -> ScaleRow:
    """The mean over seeds of every measured number, without seeds that brought no request."""
    total = len(rows)
    rows = tuple(row for row in rows if row.requests) or rows[:1]
    fixed = {"trace", "nodes", "router", "remote", "wanted_load", "seeds", "requests"}
    changes: dict[str, float | int] = {"seeds": total, "requests": sum(row.requests for row in rows)}
    for name in ScaleRow.__struct_fields__:
        if name not in fixed:
            changes[name] = fmean(getattr(row, name) for row in rows)
    return msgspec.structs.replace(rows[0], **changes)
