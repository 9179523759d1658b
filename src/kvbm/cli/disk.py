"""`kvbm disk ls|verify|clear DIR`: look after the disk tier's directories."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from kvbm.errors import KvbmError, SettingsError
from kvbm.present import tables
from kvbm.present.numbers import column_bytes
from kvbm.present.tables import json_text, plain_table
from kvbm.tiers.disk.directory import DIRECTORY_PREFIX, is_locked, owner_pid, remove_directory
from kvbm.tiers.disk.survey import (
    DirectorySurvey,
    VerifyReport,
    directories_at,
    survey_directory,
    verify_directory,
)

app = typer.Typer(
    help="Look after the disk tier's directories: list them, verify their blocks, remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The directory that DYN_KVBM_DISK_CACHE_DIR names, or one of the cache directories in it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


@app.command("ls", epilog="Example: kvbm disk ls /tmp")
def list_command(directory: Directory, as_json: AsJson = False) -> None:
    """List the cache directories in DIR: model, blocks, bytes, owner."""
    surveys = _over_directories(directory, survey_directory)
    if as_json:
        print(json_text({"directories": surveys}))
        return
    if not surveys:
        print(f"No cache directories in {directory}.")
        return
    headings = ("directory", "model", "blocks", "of", "full", "on disk", "owner")
    table = plain_table(headings, words={"directory", "owner"}, folded={"model"}, title=_title(directory))
    for survey in surveys:
        table.add_row(*_survey_row(survey))
    tables.console().print(table)


@app.command("verify", epilog="Example: kvbm disk verify /tmp --json")
def verify_command(directory: Directory, as_json: AsJson = False) -> None:
    """Read every block in DIR and compare its checksum; exit 1 if one is corrupt.

    This disturbs no engine: a directory in use may be verified too.
    """
    with _progress(hidden=as_json) as progress:

        def verify(path: Path) -> VerifyReport:
            task = progress.add_task(path.name.removeprefix(DIRECTORY_PREFIX), total=None)
            return verify_directory(
                path, lambda done, total: progress.update(task, completed=done, total=total)
            )

        reports = _over_directories(directory, verify)
    corrupt = sum(report.corrupt for report in reports)
    if as_json:
        print(json_text({"corrupt": corrupt, "directories": reports}))
    elif not reports:
        print(f"No cache directories in {directory}.")
    else:
        _print_reports(directory, reports, corrupt)
    raise typer.Exit(1 if corrupt else 0)


@app.command("clear", epilog="Example: kvbm disk clear /tmp")
def clear_command(directory: Directory, as_json: AsJson = False) -> None:
    """Remove the cache directories in DIR that no process owns; exit 1 if one could not be removed."""
    removed: list[str] = []
    refused: list[dict[str, Any]] = []
    for path in _existing(directory):
        if remove_directory(path):
            removed.append(str(path))
        else:
            reason = (
                f"in use by process {owner_pid(path)}"
                if is_locked(path)
                else "it cannot be removed by this user"
            )
            refused.append({"path": str(path), "reason": reason})
    if as_json:
        print(json_text({"removed": removed, "refused": refused}))
    else:
        for name in removed:
            print(f"removed {name}")
        for refusal in refused:
            print(f"kept {refusal['path']}: {refusal['reason']}", file=sys.stderr)
        if not removed and not refused:
            print(f"No cache directories in {directory}.")
    raise typer.Exit(1 if refused else 0)


def _survey_row(survey: DirectorySurvey) -> list[Text]:
    if not survey.readable:
        model, blocks = Text("unreadable: a tier starts empty here", style="yellow"), ["-", "-", "-"]
    else:
        model = Text(survey.model)
        share = survey.slots_used / survey.slots_total
        blocks = [f"{survey.slots_used:,}", f"{survey.slots_total:,}", f"{share:.0%}"]
    owner = (
        Text(f"pid {survey.pid}" if survey.pid else "in use", style="green") if survey.locked else Text("-")
    )
    return [
        _name(survey.path),
        model,
        *map(Text, blocks),
        Text(column_bytes(survey.medium_bytes)),
        owner,
    ]


def _print_reports(directory: Path, reports: list[VerifyReport], corrupt: int) -> None:
    headings = ("directory", "blocks", "verified", "corrupt", "changed", "read", "corrupt slots")
    table = plain_table(headings, words={"directory"}, folded={"corrupt slots"}, title=_title(directory))
    for report in reports:
        slots = ", ".join(map(str, report.corrupt_slots))
        more = ", …" if report.corrupt > len(report.corrupt_slots) else ""
        note = f"{slots}{more}" if report.readable else "unreadable: a tier starts empty here"
        table.add_row(
            _name(report.path),
            f"{report.resident:,}",
            f"{report.verified:,}",
            Text(f"{report.corrupt:,}", style="bold red" if report.corrupt else "green"),
            f"{report.changed:,}",
            column_bytes(report.verified_bytes),
            Text(note),
        )
    console = tables.console()
    console.print(table)
    verified = sum(report.verified for report in reports)
    if corrupt:
        console.print(
            Text(f"{corrupt:,} corrupt: each is a miss, and is dropped at the next request for it.", "red")
        )
    else:
        console.print(Text(f"All {verified:,} verified blocks are sound.", "green"))


def _over_directories(directory: Path, look: Callable[[Path], Any]) -> list[Any]:
    """The result of `look` for each directory. Directories that are removed meanwhile are left out."""
    found = []
    for path in _existing(directory):
        try:
            found.append(look(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise KvbmError(f"{path}: {error.strerror}") from error
    return found


def _existing(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise SettingsError("DIR", str(directory), "an existing directory")
    return directories_at(directory)


def _name(path: str) -> Text:
    """NAMESPACE-N; the rest of the name is in the table's title."""
    return Text(Path(path).name.removeprefix(DIRECTORY_PREFIX), style="cyan")


def _title(directory: Path) -> str:
    root = directory.parent if directory.name.startswith(DIRECTORY_PREFIX) else directory
    return f"{DIRECTORY_PREFIX}NAMESPACE-N in {root}"


def _progress(hidden: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)
