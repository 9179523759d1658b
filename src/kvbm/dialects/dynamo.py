"""NVIDIA Dynamo's extension of request bodies, `nvext`, where a client of Dynamo talks to an engine itself.

- `agent_hints.priority`: higher is better, 0 says nothing. The header `x-dynamo-request-priority` is stronger.
- `agent_hints.speculative_prefill`: the next turn comes soon, and its prefix shall be warm.
- `cache_control`: as Anthropic's, for the whole prompt.
- `agent_context`: what Dynamo makes of the headers of a session.

`agent_hints.osl` and `strict_priority` are for its router and say nothing about what is used again.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.dialects.anthropic import whole_prompt
from kvbm.dialects.raw import RawHint, joined, retained_by_priority, whole_number

PRIORITY_HEADER = "x-dynamo-request-priority"
_CONTEXT = {"session_id": "session", "parent_session_id": "parent", "session_final": "final"}


def of_dynamo(headers: Mapping[str, str], body: Mapping[str, object]) -> RawHint:
    """What `nvext` says. The names of `headers` are in lower case."""
    nvext = _mapping(body.get("nvext"))
    hints = _mapping(nvext.get("agent_hints"))
    context = _mapping(nvext.get("agent_context"))
    hint: RawHint = {part: context[name] for name, part in _CONTEXT.items() if context.get(name) is not None}
    if hints.get("speculative_prefill") is not None:
        hint["prefetch"] = hints["speculative_prefill"]
    priority = headers.get(PRIORITY_HEADER, hints.get("priority"))
    return joined(
        hint, retained_by_priority(whole_number(priority)), whole_prompt(nvext.get("cache_control"))
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
