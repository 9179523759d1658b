"""One call of `kvbm simulate`: its options, checked before any trace is read, and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvbm.errors import KvbmError, SettingsError
from kvbm.policy import eviction_policies, make_policy
from kvbm.policy.contract import knows_hints
from kvbm.sim.replay import optimum
from kvbm.sim.replay.curves import LruCurve, lru_curve
from kvbm.sim.replay.published import NAMES as PUBLISHED
from kvbm.sim.replay.published import require_library
from kvbm.sim.replay.sampling import Sample
from kvbm.sim.serving.disk import DiskRules
from kvbm.sim.serving.hybrid import HybridModel
from kvbm.sim.serving.machine import Machine
from kvbm.sim.simulate.report import Curve, Document, facts
from kvbm.sim.simulate.sizes import TierSize
from kvbm.sim.simulate.study import HIT_RATES_ALONE, Progress, Setup, hit_row, time_row, with_gaps
from kvbm.sim.traces.formats import ReadOptions, read_trace
from kvbm.sim.traces.halves import halves
from kvbm.sim.traces.said import Kind, Told, told
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace

SYNTHETIC = "synthetic"
CURVE_POINTS = 200

Watch = Callable[[str, int], Progress]
"""Called as a replay begins, with its name and its number of requests; returns its `Progress`."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Traces × seeds × policies × sizes. With a machine (its `block_bytes` set per trace) times, else hit rates.

    `model` stands in place of `bytes_per_token` where a model has several groups.
    With `halves` each trace is two: see `sim.traces.halves`. `rules` are those of the disks.
    `hints` are what clients say, to compare: a policy that listens is run with each of them (None: without any).
    """

    traces: list[str]
    policies: list[str]
    host: list[TierSize]
    disk: list[TierSize] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    reading: ReadOptions = field(default_factory=ReadOptions)
    bytes_per_token: int | None = None
    model: HybridModel | None = None
    sample: float | None = None
    halves: bool = False
    curve: bool = False
    machine: Machine | None = None
    rules: DiskRules = field(default_factory=DiskRules)
    closed_loop: bool = True
    hints: list[Kind | None] = field(default_factory=lambda: [None])

    def check(self) -> None:
        """`SettingsError` for options that cannot be run, whatever the traces hold."""
        if self.sample is not None and not 0.0 < self.sample <= 1.0:
            raise SettingsError("--sample", self.sample, "a share above 0 and at most 1, such as 0.3")
        for option, value in (
            ("--session-hours", self.reading.session_hours),
            ("--time-scale", self.reading.time_scale),
        ):
            if not 0.0 < value < float("inf"):
                raise SettingsError(option, value, "a number above 0")
        self.rules.check()
        if self.model is not None:
            self._check_groups(self.model)
        if self.machine is not None and self.bytes_per_token is None:
            raise KvbmError(
                "--times and --disk need the KV of a token: --bytes-per-token 128KiB, or --model DIR"
            )
        if self.machine is not None and self.sample is not None:
            raise SettingsError(
                "--sample", self.sample, "nothing with --times or --disk: a sample has no queue"
            )
        for name in self.traces:
            if name != SYNTHETIC and not Path(name).exists():
                raise SettingsError("TRACE", name, f"an existing file or directory, or {SYNTHETIC}")

    def _check_groups(self, model: HybridModel) -> None:
        """What is known of blocks that hold all layers, and not of groups."""
        if self.machine is not None:
            raise SettingsError(
                "--model",
                model.name,
                "with --times and --disk a model without groups: theirs are not simulated",
            )
        hinted = any(kind is not None for kind in self.hints)
        for option, given in (
            ("--sample", self.sample is not None),
            ("--curve", self.curve),
            ("--hints", hinted),
        ):
            if given:
                raise SettingsError(option, "given", f"nothing with {model.name}, which has several groups")
        for name in self.policies:
            if name in HIT_RATES_ALONE:
                accepted = (
                    f"one of {', '.join(eviction_policies())} with {model.name}, which has several groups"
                )
                raise SettingsError("--policy", name, accepted)


def parse_policies(text: str, timed: bool) -> list[str]:
    """The policies that a list names; `all` is every one but libCacheSim's. With times none of `HIT_RATES_ALONE` is
    accepted."""
    ours = [*eviction_policies(), *([] if timed else [optimum.NAME])]
    known = [*ours, *([] if timed else PUBLISHED), "all"]
    chosen: list[str] = []
    for name in (word.strip() for word in text.split(",")):
        if name not in known:
            without = "; this one has no times" if name in HIT_RATES_ALONE else ""
            raise SettingsError("--policy", name, f"one of {', '.join(known)}{without}")
        if name in PUBLISHED:
            require_library(name)
        chosen += ours if name == "all" else [name]
    return list(dict.fromkeys(chosen))


def parse_hints(text: str) -> list[Kind | None]:
    """The kinds of hints that a list names; `none` is none."""
    known: dict[str, Kind | None] = {"none": None, **{kind.value: kind for kind in Kind}}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise SettingsError("--hints", word, f"one of {', '.join(known)}")
    return list(dict.fromkeys(known[word] for word in words))


def run(simulation: Simulation, watch: Watch) -> Document:
    """Replay everything. `SettingsError` where a size does not fit a trace, `TraceError` for files."""
    document = Document(settings=_settings(simulation))
    for word in dict.fromkeys(simulation.traces):
        for seed in dict.fromkeys(simulation.seeds):
            watch(f"reading {Path(word).name}", 0)
            whole = open_trace(word, replace(simulation.reading, seed=seed))
            for trace in halves(whole) if simulation.halves else (whole,):
                _replay(simulation, document, trace, word, seed, watch)
    document.hit_rates = with_gaps(document.hit_rates)
    return document


def _replay(
    simulation: Simulation, document: Document, trace: Trace, word: str, seed: int, watch: Watch
) -> None:
    """One trace with one seed, at all sizes."""
    if any(known.name == trace.name and known.path != word for known in document.traces):
        trace = replace(trace, name=f"{trace.name} ({word})")
    slots = simulation.model.slots(trace.block_tokens) if simulation.model is not None else None
    sizes = [
        (size.text, size.blocks_of(trace, simulation.bytes_per_token, slots)) for size in simulation.host
    ]
    below = [(size.text, size.blocks_of(trace, simulation.bytes_per_token)) for size in simulation.disk]
    document.traces.append(facts(trace, word, seed, simulation.bytes_per_token, simulation.model))
    exact = lru_curve(trace) if simulation.curve or simulation.sample is not None else None
    if simulation.curve and exact is not None:
        points = exact.points(CURVE_POINTS)
        document.lru_curves.append(Curve(trace=trace.name, seed=seed, points=points))
    if simulation.machine is None:
        _hit_rates(simulation, document, trace, seed, sizes, exact, watch)
    else:
        _times(simulation, simulation.machine, document, trace, seed, sizes, below, watch)


def open_trace(word: str, options: ReadOptions) -> Trace:
    """The trace that a word on the command line means."""
    if word == SYNTHETIC and not Path(word).exists():
        shape = ChatShape()
        tokens = options.chunk_tokens or shape.block_tokens
        return chats(replace(shape, block_tokens=tokens), options.seed, options.time_scale, options.limit)
    return read_trace(Path(word), options)


def _hit_rates(
    simulation: Simulation,
    document: Document,
    trace: Trace,
    seed: int,
    sizes: list[tuple[str, int]],
    exact: LruCurve | None,
    watch: Watch,
) -> None:
    slots = simulation.model.slots(trace.block_tokens) if simulation.model is not None else None
    sample = Sample(trace, simulation.sample, seed, exact) if simulation.sample is not None else None
    replayed = sample.trace if sample is not None else trace
    policies = _with_hints(simulation, replayed, seed)
    for text, blocks in sizes:
        for policy, said in policies:
            on_progress = watch(f"{trace.name}: {policy}, {text}", len(replayed.requests))
            row = hit_row(trace, seed, policy, text, blocks, sample, on_progress, slots=slots, told=said)
            document.hit_rates.append(row)


def _with_hints(simulation: Simulation, trace: Trace, seed: int) -> list[tuple[str, Told | None]]:
    """Each policy with what it is told: nothing, once, if it does not listen."""
    said = [None if kind is None else told(trace, kind, seed) for kind in simulation.hints]
    found: list[tuple[str, Told | None]] = []
    for policy in simulation.policies:
        listens = policy not in HIT_RATES_ALONE and knows_hints(make_policy(policy, 1))
        found += [(policy, each) for each in (said if listens else [None])]
    return found


def _times(
    simulation: Simulation,
    machine: Machine,
    document: Document,
    trace: Trace,
    seed: int,
    sizes: list[tuple[str, int]],
    below: list[tuple[str, int]],
    watch: Watch,
) -> None:
    assert simulation.bytes_per_token is not None
    machine = replace(machine, block_bytes=simulation.bytes_per_token * trace.block_tokens)
    policies = _with_hints(simulation, trace, seed)
    for setup in _setups(simulation, policies, sizes, below):
        what = " + ".join(part for part in (setup.policy, setup.host[0], setup.disk[0]) if part) or "no cache"
        on_progress = watch(f"{trace.name}: {what}", len(trace.requests))
        document.times.append(time_row(trace, seed, machine, setup, simulation.closed_loop, on_progress))


def _setups(
    simulation: Simulation,
    policies: list[tuple[str, Told | None]],
    sizes: list[tuple[str, int]],
    below: list[tuple[str, int]],
) -> Iterator[Setup]:
    """No cache, then every host size without and with every disk, each by every policy."""
    yield Setup()
    for host in sizes:
        for policy, said in policies:
            yield Setup(policy, host, told=said)
        for disk in below:
            for policy, said in policies:
                yield Setup(policy, host, disk, simulation.rules, said)


def _settings(simulation: Simulation) -> dict[str, object]:
    """The options that the results depend on, for the JSON."""
    return {
        "policies": simulation.policies,
        "seeds": simulation.seeds,
        "bytes_per_token": simulation.bytes_per_token,
        "model": simulation.model.name if simulation.model is not None else None,
        "sample": simulation.sample,
        "halves": simulation.halves,
        "reading": simulation.reading,
        "machine": simulation.machine,
        "disk_rules": simulation.rules,
        "closed_loop": simulation.closed_loop,
        "hints": ["none" if kind is None else kind.value for kind in simulation.hints],
    }
