"""vLLM's own request fields, those that are not ours: `session_id`, `priority`, `vllm_xargs` and `kv_hints`.

vLLM's priority orders the queue: lower is earlier, and 0 says nothing. Dynamo passes its own priority on as this field,
negated, and means the cache too. So it is taken as Dynamo's, negated again, and biases what is retained, by a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm.dialects.raw import RawHint, flag, joined, over, retained_by_priority, whole_number

SESSION_HEADER = "x-session-id"
PRIORITY_HEADER = "x-vllm-priority"
OWN_ACTION = "kvbm.hint"
"""The action of an envelope whose payload is our own form."""
OWN_ACTION_VERSION = "1"
NO_SUCH_ACTION = "kv_hints action"
"""A part that the form does not have: `read_hint` rejects it, and so an action that is not ours is counted."""
ACTIONS_MAX = 32

_PREFIX = "kvbm_"
_FLAGS = ("kvbm_final", "kvbm_prefetch", "kvbm_demote", "kvbm_store")
FLAT_NAMES = ("kvbm_session", "kvbm_parent", "kvbm_expect_s", *_FLAGS)
"""Parts of our form in `vllm_xargs`, which takes scalars and lists of them: ranges cannot be said there."""


def of_fields(session_id: object, priority: object) -> RawHint:
    """The two fields of a request that say something."""
    hint: RawHint = {"session": session_id} if session_id else {}
    if isinstance(priority, int) and not isinstance(priority, bool):
        priority = -priority
    return joined(hint, retained_by_priority(priority))


def of_body(headers: Mapping[str, str], body: Mapping[str, object]) -> RawHint:
    """The same two before vLLM has read them, as it finds them: the header of a priority is stronger than the field."""
    session = body.get("session_id") or headers.get(SESSION_HEADER)
    if not session and isinstance(xargs := body.get("vllm_xargs"), dict):
        session = xargs.get("session_id")
    header = whole_number(headers.get(PRIORITY_HEADER))
    return of_fields(session, header if isinstance(header, int) else body.get("priority"))


def of_xargs(xargs: object) -> RawHint:
    """Our parts by flat names. vLLM makes numbers of booleans. A name like ours that is none is rejected later."""
    if not isinstance(xargs, Mapping):
        return {}
    hint: RawHint = {}
    for name, said in xargs.items():
        if isinstance(name, str) and name.startswith(_PREFIX):
            part = name.removeprefix(_PREFIX) if name in FLAT_NAMES else name
            hint[part] = flag(said) if name in _FLAGS else said
    return hint


def of_kv_hints(envelope: object) -> RawHint:
    """vLLM's envelope `{protocol_version, message_id, actions}`, as an object or as a mapping.

    Nothing is executed. An action of type `kvbm.hint`, version 1, has our form as its payload; any other one (as
    `kv.fetch`, which names a peer to copy from) becomes a part that is rejected.
    """
    actions = _field(envelope, "actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return {}
    found: list[RawHint] = []
    for action in actions[:ACTIONS_MAX]:
        payload = _field(action, "payload")
        found.append(payload if _is_ours(action) and isinstance(payload, dict) else {NO_SUCH_ACTION: True})
    return over(*found)


def _is_ours(action: object) -> bool:
    version = _field(action, "action_version")
    known = isinstance(version, str) and version.split(".")[0] == OWN_ACTION_VERSION
    return known and _field(action, "action_type") == OWN_ACTION


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
