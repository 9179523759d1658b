"""Finds the cheapest sizes of the tiers that meet a target on a trace, for `kvbm plan`.

A target of hit rates is met by one tier, as host memory or as disk: a hit rate does not say where a block came from.
A target of times to first token is met by host memory with or without a disk below, replayed with their speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgspec

from kvbm.errors import KvbmError, SettingsError
from kvbm.present.numbers import format_bytes, quantile
from kvbm.settings import Settings
from kvbm.sim.plan.cheapest import (
    Bounds,
    Candidate,
    Point,
    Prices,
    Search,
    Target,
    coarse,
    sizes_between,
    smallest_enough,
)
from kvbm.sim.replay.curves import LruCurve, lru_curve
from kvbm.sim.replay.sampling import Sample
from kvbm.sim.serving.disk import DiskRules
from kvbm.sim.serving.hybrid import HybridModel
from kvbm.sim.serving.machine import Machine
from kvbm.sim.simulate.report import TraceFacts, facts
from kvbm.sim.simulate.simulation import Simulation, Watch, open_trace
from kvbm.sim.simulate.study import BASELINE, Progress, Setup, hit_row, time_row
from kvbm.sim.traces.formats import ReadOptions
from kvbm.sim.traces.trace import Trace

HOST_SPAN, DISK_SPAN = 100, 10
"""The smallest size tried is this part of the bytes of all different blocks."""
PRECISION = 0.01
"""Where a size takes a replay, bisection ends this close to the smallest that meets."""
CURVE_POINTS = 200
REPLAYS = 80
DAY_S = 86_400.0
STAGING_BYTES = Settings().staging_bytes


class Answer(msgspec.Struct, kw_only=True):
    """The answer for one trace. `chosen` is the cheapest that meets; without one `why_none` says why.

    `lru_curve`: (blocks, hit rate) of LRU at all sizes, for a target of hit rates. `notes`: cuts and estimates.
    """

    trace: TraceFacts
    target: Target
    policy: str
    prices: Prices
    rules: DiskRules
    candidates: list[Candidate] = msgspec.field(default_factory=list)
    chosen: Candidate | None = None
    why_none: str = ""
    replays: int = 0
    notes: list[str] = msgspec.field(default_factory=list)
    lru_curve: Sequence[tuple[int, float]] = ()


class Answers(msgspec.Struct, kw_only=True):
    """One answer for each trace, as `--json` writes them."""

    settings: dict[str, object]
    plans: list[Answer] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The options of one call of `kvbm plan`. `machine` is set for a target of times; its `block_bytes` follow later.

    `reading.limit` is None: `limit` is applied here, where a note can say how much was cut. At most `replays` replays.
    """

    traces: list[str]
    target: Target
    bytes_per_token: int | None
    model: HybridModel | None = None
    policy: str = Settings().eviction
    prices: Prices = field(default_factory=lambda: Prices(assumed=True))
    bounds: Bounds = field(default_factory=Bounds)
    reading: ReadOptions = field(default_factory=ReadOptions)
    limit: int | None = None
    sample: float | None = None
    replays: int = REPLAYS
    machine: Machine | None = None
    rules: DiskRules = field(default_factory=DiskRules)
    closed_loop: bool = True

    def check(self) -> None:
        """`SettingsError` for options that cannot be run, whatever the traces hold."""
        if self.bytes_per_token is None and self.model is None:
            raise KvbmError(
                "sizes have a price only with the KV of a token: --bytes-per-token 128KiB, or --model DIR"
            )
        if self.sample is not None and self.target.most_s is not None:
            raise SettingsError("--sample", self.sample, "nothing with --target-ttft: a sample has no queue")
        if self.model is not None and self.target.most_s is not None:
            accepted = "with --target-ttft a model without groups: their times are not simulated; --target-hit-rate is"
            raise SettingsError("--model", self.model.name, accepted)
        Simulation(
            traces=self.traces,
            policies=[self.policy],
            host=[],
            reading=self.reading,
            model=self.model,
            sample=self.sample,
            rules=self.rules,
        ).check()
        if self.bounds.host_bytes == 0 and (self.target.most_s is not None or self.bounds.disk_bytes == 0):
            raise SettingsError(
                "--max-host",
                0,
                "more than 0: without host memory only a target of hit rates is met, from disk",
            )


