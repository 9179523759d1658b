"""Whatever clients send: no dialect raises, and what is read of it is bounded."""

from __future__ import annotations

import json
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvbm.dialects import hint_of_http, hint_of_priorities
from kvbm.dialects.agents import AGENTS, DYNAMO, HEADERS
from kvbm.dialects.http import FIELDS, SESSION_HEADERS
from kvbm.dialects.raw import resolved
from kvbm.hints import NAME_CHARACTERS_MAX, RANGES_MAX, TOKENS_MAX, read_hint
from kvbm.vllm_integration.hints import hint_of, with_hint

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), True])
WORDS = st.sampled_from(
    ["5m", "1h", "30m", "24h", "in_memory", "explicit", "ephemeral", "true", "0", "", "\ud800"]
)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=300)
NAMES = st.sampled_from(
    [
        "actions", "action_type", "action_version", "agent_context", "agent_hints", "cache_control", "content", "end",
        "end_share", "kvbm", "kvbm_final", "kvbm_session", "min_ttl", "mode", "payload", "priority",
        "retain", "session", "session_id", "speculative_prefill", "start", "text", "ttl",
        "type",
    ]
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=25,
)
BODIES = st.dictionaries(st.sampled_from([*FIELDS, "messages"]), ANYTHING, max_size=8)
HEADER_VALUES = st.dictionaries(
    st.sampled_from(sorted(SESSION_HEADERS | {"x-vllm-priority"})), st.text(max_size=300), max_size=4
)


def assert_bounded(raw: dict[str, object] | None) -> None:
    hint, _ = read_hint(raw)
    assert all(name is None or len(name) <= NAME_CHARACTERS_MAX for name in (hint.session, hint.parent))
    assert len(hint.retain) <= RANGES_MAX
    assert all(each.end is None or each.start < each.end <= TOKENS_MAX for each in hint.retain)


@given(HEADER_VALUES, BODIES)
def test_any_request_of_http(headers: dict[str, str], body: dict[str, object]) -> None:
    before = repr(body)
    raw = hint_of_http(headers, body)
    assert repr(body) == before, "the body is another's"
    assert_bounded(None if raw is None else resolved(raw, 1000))


@given(HEADER_VALUES, BODIES | ANYTHING, st.binary(max_size=8))
def test_any_bytes(headers: dict[str, str], body: object, end: bytes) -> None:
    with_hint(headers, json.dumps(body).encode(errors="replace") + end)
    with_hint(headers, end)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_any_request_of_vllm(
    params: object, extra_args: object, session: object, priority: object, kv_hints: object
) -> None:
    request = SimpleNamespace(
        kv_transfer_params=params,
        sampling_params=SimpleNamespace(extra_args=extra_args),
        session_id=session,
        priority=priority,
        kv_hints=kv_hints,
        num_prompt_tokens=100,
    )
    before = repr(request)
    assert_bounded(hint_of(request))
    assert repr(request) == before


@given(
    ANYTHING | st.lists(NUMBERS | st.none(), max_size=100), st.integers(1, 1 << 20), st.integers(0, 1 << 20)
)
def test_any_priorities(priorities: object, block_tokens: int, first_block: int) -> None:
    assert_bounded(hint_of_priorities(priorities, block_tokens, first_block))


def test_a_body_nested_deeper_than_functions_call_themselves() -> None:
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": deep}],
        "nvext": {"cache_control": {}},
    }
    assert hint_of_http({}, body) == {"retain": [{"min_ttl": 300}]}
    text = b'{"cache_control": {"type": "ephemeral"}, "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert with_hint({}, text) is None


def test_names_of_headers_are_in_lower_case() -> None:
    assert all(name == name.lower() for name in SESSION_HEADERS)
    assert {DYNAMO.session, *(names.session for names in AGENTS)} <= HEADERS
