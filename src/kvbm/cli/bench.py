"""`kvbm bench`: the budgets of the design, measured on this machine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbm.errors import KvbmError, SettingsError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

CHECKOUT = Path(__file__).parents[3]


def parts(checkout: Path = CHECKOUT) -> dict[str, str]:
    """The benchmarks by name, each with the first line of its docstring; empty where there is no checkout."""
    runner = checkout / "benchmarks" / "__main__.py"
    if not runner.is_file():
        return {}
    for node in ast.parse(runner.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS":
            modules: dict[str, str] = ast.literal_eval(node.value)
            return {name: _first_line(checkout, module) for name, module in modules.items()}
    raise AssertionError("benchmarks/__main__.py has a table PARTS")


def _first_line(checkout: Path, module: str) -> str:
    source = checkout.joinpath(*module.split(".")).with_suffix(".py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


_PARTS = parts()
_EPILOG = "\b\nBenchmarks:\n" + "\n".join(f"  {name:<10} {line}" for name, line in _PARTS.items())
_ONLY = f"Only these, separated by commas: {', '.join(_PARTS)}."


@app.command(epilog=_EPILOG if _PARTS else None)
def bench(
    only: Annotated[str, typer.Option(metavar="NAMES", help=_ONLY if _PARTS else None)] = "",
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the JSON goes.")] = Path("bench-output"),
) -> None:
    """Measure every budget beside its ceiling, in one run, and print one table for each benchmark.

    The benchmarks are in the source checkout, not in the package.

    Example: kvbm bench --only copy,disk,manager
    """
    if not _PARTS:
        raise KvbmError("kvbm bench needs the source checkout: run it there, as `make bench`")
    unknown = [name for name in only.split(",") if only and name not in _PARTS]
    if unknown:
        raise SettingsError("--only", only, f"some of {', '.join(_PARTS)}, separated by commas")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            "--output", str(output), f"a directory that can be made ({error.strerror})"
        ) from None
    command = [sys.executable, "-m", "benchmarks", "--output", str(output.absolute())]
    if only:
        command += ["--only", only]
    raise typer.Exit(subprocess.run(command, cwd=CHECKOUT, check=False).returncode)
