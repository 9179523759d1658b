"""`kvbm scale`: hit rates and waiting times of many nodes, by router and remote tier, out of one trace."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvbm.cli.replaying import conclude, require_writable, with_bar
from kvbm.cli.simulate import read_seeds
from kvbm.errors import SettingsError

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm scale synthetic --nodes 1,4,16
  kvbm scale trace.jsonl.gz --router random,kv --remote private,shared --nodes 1,8,64
  kvbm scale trace.jsonl.gz --nodes 1 --load 0.2,0.4,0.6,0.8,1.0
  kvbm scale trace.jsonl.gz --nodes 2,4,8 --total-load 3
"""

TraceFile = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="A file, a directory of agentic sessions, or `synthetic`.", show_default=False
    ),
]
Nodes = Annotated[str, typer.Option(metavar="N,…", help="How many nodes.")]
Routers = Annotated[str, typer.Option("--router", metavar="NAMES", help="random, round-robin, session, kv.")]
Remotes = Annotated[
    str, typer.Option("--remote", metavar="KINDS", help="none, private (one each), shared (one for all).")
]
Load = Annotated[
    str, typer.Option(metavar="X,…", help="Prefill for each node without a cache: 0.8 is busy 80 % of it.")
]
TotalLoad = Annotated[
    float | None, typer.Option(metavar="X", help="Instead: for all nodes together, however many they are.")
]
Host = Annotated[str, typer.Option(metavar="SIZE", help="Host memory of a node: 200GB, or 3000blocks.")]
RemoteSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Remote tier for each node; a shared one is all of them.")
]
BytesPerToken = Annotated[str, typer.Option(metavar="SIZE", help="KV of one token on all ranks.")]
Chunk = Annotated[
    int | None, typer.Option("--chunk-tokens", metavar="N", min=1, help="Regroup blocks into larger ones.")
]
Minutes = Annotated[float, typer.Option(metavar="M", help="How long to measure.")]
WarmUp = Annotated[float, typer.Option("--warm-up", metavar="M", help="Minutes before, to fill the tiers.")]
Seeds = Annotated[
    str, typer.Option("--seed", metavar="N,…", help="When copies of the trace begin. With several: means.")
]
Policy = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Eviction policy of all tiers. Without it the manager's default."),
]
OpenLoop = Annotated[bool, typer.Option("--open-loop", help="Users do not wait for answers: as recorded.")]
PrefillRate = Annotated[
    float, typer.Option("--prefill-tokens-per-s", metavar="N", help="Prompt tokens an engine computes.")
]
Network = Annotated[str, typer.Option(metavar="SIZE", help="Remote tier → one node, a second.")]
Store = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Shared tier → all nodes, a second; no limit if not given.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results as JSON.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw them into a PNG.")]


@app.command(epilog=_EXAMPLES)
def scale(
    trace: TraceFile,
    nodes: Nodes = "1,2,4,8,16",
    router: Routers = "random,kv",
    remote: Remotes = "private,shared",
    load: Load = "0.8",
    total_load: TotalLoad = None,
    host: Host = "200GB",
    remote_size: RemoteSize = "500GB",
    bytes_per_token: BytesPerToken = "128KiB",
    chunk_tokens: Chunk = None,
    minutes: Minutes = 5.0,
    warm_up: WarmUp = 10.0,
    seed: Seeds = "0",
    policy: Policy = None,
    open_loop: OpenLoop = False,
    prefill_tokens_per_s: PrefillRate = 30_000.0,
    network: Network = "25GB",
    store: Store = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Simulate many nodes behind a router: hit rates and times to first token.

    The trace is played several times at once, shifted in time, until it is the traffic wanted; `--load` keeps that of
    one node the same however many there are, `--total-load` that of all. See docs/operating/scale.md.
    """
    from kvbm.settings import Settings
    from kvbm.settings.parse import parse_count, parse_size
    from kvbm.sim.scale import picture, report
    from kvbm.sim.scale.study import ScaleStudy, run

    study = ScaleStudy(
        trace=trace,
        nodes=[parse_count("--nodes", word, 1, 4096) for word in nodes.split(",")],
        routers=_words(router),
        remotes=_words(remote),
        loads=[_positive("--load", word) for word in load.split(",")],
        total_load=None if total_load is None else _positive("--total-load", str(total_load)),
        host=host,
        remote_size=remote_size,
        bytes_per_token=parse_size("--bytes-per-token", bytes_per_token),
        chunk_tokens=chunk_tokens,
        minutes=_positive("--minutes", str(minutes)),
        warm_up_minutes=warm_up,
        seeds=read_seeds(seed),
        policy=Settings().eviction if policy is None else policy,
        closed_loop=not open_loop,
        prefill_tokens_per_s=_positive("--prefill-tokens-per-s", str(prefill_tokens_per_s)),
        network_bytes_per_s=_positive("--network", str(parse_size("--network", network))),
        store_bytes_per_s=None if store is None else _positive("--store", str(parse_size("--store", store))),
    )
    study.check()
    require_writable(json_file, plot)
    # Millions of live objects and no cycles among them: looking for some takes half of the time.
    gc.disable()
    try:
        rows = with_bar(lambda watch: run(study, watch))
    finally:
        gc.enable()
    table = report.render(study, rows)
    document = {"settings": study, "rows": rows}
    conclude(table, document, partial(picture.draw, rows), json_file, plot)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _positive(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise SettingsError(option, text, "a number above 0")
    return number