def answer(question: Question, watch: Watch) -> Answers:
    """Every trace's answer. `TraceError` for files that cannot be read."""
    settings: dict[str, object] = {
        "policy": question.policy,
        "bytes_per_token": question.bytes_per_token,
        "model": question.model.name if question.model is not None else None,
        "bounds": question.bounds,
        "reading": question.reading,
        "limit": question.limit,
        "sample": question.sample,
        "replays": question.replays,
        "machine": question.machine,
        "disk_rules": question.rules,
        "closed_loop": question.closed_loop,
    }
    answers = Answers(settings=settings)
    for word in dict.fromkeys(question.traces):
        watch(f"reading {word}", 0)
        trace = open_trace(word, question.reading)
        cut = ""
        if question.limit is not None and question.limit < len(trace.requests):
            cut = (
                f"only the first {question.limit:,} of {len(trace.requests):,} requests were replayed (--limit): "
                "the whole trace needs more room"
            )
            trace = first_requests(trace, question.limit)
        answers.plans.append(answer_for(question, word, trace, watch))
        if cut:
            answers.plans[-1].notes.insert(0, cut)
    return answers


def answer_for(question: Question, word: str, trace: Trace, watch: Watch) -> Answer:
    """One trace's answer; `word` is where it is from. The same arguments give the same answer."""
    return _Planning(question, word, trace, watch).answer()


def first_requests(trace: Trace, limit: int) -> Trace:
    """The first `limit` requests. Blocks are numbered by first use, so the numbers left are still dense."""
    requests = trace.requests[:limit]
    return replace(trace, requests=requests, unique_blocks=1 + max(max(r.blocks) for r in requests))


