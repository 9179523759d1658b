"""The entry point: runs the sub-command, and reports an operating error as one line with exit code 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

from kvbm.errors import KvbmError
from kvbm.settings import process_environment

ERROR_EXIT_CODE = 2
COMPLETION_VARIABLE = "_KVBM_COMPLETE"

COMMANDS: dict[str, str] = {
    "manager": "Run a manager that the engines of this node share.",
    "config": "Show the settings and where each comes from; check a file.",
    "status": "Show the running managers: tiers, engines, queues, faults.",
    "inspect": "List what a running manager holds, and the KV events that it publishes.",
    "reset": "Drop the blocks of a running manager that are not in use.",
    "pin": "Keep the blocks of a prompt in host memory for a while.",
    "unpin": "End pins.",
    "prefetch": "Bring the blocks of a prompt or a session from disk into host memory.",
    "top": "Watch a running manager: tiers, flows, prefixes, engines, and what would help.",
    "web": "Serve the same as a web page, and an admin API, on this machine.",
    "disk": "Look after the directories of disk tiers: list, verify, clear.",
    "remote": "Look after the store that managers share: show, collect, clear.",
    "record": "Record the requests to a running manager as a trace.",
    "why": "Say why a request computed blocks instead of loading them.",
    "simulate": "Try policies and tier sizes on traces, before you buy memory.",
    "plan": "Find the cheapest tier sizes that meet a target on a trace.",
    "scale": "Simulate many nodes behind a router, to see how many are needed.",
    "doctor": "Try out what the settings ask for on this machine, and say what to do.",
    "bench": "Measure this machine: copies, disk, lookups and more.",
    "demo": "Show prefix reuse on real engines, with and without KVBM.",
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
        # Typer would print a wrong word in several lines, so its errors come to us. It gives back an exit status.
        sys.exit(build(words)(args=words, prog_name="kvbm", standalone_mode=False))
    except KvbmError as error:
        _print_error(str(error))
        sys.exit(ERROR_EXIT_CODE)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        # The parser's errors are of typer's own click, or of the package, depending on typer's version.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
        else:
            from kvbm.cli.removed import describe_removed_call  # only an error needs it

            place = getattr(getattr(error, "ctx", None), "command_path", "kvbm")
            unknown = f"{error.format_message().rstrip('.')} (see {place} --help)"
            _print_error(describe_removed_call(error) or unknown)
        sys.exit(ERROR_EXIT_CODE)


def _print_error(text: str) -> None:
    print(f"kvbm: {' '.join(text.split())}", file=sys.stderr)


def build(words: Sequence[str]) -> typer.Typer:
    """The command tree for one call: only the command that `words` names is imported, the others are a line of help.

    So `--help` and each command start fast.
    """
    app = typer.Typer(
        name="kvbm",
        help="KVBM keeps the KV cache of LLM engines in host memory, on disk and in remote stores, and brings it back.",
        epilog=_EXAMPLES,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top_level)
    # The top level has no option that takes a value, so the first bare word is the command.
    called = next((word for word in words if not word.startswith("-")), "")
    # Shell completion passes its words in the environment, and needs the options of every command.
    completing = COMPLETION_VARIABLE in process_environment()
    for name, summary in COMMANDS.items():
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
    raise AssertionError("a command is imported before it is called")


def _show_version(wanted: bool) -> None:
    if wanted:
        # This import takes half as long as all of `--help`, and only this option needs it.
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
