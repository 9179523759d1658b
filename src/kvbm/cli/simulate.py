"""`kvbm simulate`: hit rates and times of policies and sizes on a trace, before any memory is bought."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvbm.cli.replaying import conclude, require_writable, with_bar
from kvbm.errors import SettingsError

if TYPE_CHECKING:
    from kvbm.sim.serving.disk import DiskRules
    from kvbm.sim.serving.hybrid import HybridModel
    from kvbm.sim.serving.machine import Machine

app = typer.Typer(rich_markup_mode=None)

DEFAULT_SIZES = "1%,2%,5%,10%,20%"
DEFAULT_POLICIES = "lru,gittins,belady"
DEFAULT_DRIVEN_POLICIES = "lru,gittins"
"""With times or groups, where the optimum is not known."""

_EXAMPLES = """\b
Examples:
  kvbm simulate synthetic
  kvbm simulate conversation_trace.jsonl --policy all --host 1%,5%,20% --plot hits.png
  kvbm simulate sessions/ --chunk-tokens 512 --seed 0,1,2
  kvbm simulate trace.jsonl.gz --model gemma-3-27b --host 100GB,200GB
  kvbm simulate trace.jsonl.gz --model ./Llama-3.1-8B --host 100GB,200GB --disk 2TB
"""

Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...",
        help="Files, directories of agentic sessions, or `synthetic`: conversations that are made up here.",
        show_default=False,
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAMES",
        help="Comma-separated. `belady` is the offline optimum; `all` is every one. `libcachesim:NAME` compares with "
        "libCacheSim's lru, s3fifo, sieve, arc, tinylfu or gdsf (pip install libcachesim).",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="SIZES", help="Sizes of host memory: shares of all blocks (5%), 20000blocks, or 100GB."
    ),
]
Disk = Annotated[
    str | None,
    typer.Option(metavar="SIZES", help="Sizes of a disk below it, written likewise. Implies --times."),
]
BytesPerToken = Annotated[
    str | None, typer.Option(metavar="SIZE", help="KV of one token on all ranks: 128KiB for Llama 3.1 8B.")
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR|NAME",
        help="Take that from the config.json of a model instead; one with several groups has no such number. "
        "Or a name: gemma-3-27b, gemma-3-12b, gpt-oss-120b, qwen3-next-80b.",
    ),
]
Chunk = Annotated[
    int | None, typer.Option("--chunk-tokens", metavar="N", min=1, help="Regroup blocks into larger ones.")
]
Seeds = Annotated[
    str,
    typer.Option(
        "--seed", metavar="N,…", help="When sessions start. With several: means, and how far apart they are."
    ),
]
Hours = Annotated[
    float, typer.Option("--session-hours", metavar="H", help="All sessions start within about so many hours.")
]
Scale = Annotated[
    float,
    typer.Option(
        "--time-scale", metavar="X", help="Multiply the times between arrivals: 0.5 is twice the load."
    ),
]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N requests.")]
WithCurve = Annotated[bool, typer.Option("--curve", help="Also print LRU at all sizes; exact, in one pass.")]
SampleRate = Annotated[
    float | None,
    typer.Option(
        "--sample", metavar="R", help="Replay only this share of the conversations, for speed: 0.3."
    ),
]
Halves = Annotated[
    bool,
    typer.Option(
        "--halves", help="Each trace in two: every other session, or the halves of its time. For hold-outs."
    ),
]
WithTimes = Annotated[
    bool, typer.Option("--times", help="Times to first token: one engine, its tiers and links.")
]
OpenLoop = Annotated[
    bool, typer.Option("--open-loop", help="Users do not wait for answers, but come as recorded.")
]
Hints = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="What clients say of their conversations, for policies that listen, one row each: none, true (when they "
        "go on, within a factor of two), late (only when a request has ended), random.",
    ),
]
Admission = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Blocks that enter the disk: `filter` (used again), `all`, or `ghost`."
    ),
]
WriteBudget = Annotated[
    str | None,
    typer.Option("--write-budget", metavar="SIZE", help="Most bytes written to disk in 24 hours."),
]
PrefillRate = Annotated[
    float, typer.Option("--prefill-tokens-per-s", metavar="N", help="How fast the engine computes prompts.")
]
Attention = Annotated[
    float,
    typer.Option("--attention-tokens", metavar="N", help="Tokens before it that double the cost of one."),
]
HostRate = Annotated[str, typer.Option("--host-bandwidth", metavar="SIZE", help="Host → device, a second.")]
ReadRate = Annotated[str, typer.Option("--disk-read", metavar="SIZE", help="Disk → host, a second.")]
WriteRate = Annotated[str, typer.Option("--disk-write", metavar="SIZE", help="Host → disk, a second.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results as JSON.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rates, or times, into a PNG.")
]


@app.command(epilog=_EXAMPLES)
def simulate(
    traces: Traces,
    policy: Policies = DEFAULT_POLICIES,
    host: Host = DEFAULT_SIZES,
    disk: Disk = None,
    bytes_per_token: BytesPerToken = None,
    model: Model = None,
    chunk_tokens: Chunk = None,
    seed: Seeds = "0",
    session_hours: Hours = 4.0,
    time_scale: Scale = 1.0,
    limit: Limit = None,
    curve: WithCurve = False,
    sample: SampleRate = None,
    halves: Halves = False,
    hints: Hints = "none",
    times: WithTimes = False,
    open_loop: OpenLoop = False,
    admission: Admission = "filter",
    write_budget: WriteBudget = None,
    prefill_tokens_per_s: PrefillRate = 30_000.0,
    attention_tokens: Attention = 30_000.0,
    host_bandwidth: HostRate = "50GB",
    disk_read: ReadRate = "6GB",
    disk_write: WriteRate = "3GB",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Replay traces through the policies that the manager would use.

    Prints hit rates by policy and size, and how much of the way from LRU to the offline optimum each policy goes.
    With --times or --disk: one engine, its tiers and links, and times to the first token against no cache.

    Reads recordings of kvbm, Mooncake and Qwen-Bailian JSON Lines, and sessions of coding agents; plain or gzip.
    """
    from kvbm.sim.simulate import picture, report
    from kvbm.sim.simulate.simulation import Simulation, parse_hints, parse_policies, run
    from kvbm.sim.simulate.sizes import parse_sizes
    from kvbm.sim.traces.formats import ReadOptions

    timed = times or disk is not None
    kv = read_model(bytes_per_token, model)
    if policy == DEFAULT_POLICIES and (timed or kv.model is not None):
        policy = DEFAULT_DRIVEN_POLICIES
    links = (host_bandwidth, disk_read, disk_write)
    simulation = Simulation(
        traces=traces,
        policies=parse_policies(policy, timed),
        host=parse_sizes("--host", host),
        disk=parse_sizes("--disk", disk) if disk is not None else [],
        seeds=read_seeds(seed),
        reading=ReadOptions(chunk_tokens, 0, session_hours, time_scale, limit),
        **kv._asdict(),
        sample=sample,
        halves=halves,
        curve=curve or (plot is not None and kv.model is None),
        machine=read_machine(prefill_tokens_per_s, attention_tokens, links) if timed else None,
        rules=read_disk_rules(admission, write_budget),
        closed_loop=not open_loop,
        hints=parse_hints(hints),
    )
    simulation.check()
    require_writable(json_file, plot)
    document = with_bar(lambda watch: run(simulation, watch))
    table = report.render(document, curve)
    conclude(table, document, partial(picture.draw, document), json_file, plot)


