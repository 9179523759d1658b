"""The headers by which coding agents, and clients of NVIDIA Dynamo, name their sessions.

Names and precedence are those of Dynamo's frontend (its `protocols::agents`): its own headers, then Claude Code, Codex,
DeepSeek's harness and OpenCode. An agent below another one has a session of its own, whose parent is the other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvbm.dialects.raw import RawHint, flag


class _Names(NamedTuple):
    """The headers of one agent; `child` names the session of an agent below the one of `session`."""

    session: str
    parent: str
    child: str = ""


FINAL = "x-dynamo-session-final"
DYNAMO = _Names("x-dynamo-session-id", "x-dynamo-parent-session-id")
AGENTS = (
    _Names("x-claude-code-session-id", "x-claude-code-parent-agent-id", "x-claude-code-agent-id"),
    _Names("thread-id", "x-codex-parent-thread-id"),
    _Names("x-deepseek-harness-session-id", "x-deepseek-harness-parent-session-id"),
    _Names("x-session-id", "x-parent-session-id"),
)
HEADERS = frozenset(name for names in (DYNAMO, *AGENTS) for name in names if name) | {FINAL}
"""All that are read here, in lower case."""


def of_dynamo_headers(headers: Mapping[str, str]) -> RawHint:
    """The session by Dynamo's own names, and whether it ends. The names of `headers` are in lower case."""
    hint = _session(headers, DYNAMO)
    if final := _text(headers, FINAL):
        hint["final"] = flag(final)
    return hint


def of_agents(headers: Mapping[str, str]) -> RawHint:
    """The session by the first agent that names one. Dynamo's own name stands alone where it is said."""
    if _text(headers, DYNAMO.session):
        return {}
    return next((hint for names in AGENTS if (hint := _session(headers, names))), {})


def _session(headers: Mapping[str, str], names: _Names) -> RawHint:
    root = _text(headers, names.session)
    if not root:
        return {}
    session = (_text(headers, names.child) if names.child else "") or root
    parent = _text(headers, names.parent)
    if names.child:
        parent = (parent or root) if session != root else ""
    return {"session": session, "parent": parent} if parent and parent != session else {"session": session}


def _text(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "").strip()
