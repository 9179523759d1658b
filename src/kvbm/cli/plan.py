"""`kvbm plan`: the cheapest sizes of host memory and disk that meet a target on a trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbm.cli import simulate
from kvbm.cli.replaying import conclude, require_writable, with_bar
from kvbm.errors import KvbmError, SettingsError

if TYPE_CHECKING:
    from kvbm.sim.plan.cheapest import Bounds, Prices, Target

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm plan synthetic --target-ttft 120ms@p90 --bytes-per-token 128KiB
  kvbm plan synthetic --target-hit-rate 60% --bytes-per-token 128KiB --plot plan.png
  kvbm plan monday.jsonl.gz --target-ttft 2.5s --model ./Llama-3.1-8B --price-host 2.2 --price-disk 0.06
  kvbm plan monday.jsonl.gz --target-hit-rate 30% --model gemma-3-27b
  kvbm plan monday.jsonl.gz --target-ttft 2.5s --model ./Llama-3.1-8B --machine
"""

HitRate = Annotated[
    str | None,
    typer.Option(
        "--target-hit-rate", metavar="R", help="This share of the blocks asked for must hit: 0.3 or 30%."
    ),
]
Ttft = Annotated[
    str | None,
    typer.Option(
        "--target-ttft",
        metavar="TIME[@S]",
        help="Time to first token of at most so much: 2.5s, 250ms@p50; S is mean, p50, p90 (default) or p99.",
    ),
]
HostPrice = Annotated[
    float | None,
    typer.Option(
        "--price-host",
        metavar="$",
        help="Host memory, dollars for a GB in a month. Without it 3.00 is assumed.",
    ),
]
DiskPrice = Annotated[
    float | None,
    typer.Option("--price-disk", metavar="$", help="Disk, likewise. Without it 0.10 is assumed."),
]
UseMachine = Annotated[
    bool,
    typer.Option(
        "--machine",
        help="No more than this machine's available memory and free disk. Without prices: shares of them.",
    ),
]
DiskDirectory = Annotated[
    Path | None,
    typer.Option("--disk-dir", metavar="DIR", help="Whose free space --machine takes: the disk tier's."),
]
MostHost = Annotated[
    str | None, typer.Option("--max-host", metavar="SIZE", help="Propose no more host memory.")
]
MostDisk = Annotated[
    str | None, typer.Option("--max-disk", metavar="SIZE", help="Propose no more disk; 0 goes without.")
]
Policy = Annotated[
    str | None, typer.Option(metavar="NAME", help="Eviction policy. Without it the manager's default.")
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="When sessions start, and what --sample draws.")]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Only the first N requests; sizes then are for those alone."),
]
SampleRate = Annotated[
    float | None,
    typer.Option("--sample", metavar="R", help="For hit rates: replay only this share of the conversations."),
]
Replays = Annotated[int, typer.Option(metavar="N", min=1, help="At most so many replays of a trace.")]
Everything = Annotated[
    bool, typer.Option("--all", help="Show all sizes that were tried, not only the best of each cost.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw what each cost buys into a PNG.")
]


