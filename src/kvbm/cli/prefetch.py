"""`kvbm prefetch`: bring the blocks of a prompt, or of a session, from disk into host memory."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbm.admin_protocol import Describe, Description, Pin, Pinned, Prefetch, Prefetched
from kvbm.cli.managers import JsonOption, ManagerOption, NamespaceOption, choose_space, settings_for
from kvbm.cli.prompt_commands import (
    NOTHING_EXIT_CODE,
    ModelOption,
    OptionalPrompt,
    open_prompt,
    refuse,
)
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import SettingsError
from kvbm.hashing import join_keys
from kvbm.hints import NAME_CHARACTERS_MAX, tenant_digest
from kvbm.present.tables import json_text

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm prefetch --prompt-file system-prompt.json
  kvbm prefetch --session conversation-7
"""


@app.command(epilog=_EXAMPLES)
def prefetch(
    prompt_file: OptionalPrompt = None,
    session: Annotated[
        str, typer.Option(metavar="NAME", help="What a session asked for last, by its client's name for it.")
    ] = "",
    salt: Annotated[
        str, typer.Option(metavar="TEXT", help="The cache salt of that session's requests.")
    ] = "",
    model: ModelOption = "",
    namespace: NamespaceOption = "",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Bring a prompt's or a session's blocks up to host memory, up to a quarter of it.

    They come when no engine waits for the disk, and nothing keeps them there (see kvbm pin).
    """
    if (prompt_file is None) is not bool(session):
        raise SettingsError("--prompt-file", str(prompt_file or ""), "a file, or --session instead of it")
    if salt and not session:
        raise SettingsError("--salt", salt, "a salt beside --session")
    if len(session) > NAME_CHARACTERS_MAX:
        raise SettingsError("--session", session, f"at most {NAME_CHARACTERS_MAX} characters")
    reply: Pinned | Prefetched
    if prompt_file is not None:
        with open_prompt(prompt_file, model, namespace, manager) as prompt:
            request = Pin(fingerprint=prompt.space.fingerprint, keys=join_keys(prompt.keys), seconds=0.0)
            reply, asked = prompt.ask_to_hold(request), len(prompt.keys)
    else:
        settings = settings_for(manager)
        with Admin(choose_manager(settings), settings) as admin:
            space = choose_space(admin.ask(Describe(), Description).spaces, namespace, model)
            named = Prefetch(
                fingerprint=space.fingerprint, session=session, tenant=tenant_digest(salt) if salt else ""
            )
            reply = admin.ask(named, Prefetched)
            refuse(admin, reply.refusal)
        asked = reply.asked
    coming = reply.blocks - reply.ready
    if as_json:
        print(json_text({"coming": coming, "ready": reply.ready, "blocks": asked}))
    elif isinstance(reply, Prefetched) and not reply.known:
        print("no such session is known: names are kept since the manager's start, and belong to a salt")
    else:
        print(f"{coming} of {asked} blocks are on their way from disk, {reply.ready} were in host memory")
    if not reply.blocks:
        raise typer.Exit(NOTHING_EXIT_CODE)
