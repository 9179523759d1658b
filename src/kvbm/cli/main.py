"""The entry point: finds the sub-command, and turns an operating error into one line and exit code 2."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

import typer

from kvbm.errors import KvbmError
from kvbm.settings import process_environment

ERROR_EXIT_CODE = 2
COMPLETION_VARIABLE = "_KVBM_COMPLETE"

COMMANDS: dict[str, str] = {
    "manager": "Run a manager that the engines of this node share.",
    "config": "Show the settings and where each comes from.",
    "disk": "Look into a disk tier: list, verify, clear.",
    "record": "Write down what a running manager is asked for, as a trace.",
    "simulate": "Replay traces through policies and sizes, before any memory is bought.",
    "plan": "Which sizes of the tiers meet a target on a trace, cheapest.",
    "scale": "Simulate many nodes behind a router: where one stops being enough.",
    "bench": "Measure this machine: copies, disk, look-ups.",
    "demo": "Watch prefix reuse on real engines.",
}
"""Sub-commands and their one-line summaries. `kvbm.cli.<name>` holds `app`, a `typer.Typer`."""

_EXAMPLES = """\b
Examples:
  kvbm manager --host-memory 20GB
  kvbm config show
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, `sys.argv` if None, and exit: 0, 1 when interrupted, 2 for a user's error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build(words)(args=words, prog_name="kvbm")
    except KvbmError as error:
        print(f"kvbm: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(ERROR_EXIT_CODE)


def build(words: Sequence[str]) -> typer.Typer:
    """The command tree for one call: the command that `words` names is real, the others are a line of help.

    Importing one command is what keeps `--help` and every other command fast.
    """
    app = typer.Typer(
        name="kvbm",
        help="KVBM keeps the KV cache of LLM engines in host memory and on disk, and brings it back.",
        epilog=_EXAMPLES,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top_level)
    # The top level has no option that takes a value, so the first bare word is the command.
    called = next((word for word in words if not word.startswith("-")), "")
    # Completion has its words in the environment and needs every command's options.
    completing = COMPLETION_VARIABLE in process_environment()
    for name, summary in COMMANDS.items():
        if importlib.util.find_spec(f"kvbm.cli.{name}") is None:
            continue
        if name == called or completing:
            _add(app, name, summary)
        else:
            app.command(name, help=summary)(_stand_in)
    return app


def _add(app: typer.Typer, name: str, summary: str) -> None:
    command: typer.Typer = importlib.import_module(f"kvbm.cli.{name}").app
    alone = command.registered_commands
    if len(alone) == 1 and not command.registered_groups and command.registered_callback is None:
        # An app of one command is that command, not a group around it.
        alone[0].name = name
        app.registered_commands.append(alone[0])
    else:
        app.add_typer(command, name=name, help=summary, no_args_is_help=True)


def _stand_in() -> None:
    raise AssertionError("a command is loaded before it is called")


def _show_version(wanted: bool) -> None:
    if wanted:
        # Half of what `--help` would take; only this option needs it.
        metadata = importlib.import_module("importlib.metadata")
        try:
            version = metadata.version("openkvbm")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"kvbm {version}")
        raise typer.Exit


def _top_level(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    del version


if __name__ == "__main__":
    main()
