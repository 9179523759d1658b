"""`kvbm unpin`: end pins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbm.admin_protocol import Describe, Description, Unpin, Unpinned
from kvbm.cli.managers import JsonOption, ManagerOption, NamespaceOption, choose_space, settings_for
from kvbm.cli.prompt_commands import NOTHING_EXIT_CODE, ModelOption
from kvbm.cli.prompts import candidates, read_tokens
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import SettingsError
from kvbm.hashing import join_keys
from kvbm.present.tables import json_text

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm unpin --prompt-file system-prompt.json
  kvbm unpin --all
"""


@app.command(epilog=_EXAMPLES)
def unpin(
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The prompt that was pinned, as a JSON list of token ids."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="End all pins of the namespace.")] = False,
    model: ModelOption = "",
    namespace: NamespaceOption = "",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """End the pin of a prompt, or all pins of a namespace. The blocks stay until they are evicted."""
    if (prompt_file is None) is not every:
        raise SettingsError("--prompt-file", str(prompt_file or ""), "a file, or --all instead of it")
    settings = settings_for(manager)
    path = choose_manager(settings)
    with Admin(path, settings) as admin:
        space = choose_space(admin.ask(Describe(), Description).spaces, namespace, model)
        last = b""
        if prompt_file is not None:
            tokens = read_tokens(prompt_file)
            last = join_keys(keys[-1] for keys in candidates(space, tokens, str(prompt_file)))
        ended = admin.ask(Unpin(fingerprint=space.fingerprint, last_keys=last), Unpinned)
    if as_json:
        print(json_text({"pins": ended.pins, "blocks": ended.blocks}))
    else:
        print(f"{ended.pins} {'pin' if ended.pins == 1 else 'pins'} ended, of {ended.blocks} blocks")
    if not ended.pins and not every:
        raise typer.Exit(NOTHING_EXIT_CODE)
