"""`kvbm prefetch`: bring the blocks of a prompt from disk into host memory."""

from __future__ import annotations

import typer

from kvbm.admin_protocol import Pin
from kvbm.cli.managers import JsonOption, ManagerOption, NamespaceOption
from kvbm.cli.prompt_commands import (
    NOTHING_EXIT_CODE,
    ModelOption,
    PromptOption,
    TokenizerOption,
    open_prompt,
)
from kvbm.hashing import join_keys
from kvbm.present.tables import json_text

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: kvbm prefetch --prompt-file system-prompt.json")
def prefetch(
    prompt_file: PromptOption,
    model: ModelOption = "",
    tokenizer: TokenizerOption = "",
    namespace: NamespaceOption = "",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Bring a prompt's blocks up to host memory, up to a quarter of it. Nothing keeps them there (see kvbm pin)."""
    with open_prompt(prompt_file, model, tokenizer, namespace, manager) as prompt:
        request = Pin(fingerprint=prompt.space.fingerprint, keys=join_keys(prompt.keys), seconds=0.0)
        reply = prompt.ask_to_hold(request)
    asked, coming = len(prompt.keys), reply.blocks - reply.ready
    if as_json:
        print(json_text({"coming": coming, "ready": reply.ready, "blocks": asked}))
    else:
        print(f"{coming} of {asked} blocks are on their way from disk, {reply.ready} were in host memory")
    if not reply.blocks:
        raise typer.Exit(NOTHING_EXIT_CODE)
