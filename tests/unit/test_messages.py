"""Every message of the protocol has a sender: the side that it comes from makes it somewhere."""

from __future__ import annotations

import ast
import typing

from kvbm import admin_protocol, protocol, step_plan
from rigs.sources import SOURCES

MANAGER = "kvbm/manager/"
MODULES = ("kvbm.protocol", "kvbm.step_plan", "kvbm.admin_protocol")
SENDERS = {
    **dict.fromkeys(typing.get_args(protocol.ToManager), ""),
    **dict.fromkeys(typing.get_args(protocol.FromManager), MANAGER),
    **dict.fromkeys(typing.get_args(admin_protocol.AdminRequest), ""),
    **dict.fromkeys(typing.get_args(admin_protocol.AdminReply), MANAGER),
    **dict.fromkeys((protocol.StoredRun, protocol.RemovedBlocks), MANAGER),  # parts of TierEvents
    step_plan.NodeSlots: "kvbm/leader/",  # a part of the plans
    step_plan.StorePlan: "kvbm/leader/",
    step_plan.LoadPlan: "kvbm/leader/",
    step_plan.StepPlan: "kvbm/leader/",
    step_plan.StepReport: "kvbm/worker/",
}
"""Messages, and the folder that sends them; empty is every folder but the manager's."""


def made(source: str) -> set[str]:
    """The names of the messages that a module makes: those that it takes from the protocol and calls."""
    tree = ast.parse(source)
    taken = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
    }
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {call.id for call in calls if isinstance(call, ast.Name)} & taken


def without_sender(sources: dict[str, str]) -> list[str]:
    """The messages that no module of the side they come from makes."""
    by_file = {path: made(source) for path, source in sources.items()}
    return [
        message.__name__
        for message, folder in SENDERS.items()
        if not any(
            message.__name__ in names
            for path, names in by_file.items()
            if (path.startswith(folder) if folder else not path.startswith(MANAGER))
        )
    ]


def test_every_message_has_a_sender() -> None:
    assert without_sender(SOURCES) == []


def test_a_message_that_the_other_side_makes_has_no_sender() -> None:
    assert "Lookup" in without_sender(
        {"kvbm/leader/lookups.py": "from kvbm.protocol import Lookup\nx: Lookup\n"}
    )
    sends = "from kvbm.protocol import Lookup\nchannel.send(Lookup(lookup=1, keys=b''))\n"
    assert "Lookup" not in without_sender({"kvbm/leader/lookups.py": sends})
    assert "Lookup" in without_sender({"kvbm/manager/requests.py": sends})
    own_class = "class Progress: ...\nProgress()\n"
    assert "Progress" in without_sender({"kvbm/manager/requests.py": own_class})


def test_every_message_is_somebodys() -> None:
    known = {*SENDERS, protocol.Message}
    structs = [
        value
        for value in (*vars(protocol).values(), *vars(step_plan).values())
        if isinstance(value, type) and value.__module__ in MODULES and hasattr(value, "__struct_fields__")
    ]
    assert [struct.__name__ for struct in structs if struct not in known] == []
