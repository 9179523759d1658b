"""`kvbm bench`: the budgets of the design, measured on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbm.errors import KvbmError

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    only: Annotated[str, typer.Option(help="comma-separated: copy, disk, manager, ttft, overhead")] = "",
    output: Annotated[Path, typer.Option(help="where the JSON goes")] = Path("bench-output"),
) -> None:
    """Measure every budget beside its ceiling, in one run, and print one table per part.

    The measurements live in the checkout, not in the package.

    Example: kvbm bench --only copy,disk,manager
    """
    checkout = Path(__file__).parents[3]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise KvbmError("kvbm bench needs the source checkout: run it there, as `make bench`")
    command = [sys.executable, "-m", "benchmarks", "--output", str(output.absolute())]
    if only:
        command += ["--only", only]
    raise typer.Exit(subprocess.run(command, cwd=checkout, check=False).returncode)
