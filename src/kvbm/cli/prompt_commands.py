"""What `kvbm pin` and `kvbm prefetch` share: a prompt whose blocks the manager is asked to hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvbm.admin_protocol import Describe, Description, Pin, Pinned, SpaceReport
from kvbm.cli.managers import choose_space, settings_for
from kvbm.cli.prompts import held_chain, read_tokens
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import ManagerRefused

NOTHING_EXIT_CODE = 1
"""The command was right, and there was nothing to do it to."""

_PROMPT = typer.Option(
    "--prompt-file",
    metavar="FILE",
    help="The prompt, as a JSON list of token ids.",
)
PromptOption = Annotated[Path, _PROMPT]
OptionalPrompt = Annotated[Path | None, _PROMPT]
ModelOption = Annotated[
    str, typer.Option("--model", metavar="M", help="The model, as its engine names it; needed among several.")
]


@dataclass(slots=True)
class Prompt:
    """A prompt's keys in a namespace, and the manager that is asked."""

    admin: Admin
    space: SpaceReport
    keys: list[bytes]

    def ask_to_hold(self, request: Pin) -> Pinned:
        """The manager's answer. Raises ManagerRefused where it cannot hold blocks."""
        reply = self.admin.ask(request, Pinned)
        refuse(self.admin, reply.refusal)
        return reply


def refuse(admin: Admin, refusal: str) -> None:
    """Raise ManagerRefused where the manager refused."""
    if refusal:
        raise ManagerRefused(f"the manager at {admin.socket_path} refused: {refusal}")


@contextmanager
def open_prompt(file: Path, model: str, namespace: str, manager: str) -> Iterator[Prompt]:
    """The prompt, at the manager and in the namespace that are meant. Raises SettingsError, ManagerUnavailable."""
    settings = settings_for(manager)
    with Admin(choose_manager(settings), settings) as admin:
        space = choose_space(admin.ask(Describe(), Description).spaces, namespace, model)
        keys, _ = held_chain(admin, space, read_tokens(file), str(file))
        yield Prompt(admin, space, keys)
