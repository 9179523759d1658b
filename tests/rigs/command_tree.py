"""The commands of `kvbm` and their options, as its parser has them."""

from __future__ import annotations

import functools
from typing import Any

import typer

from kvbm.cli.main import COMMANDS, build

HELP_FLAGS = {"-h", "--help"}


@functools.cache
def parsers() -> dict[str, Any]:
    """`manager`, `disk`, `disk ls`, …: every command and sub-command, each with click's object for it."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        command: Any = typer.main.get_command(build([name])).commands[name]  # type: ignore[attr-defined]
        found[name] = command
        found |= {f"{name} {part}": below for part, below in getattr(command, "commands", {}).items()}
    return found


@functools.cache
def commands() -> dict[str, set[str]]:
    """Every command and sub-command with its flags; a sub-command has those of its group too."""
    own = {
        call: {flag for option in parser.params for flag in (*option.opts, *option.secondary_opts)}
        for call, parser in parsers().items()
    }
    return {call: HELP_FLAGS | own[call.split()[0]] | flags for call, flags in own.items()}
