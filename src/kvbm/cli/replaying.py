"""Shared by the commands that replay traces: a progress bar, and the table, JSON and picture of the results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvbm.errors import KvbmError, SettingsError

if TYPE_CHECKING:
    from rich.console import RenderableType

Result = TypeVar("Result")


def require_writable(json_file: Path | None, plot: Path | None) -> None:
    """Check both files before minutes of work. Raises SettingsError."""
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is None:
            continue
        folder = file.absolute().parent
        if file.is_dir() or not folder.is_dir():
            raise SettingsError(option, str(file), "a file in an existing folder")
        # A picture is drawn beside its file and then takes its place.
        if not os.access(folder if file is plot or not file.exists() else file, os.W_OK):
            raise SettingsError(option, str(file), "a file that can be written: permission denied")


def with_bar(work: Callable[[Callable[[str, int], Callable[[int], None]]], Result]) -> Result:
    """Do the work under a progress bar. `work` is given the `Watch` that it reports to."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def watch(what: str, total: int) -> Callable[[int], None]:
            bar.reset(task, description=what, total=total or None)
            return lambda done: bar.update(task, completed=done)

        return work(watch)


def conclude(
    table: RenderableType,
    document: object,
    draw: Callable[[Path], bool],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Print the table, write the document as JSON, draw. Raises KvbmError for a file that cannot be written."""
    from kvbm.present import tables
    from kvbm.present.axes import NO_PICTURE

    console = tables.console()
    # Lines for copying may be longer than the tables are wide.
    console.print(table, crop=False)
    try:
        if json_file is not None:
            tables.save_json(document, json_file)
            console.print(f"written: {json_file}", markup=False)
        if plot is not None and draw(plot):
            console.print(f"written: {plot}", markup=False)
        elif plot is not None:
            console.print(NO_PICTURE, markup=False)
    except OSError as error:
        raise KvbmError(f"{error.filename}: cannot be written: {error.strerror}") from error
