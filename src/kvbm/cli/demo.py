"""`kvbm demo`: the prefix-reuse experiment on real `vllm serve` processes, with and without KVBM."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbm.errors import SettingsError

if TYPE_CHECKING:
    from rich.console import Console

    from kvbm.demo.report import Results
    from kvbm.demo.runs import Options

app = typer.Typer()

EXIT_WRONG = 1
EXIT_FAILED = 2
DTYPES = ("auto", "float32", "float", "float16", "half", "bfloat16")
"""What vLLM takes."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where results, logs and the model go.")] = Path(
        "demo-results"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="A model's directory or name. Default: a random-weight Qwen3 made here."),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A quick run for CI: fewer, shorter requests.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(help="What the engine computes in. Only in float32 must all runs give the same text."),
    ] = "float32",
    prefix_tokens: Annotated[int | None, typer.Option(min=256, help="Length of the shared prefixes.")] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a server may take to start.")
    ] = 300.0,
) -> None:
    """Show what the cache is worth: 5 long prefixes, 30 requests, a device cache too small to keep them.

    Three runs of `vllm serve`: alone, with KVBM in host memory, and with KVBM in little host memory and on disk.
    Writes results.json and results.png, and checks that all runs gave the same text.

    Example: kvbm demo --model Qwen/Qwen3-0.6B

    Exit status: 0 as shown, 1 when texts differ or a tier served nothing, 2 when a server failed.
    """
    _refuse_bad(output, model, dtype)
    from rich.console import Console

    from kvbm.demo.client import RequestError
    from kvbm.demo.experiment import run_experiment
    from kvbm.demo.progress import Reporter
    from kvbm.demo.runs import Options, find_cuda_device
    from kvbm.demo.server import ServerError

    console = Console()
    options = Options(
        output=output,
        model=model,
        short=short,
        dtype=dtype,
        prefix_tokens=prefix_tokens,
        cuda_device=find_cuda_device(),
        start_timeout_s=start_timeout,
    )
    # A polite end must pass through the same clean-up as Ctrl-C.
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        with Reporter(console) as reporter:
            results = run_experiment(options, reporter)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted[/yellow]: all servers were ended")
        raise typer.Exit(128 + signal.SIGINT) from None
    except (ServerError, RequestError, OSError, ValueError) as error:
        console.print(f"[red]the demo failed[/red]: {type(error).__name__}", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from None
    raise typer.Exit(_conclude(console, options, results))


def _refuse_bad(output: Path, model: str | None, dtype: str) -> None:
    """Before servers are started. Raises SettingsError."""
    if dtype not in DTYPES:
        raise SettingsError("--dtype", dtype, f"one of {', '.join(DTYPES)}")
    if model is not None and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise SettingsError("--model", model, "the directory of a model, or a name such as Qwen/Qwen3-0.6B")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            "--output", str(output), f"a directory that can be made ({error.strerror})"
        ) from None


def _raise_exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _conclude(console: Console, options: Options, results: Results) -> int:
    """Print, write and judge. Returns the exit status."""
    from kvbm.demo import picture, report
    from kvbm.present.axes import NO_PICTURE

    console.print()
    console.print(report.render(results))
    report.save(results, options.output / "results.json")
    written = [str(options.output / "results.json")]
    if picture.draw(results, options.output / "results.png"):
        written.append(str(options.output / "results.png"))
    else:
        console.print(NO_PICTURE, markup=False)
    console.print("written: " + ", ".join(written), highlight=False)
    found = report.problems(results, same_text_required=options.dtype == "float32")
    difference = report.first_difference(results)
    if difference is None:
        count, ties = len(results.runs[0].requests), report.ties(results)
        but = f", but for {ties} at a tie of two equally likely tokens" if ties else ""
        console.print(
            f"[green]OK[/green]: all {len(results.runs)} runs gave the same text for all {count} requests{but}"
        )
    elif options.dtype != "float32":
        console.print(
            f"texts differ, as they may in {options.dtype}, where rounding depends on chunks:\n{difference}",
            markup=False,
        )
    for problem in found:
        console.print(f"[red]FAILED[/red]: {problem}", highlight=False)
    return EXIT_WRONG if found else 0
