"""`kvbm pin`: keep the blocks of a prompt in host memory for a while."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from kvbm.admin_protocol import Pin, Pinned
from kvbm.cli.managers import JsonOption, ManagerOption, NamespaceOption
from kvbm.cli.prompt_commands import (
    NOTHING_EXIT_CODE,
    ModelOption,
    PromptOption,
    open_prompt,
)
from kvbm.errors import SettingsError
from kvbm.hashing import join_keys
from kvbm.present.tables import json_text

HOURS_MAX = 168.0

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm pin --prompt-file system-prompt.json --hours 8
"""


@app.command(epilog=_EXAMPLES)
def pin(
    prompt_file: PromptOption,
    model: ModelOption = "",
    hours: Annotated[str, typer.Option(metavar="H", help="How long; at most a week (168).")] = "1",
    namespace: NamespaceOption = "",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Keep a prompt's blocks in host memory, for at most a week. Blocks on disk are brought up first.

    Pins may hold a quarter of a namespace's host memory. Only blocks that an engine has stored can be pinned.
    """
    seconds = _seconds(hours)
    with open_prompt(prompt_file, model, namespace, manager) as prompt:
        request = Pin(fingerprint=prompt.space.fingerprint, keys=join_keys(prompt.keys), seconds=seconds)
        reply = prompt.ask_to_hold(request)
    _report(reply, len(prompt.keys), seconds, as_json)


def _report(reply: Pinned, asked: int, seconds: float, as_json: bool) -> None:
    if as_json:
        print(json_text({"pinned": reply.blocks, "ready": reply.ready, "blocks": asked, "seconds": seconds}))
    else:
        more = (
            f", {reply.blocks - reply.ready} of them on their way from disk"
            if reply.blocks > reply.ready
            else ""
        )
        print(f"{reply.blocks} of {asked} blocks pinned for {seconds / 3600:g} h{more}")
        if not reply.blocks:
            print(
                "none of them is held: let an engine compute the prompt once, without adapter or cache salt"
            )
        elif reply.blocks < asked:
            print(f"the others are not held, or over what pins may hold together ({reply.blocks_max} blocks)")
    if not reply.blocks:
        raise typer.Exit(NOTHING_EXIT_CODE)


def _seconds(hours: str) -> float:
    try:
        number = float(hours)
    except ValueError:
        number = math.nan
    if not 0 < number <= HOURS_MAX:
        raise SettingsError("--hours", hours, f"a number above 0 and up to {HOURS_MAX:g}")
    return number * 3600