def read_seeds(text: str) -> list[int]:
    """The seeds in a comma-separated list. Raises SettingsError."""
    from kvbm.settings.parse import parse_count

    return [parse_count("--seed", word, 0, 2**31 - 1) for word in text.split(",")]


class ModelKv(NamedTuple):
    """The bytes of KV of a token, or a model with several groups, whose tokens have no such number; None: not told."""

    bytes_per_token: int | None
    model: HybridModel | None


def read_model(size: str | None, model: Path | None) -> ModelKv:
    """What --bytes-per-token or --model say of the model. Raises SettingsError."""
    from kvbm.settings.parse import parse_size
    from kvbm.sim.serving.model import model_of

    if size is not None and model is not None:
        raise SettingsError("--model", str(model), "either this or --bytes-per-token, not both")
    if model is not None:
        found = model_of(model)
        return ModelKv(found, None) if isinstance(found, int) else ModelKv(None, found)
    if size is None:
        return ModelKv(None, None)
    count = parse_size("--bytes-per-token", size)
    if count < 1:
        raise SettingsError("--bytes-per-token", size, "at least one byte")
    return ModelKv(count, None)


def read_disk_rules(admission: str, budget: str | None) -> DiskRules:
    """The rules for writing to disk, from the options. Raises SettingsError."""
    from kvbm.settings.parse import parse_size
    from kvbm.sim.serving.disk import DiskRules

    rules = DiskRules(admission, None if budget is None else parse_size("--write-budget", budget))
    rules.check()
    return rules


def read_machine(
    prefill_tokens_per_s: float, attention_tokens: float, links: tuple[str, str, str]
) -> Machine:
    """The machine of the options; `links` are host → device, disk → host, host → disk. Raises SettingsError."""
    from kvbm.settings.parse import parse_size
    from kvbm.sim.serving.machine import Machine

    numbers = {"--prefill-tokens-per-s": prefill_tokens_per_s, "--attention-tokens": attention_tokens}
    for option, number in numbers.items():
        if not number > 0.0:
            raise SettingsError(option, number, "a number above 0")
    rates = []
    for option, text in zip(("--host-bandwidth", "--disk-read", "--disk-write"), links, strict=True):
        rates.append(float(parse_size(option, text)))
        if not rates[-1]:
            raise SettingsError(option, text, "bytes in a second, such as 6GB")
    # A block's bytes depend on the trace.
    return Machine(0, prefill_tokens_per_s, attention_tokens, *rates)