@app.command(epilog=_EXAMPLES)
def plan(
    traces: simulate.Traces,
    target_hit_rate: HitRate = None,
    target_ttft: Ttft = None,
    bytes_per_token: simulate.BytesPerToken = None,
    model: simulate.Model = None,
    price_host: HostPrice = None,
    price_disk: DiskPrice = None,
    machine: UseMachine = False,
    disk_dir: DiskDirectory = None,
    max_host: MostHost = None,
    max_disk: MostDisk = None,
    policy: Policy = None,
    chunk_tokens: simulate.Chunk = None,
    seed: Seed = 0,
    session_hours: simulate.Hours = 4.0,
    time_scale: simulate.Scale = 1.0,
    limit: Limit = None,
    sample: SampleRate = None,
    replays: Replays = 80,
    open_loop: simulate.OpenLoop = False,
    admission: simulate.Admission = "filter",
    write_budget: simulate.WriteBudget = None,
    prefill_tokens_per_s: simulate.PrefillRate = 30_000.0,
    attention_tokens: simulate.Attention = 30_000.0,
    host_bandwidth: simulate.HostRate = "50GB",
    disk_read: simulate.ReadRate = "6GB",
    disk_write: simulate.WriteRate = "3GB",
    everything: Everything = False,
    json_file: simulate.JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Find the cheapest sizes of host memory and disk that meet a target on your own trace.

    Hit rates: one tier, as host memory and as disk. Times to first token: one engine that is served from host memory,
    with and without a disk below it; a grid of sizes, refined where it gets cheap.

    The model leaves out: the engine's own cache on the device, the time that decoding takes from prefill, batching, the
    copies from the device, other engines on the same manager, what a worn disk costs. It begins with empty tiers.
    Speeds are the options below, by default an H100 with an 8-billion-parameter model; TTFT is as good as they are.
    Tomorrow's requests are not in the trace: leave room.
    """
    from kvbm.sim.plan import picture, report
    from kvbm.sim.plan.planning import Question, answer
    from kvbm.sim.traces.formats import ReadOptions

    target = _target(target_hit_rate, target_ttft)
    bounds, prices = _bounds_and_prices(machine, disk_dir, (max_host, max_disk), (price_host, price_disk))
    speeds = (prefill_tokens_per_s, attention_tokens, (host_bandwidth, disk_read, disk_write))
    question = Question(
        traces=traces,
        target=target,
        **simulate.read_model(bytes_per_token, model)._asdict(),
        policy=_policy(policy),
        prices=prices,
        bounds=bounds,
        reading=ReadOptions(chunk_tokens, seed, session_hours, time_scale),
        limit=limit,
        sample=sample,
        replays=replays,
        machine=simulate.read_machine(*speeds) if target.most_s else None,
        rules=simulate.read_disk_rules(admission, write_budget),
        closed_loop=not open_loop,
    )
    question.check()
    require_writable(json_file, plot)
    answers = with_bar(lambda watch: answer(question, watch))
    table = report.render(answers, everything)
    conclude(table, answers, partial(picture.draw, answers), json_file, plot)


def _target(hit_rate: str | None, ttft: str | None) -> Target:
    from kvbm.sim.plan.cheapest import parse_hit_rate, parse_seconds

    if hit_rate is not None and ttft is not None:
        raise SettingsError("--target-ttft", ttft, "either this or --target-hit-rate, not both")
    if hit_rate is not None:
        return parse_hit_rate("--target-hit-rate", hit_rate)
    if ttft is not None:
        return parse_seconds("--target-ttft", ttft)
    raise KvbmError("a target is needed: --target-hit-rate 0.3, or --target-ttft 2.5s@p90")


def _policy(name: str | None) -> str:
    from kvbm.policy import eviction_policies
    from kvbm.settings import Settings

    chosen = Settings().eviction if name is None else name
    known = eviction_policies()
    if chosen not in known:
        raise SettingsError("--policy", chosen, f"one of {', '.join(known)}")
    return chosen


def _bounds_and_prices(
    machine: bool,
    disk_dir: Path | None,
    most: tuple[str | None, str | None],
    asked: tuple[float | None, float | None],
) -> tuple[Bounds, Prices]:
    from kvbm.settings.parse import parse_size
    from kvbm.sim.plan import cheapest

    for option, price in zip(("--price-host", "--price-disk"), asked, strict=True):
        if price is not None and not 0.0 <= price < float("inf"):
            raise SettingsError(option, price, "dollars for a GB in a month, 0 or more")
    host, disk = (
        None if text is None else parse_size(option, text)
        for option, text in zip(("--max-host", "--max-disk"), most, strict=True)
    )
    bounds = cheapest.Bounds(host_bytes=host, disk_bytes=disk)
    if disk_dir is not None and not machine:
        raise SettingsError("--disk-dir", str(disk_dir), "only with --machine")
    if machine:
        found = _this_machine(disk_dir)
        bounds = bounds.within(found)
        if asked == (None, None):
            return bounds, cheapest.shares_of(found)
    return bounds, cheapest.Prices(
        host_per_gb=cheapest.ASSUMED_HOST_PRICE if asked[0] is None else asked[0],
        disk_per_gb=cheapest.ASSUMED_DISK_PRICE if asked[1] is None else asked[1],
        assumed=None in asked,
    )


def _this_machine(disk_dir: Path | None) -> Bounds:
    from kvbm.settings import load_settings, process_environment
    from kvbm.sim.plan import cheapest

    directory = disk_dir or Path(load_settings(process_environment(), {}).settings.disk_dir)
    try:
        found = cheapest.this_machine(directory)
    except OSError as error:
        accepted = f"an existing directory ({error.strerror})"
        raise SettingsError("--disk-dir", str(directory), accepted) from None
    if found.host_bytes is None:
        raise KvbmError(
            "--machine: the memory of this machine cannot be read; give --max-host and --max-disk"
        )
    return found
