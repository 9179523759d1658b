"""What the commands share that talk to a running manager: their options, and which manager and namespace is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kvbm.admin_protocol import SpaceReport
from kvbm.errors import SettingsError
from kvbm.settings import Settings, load_settings, parse_socket_path, process_environment

ManagerOption = Annotated[
    str,
    typer.Option("--manager", metavar="SOCKET", help="Socket of the manager; the one that runs if left out."),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace", metavar="DIGITS", help="The namespace's first digits, where there are several."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

TIER_LABELS = {"host": "G2", "disk": "G3", "remote": "G4"}
"""The manager's tiers, by the names that operators know."""
SLOT_TIERS = ("host", "disk")
"""Those whose blocks are the manager's own: they can be listed and dropped."""


def settings_for(manager: str) -> Settings:
    """The settings of this environment, with the manager that `--manager` names, if it does."""
    if manager:
        # Here, so that the error names this option.
        parse_socket_path("--manager", manager)
    return load_settings(process_environment(), {"manager": manager or None}).settings


def parse_tier(text: str, accepted: Sequence[str] = ("G2", "G3")) -> str:
    """`host` or `disk`; empty for `all`, where that is accepted. G2 and G3 are the same. Raises SettingsError."""
    names = {TIER_LABELS[tier]: tier for tier in SLOT_TIERS} | {tier.upper(): tier for tier in SLOT_TIERS}
    if "all" in accepted:
        names["ALL"] = ""
    if text.upper() in (TIER_LABELS["remote"], "REMOTE"):
        others = ", ".join(accepted)
        raise SettingsError(
            "--tier", text, f"one of {others}; `kvbm remote` shows and clears what lies in a store"
        )
    if text.upper() not in names:
        raise SettingsError("--tier", text, "one of " + ", ".join(accepted))
    return names[text.upper()]


def tier_label(tier: str) -> str:
    """A tier for people: `G2 host`."""
    return f"{TIER_LABELS[tier]} {tier}"


def choose_space(spaces: Sequence[SpaceReport], digits: str, model: str = "") -> SpaceReport:
    """The namespace that is meant by the first digits of its fingerprint, by its model, or as the only one.

    Raises SettingsError, which lists them, where it is none or not clear which.
    """
    of_model = [space for space in spaces if model in ("", space.model)]
    with_digits = [space for space in spaces if space.fingerprint.startswith(digits.lower())]
    meant = [space for space in with_digits if space in of_model]
    if len(meant) == 1:
        return meant[0]
    listed = ", ".join(f"{space.namespace} ({space.model})" for space in meant or spaces)
    if model and not of_model:
        field, value, accepted = "--model", model, "a model of the manager's namespaces"
    elif with_digits and not meant:
        field, value, accepted = "--namespace", digits, "a namespace of the model that --model names"
    else:
        field, value, accepted = "--namespace", digits, "the first digits of one of the manager's namespaces"
    raise SettingsError(field, value, f"{accepted}; there: {listed or 'none yet: no engine came'}")