class _Planning:
    """One trace's answer in the making."""

    def __init__(self, question: Question, word: str, trace: Trace, watch: Watch) -> None:
        self._slots = question.model.slots(trace.block_tokens) if question.model is not None else None
        self._question = question
        self._target = question.target
        self._trace = trace
        self._watch = watch
        found = facts(trace, word, question.reading.seed, question.bytes_per_token, question.model)
        assert found.block_bytes is not None and found.everything_bytes is not None
        self._block_bytes = found.block_bytes
        # Every group's blocks, with their padding.
        per_block = len(self._slots.groups) if self._slots is not None else 1
        self._most_blocks = trace.unique_blocks * per_block
        self._everything = self._most_blocks * self._block_bytes
        self._found: dict[Point, Candidate] = {}
        self._replays = 0
        self._cut_short = False
        self._sampling_error = 0.0
        self._answer = Answer(
            trace=found,
            target=question.target,
            policy=question.policy,
            prices=question.prices,
            rules=question.rules,
        )

    def answer(self) -> Answer:
        """Search, and say what was found."""
        answer, timed = self._answer, self._target.most_s is not None
        if timed:
            self._by_times()
        else:
            self._by_hit_rate()
        answer.candidates = sorted(self._found.values(), key=lambda found: (found.cost, found.point))
        answer.chosen = next((found for found in answer.candidates if found.meets), None)
        if self._cut_short:
            answer.notes.append(f"stopped after {self._replays} replays (--replays): cheaper sizes may do")
        if self._sampling_error:
            answer.notes.append(
                f"estimated from {self._question.sample:.0%} of the conversations (--sample), which alone moves LRU "
                f"by up to {self._sampling_error:.1%} at these sizes"
            )
        if answer.chosen is None and self._cut_short:
            answer.why_none = (
                f"none of the {self._replays} that were replayed does, and --replays allows no more"
            )
        elif answer.chosen is None:
            answer.why_none = self._why_no_times() if timed else self._why_no_hit_rate()
        answer.replays = self._replays
        return answer

    def _sizes(self, span: int, bound: int | None) -> list[int]:
        """The sizes of one tier to try, in bytes."""
        if bound == 0:
            return []
        return sizes_between(self._everything // span, self._everything, bound, self._block_bytes)

    def _blocks(self, size_bytes: int) -> int:
        # More than all blocks is as good as all.
        return min(size_bytes // self._block_bytes, self._most_blocks)

    def _next_replay(self, what: str, requests: int) -> Progress:
        self._replays += 1
        most = self._question.replays
        return self._watch(f"{self._trace.name}: replay {self._replays} of at most {most}, {what}", requests)

    # ---- hit rates: one tier

    def _by_hit_rate(self) -> None:
        """The smallest size that meets the target, and some to compare: each as host memory and as disk."""
        curve = lru_curve(self._trace) if self._slots is None else None
        rate_of = self._rates(curve)
        least = self._target.least_hit_rate
        assert least is not None
        exact = self._question.policy == BASELINE and curve is not None
        if exact and curve is not None:
            self._answer.lru_curve = curve.points(CURVE_POINTS)
        self._add((0, 0), {"hit_rate": 0.0})
        bounds = (self._question.bounds.host_bytes, self._question.bounds.disk_bytes)
        known = [bound for bound in bounds if bound is not None]
        low = high = 0
        for size in coarse(self._sizes(HOST_SPAN, max(known) if len(known) == len(bounds) else None)):
            blocks = self._blocks(size)
            rate = rate_of(blocks)
            if rate is None:
                continue
            self._add_as_host_and_as_disk(size, rate)
            if not high:
                low, high = (blocks, 0) if rate < least else (low, blocks)
        # One pass tells everything about LRU; elsewhere every size costs a replay.
        precision = 0.0 if exact else PRECISION
        blocks = smallest_enough(lambda blocks: (rate_of(blocks) or 0.0) >= least, low, high, precision)
        rate = rate_of(blocks) if blocks else None
        if rate is not None:
            self._add_as_host_and_as_disk(blocks * self._block_bytes, rate)

    def _rates(self, curve: LruCurve | None) -> Callable[[int], float | None]:
        """Blocks to the hit rate of the policy; None when there are no replays left."""
        question, trace, seed = self._question, self._trace, self._question.reading.seed
        if question.policy == BASELINE and curve is not None:
            return curve.hit_rate
        sample = Sample(trace, question.sample, seed, curve) if question.sample is not None else None
        requests = len((trace if sample is None else sample.trace).requests)
        known: dict[int, float] = {}

        def rate_of(blocks: int) -> float | None:
            if blocks not in known:
                if self._replays >= question.replays:
                    self._cut_short = True
                    return None
                what = format_bytes(blocks * self._block_bytes)
                on_progress = self._next_replay(what, requests)
                row = hit_row(
                    trace, seed, question.policy, what, blocks, sample, on_progress, slots=self._slots
                )
                known[blocks] = row.hit_rate
                self._sampling_error = max(self._sampling_error, abs(row.sampling_error or 0.0))
            return known[blocks]

        return rate_of

    def _add_as_host_and_as_disk(self, size_bytes: int, hit_rate: float) -> None:
        bounds = self._question.bounds
        if bounds.host_bytes is None or size_bytes <= bounds.host_bytes:
            self._add((size_bytes, 0), {"hit_rate": hit_rate})
        if bounds.disk_bytes is None or size_bytes <= bounds.disk_bytes:
            # Without host memory blocks pass through a staging area.
            self._add((STAGING_BYTES, size_bytes), {"hit_rate": hit_rate, "staged": True})

    def _why_no_hit_rate(self) -> str:
        most = self._answer.trace.repeated_rate
        assert self._target.least_hit_rate is not None
        if most < self._target.least_hit_rate:
            return f"a cache of endless size hits {most:.2%}: no more was asked for before"
        best = max(self._found.values(), key=lambda found: found.hit_rate)
        return f"within the bounds {words_of(best)} hits most, {best.hit_rate:.2%}"

    # ---- times to first token: host memory, and a disk below it

    def _by_times(self) -> None:
        bounds = self._question.bounds
        search = Search(self._serve, self._question.prices.cost, self._question.replays, bounds)
        search.run(self._sizes(HOST_SPAN, bounds.host_bytes), self._sizes(DISK_SPAN, bounds.disk_bytes))
        self._cut_short = search.cut_short

    def _serve(self, point: Point) -> bool:
        self._add(point, self._served(point))
        return self._found[point].meets

    def _served(self, point: Point) -> dict[str, float]:
        """The fields of a candidate, from a replay."""
        question, trace, machine = self._question, self._trace, self._question.machine
        assert machine is not None
        host, disk = (("", self._blocks(size)) for size in point)
        row = time_row(
            trace,
            question.reading.seed,
            replace(machine, block_bytes=self._block_bytes),
            Setup(question.policy, host, disk, question.rules),
            question.closed_loop,
            self._next_replay(_words(point), len(trace.requests)),
        )
        return {
            "hit_rate": row.host_hit_rate + row.disk_hit_rate,
            "disk_hit_rate": row.disk_hit_rate,
            "ttft_mean_s": row.ttft_mean_s,
            "ttft_p50_s": row.ttft_p50_s,
            "ttft_p90_s": row.ttft_p90_s,
            "ttft_p99_s": row.ttft_p99_s,
            "load": row.load,
            "disk_written_bytes_per_day": row.disk_written_bytes / trace.seconds * DAY_S
            if trace.seconds
            else 0.0,
        }

    def _why_no_times(self) -> str:
        target = self._target
        assert target.most_s is not None and self._question.machine is not None
        ideal_s = statistic_of(unavoidable_s(self._trace, self._question.machine), target.statistic)
        if ideal_s > target.most_s:
            return (
                f"only to compute what was not asked for before takes {target.statistic} {ideal_s:.3g} s on an idle "
                "engine with an endless cache: a faster engine would help (--prefill-tokens-per-s), a larger cache not"
            )
        point = (self._everything, 0)
        endless = self._candidate(point, self._served(point))
        seconds = f"{target.statistic} {target.measure(endless):.3g} s"
        what = f"host memory for everything, {format_bytes(point[0])}, has {seconds}"
        if endless.meets:
            return f"the sizes within the bounds are too small: {what}"
        if endless.load > 1.0:
            return (
                f"{what}: the engine cannot keep up with the trace (load {endless.load:.2f}): one is too few"
            )
        return (
            f"{what}; to compute what was not asked for before takes {ideal_s:.3g} s of an idle engine, the rest is "
            f"waiting for the engine (load {endless.load:.2f}) and for what is loaded"
        )

    # ---- both

    def _add(self, point: Point, fields: dict[str, Any]) -> None:
        self._found[point] = self._candidate(point, fields)

    def _candidate(self, point: Point, fields: dict[str, Any]) -> Candidate:
        cost = self._question.prices.cost(point)
        found = Candidate(host_bytes=point[0], disk_bytes=point[1], cost=cost, **fields)
        return msgspec.structs.replace(found, meets=self._target.met_by(found))


def unavoidable_s(trace: Trace, machine: Machine) -> list[float]:
    """For each request the seconds that an idle engine with an endless cache computes: its new blocks."""
    seconds, known = [], 0
    for request in trace.requests:
        # Blocks are numbered by first use.
        new = next((i for i, block in enumerate(request.blocks) if block >= known), len(request.blocks))
        known = max(known, 1 + max(request.blocks))
        seconds.append(machine.prompt_s(new * trace.block_tokens, request.prompt_tokens))
    return seconds


def statistic_of(seconds: Sequence[float], statistic: str) -> float:
    """The mean, or the quantile that `p90` names."""
    return fmean(seconds) if statistic == "mean" else quantile(seconds, int(statistic[1:]) / 100)


def words_of(candidate: Candidate) -> str:
    """The sizes in words."""
    return f"disk {format_bytes(candidate.disk_bytes)}" if candidate.staged else _words(candidate.point)


def _words(point: Point) -> str:
    named = zip(("host", "disk"), point, strict=True)
    return " + ".join(f"{tier} {format_bytes(size)}" for tier, size in named if size) or "no cache"
