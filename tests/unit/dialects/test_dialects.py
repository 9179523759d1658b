"""What clients of other APIs say, with bodies as they send them, and what of it arrives in our form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.dialects import hint_of_http, hint_of_priorities
from kvbm.dialects.agents import of_agents, of_dynamo_headers
from kvbm.dialects.anthropic import of_anthropic
from kvbm.dialects.dynamo import of_dynamo
from kvbm.dialects.openai import of_openai
from kvbm.dialects.raw import joined, over, resolved, seconds
from kvbm.dialects.vllm import of_fields, of_kv_hints, of_xargs
from kvbm.hints import RANGES_MAX, UNKNOWN, Hint, Outcome, Retain, read_hint


def read(raw: dict[str, object]) -> Hint:
    """The hint, all parts of which are accepted."""
    hint, verdicts = read_hint(raw)
    assert {verdict.outcome for verdict in verdicts} <= {Outcome.ACCEPTED}
    return hint


def rejected(raw: dict[str, object]) -> list[str]:
    return [verdict.part for verdict in read_hint(raw).verdicts if verdict.outcome is Outcome.REJECTED]


def chat(*contents: object, **fields: object) -> dict[str, object]:
    """A chat whose turns have these contents."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": "m", "messages": [{"role": "system", "content": "You help."}, *turns], **fields}


# ---- OpenAI


def test_openais_key_is_a_session() -> None:
    assert of_openai(chat("hello", prompt_cache_key="conv-1")) == {"session": "conv-1"}


@pytest.mark.parametrize("options", [{"ttl": "30m"}, {}, {"mode": "implicit"}, {"mode": None, "ttl": None}])
def test_openais_ttl_is_a_minimum_for_the_whole_prompt(options: dict[str, object]) -> None:
    assert read(of_openai(chat("hello", prompt_cache_options=options))) == Hint(
        retain=(Retain(min_ttl=1800),)
    )


def test_the_explicit_mode_asks_for_nothing() -> None:
    """What it means ends with a block, and where that is in tokens is not known."""
    document = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert of_openai(chat([document], prompt_cache_options={"mode": "explicit", "ttl": "30m"})) == {}


@pytest.mark.parametrize(
    ("retention", "most"), [("in_memory", 3600), ("in-memory", 3600), ("24h", 86_400), ("7d", 604_800)]
)
def test_openais_retention_is_a_maximum_and_asks_for_no_more_than_usual(retention: str, most: float) -> None:
    hint = read(of_openai(chat("hello", prompt_cache_retention=retention)))
    assert hint == Hint(retain=(Retain(priority=35, max_ttl=most),))


def test_openais_minimum_and_maximum_are_one_range() -> None:
    body = chat("hello", prompt_cache_retention="24h", prompt_cache_options={"ttl": "30m"})
    assert of_openai(body) == {"retain": [{"min_ttl": 1800, "max_ttl": 86_400}]}


# ---- Anthropic

EPHEMERAL: dict[str, object] = {"cache_control": {"type": "ephemeral"}}
HOUR: dict[str, object] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def test_a_mark_at_the_top_level_is_the_whole_prompt() -> None:
    assert read(of_anthropic(chat("hello", **EPHEMERAL))) == Hint(retain=(Retain(min_ttl=300),))
    assert read(of_anthropic(chat("hello", **HOUR))) == Hint(retain=(Retain(min_ttl=3600),))


def test_a_mark_on_a_block_says_nothing() -> None:
    assert of_anthropic(chat([{"type": "text", "text": "so", **EPHEMERAL}])) == {}


def test_a_time_that_is_none_is_rejected() -> None:
    assert rejected(of_anthropic(chat("hello", cache_control={"ttl": "3 weeks"}))) == ["retain"]


@pytest.mark.parametrize("said", [None, "ephemeral", 7, [], {"type": "persistent"}])
def test_other_marks_are_left_out(said: object) -> None:
    assert of_anthropic(chat("hello", cache_control=said)) == {}


# ---- Dynamo and agents


def test_dynamos_extension() -> None:
    nvext = {
        "agent_hints": {"priority": 5, "strict_priority": 1, "osl": 1024, "speculative_prefill": True},
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "agent_context": {"session_id": "run:a", "parent_session_id": "run", "session_final": False},
    }
    assert read(of_dynamo({}, chat("go on", nvext=nvext))) == Hint(
        session="run:a",
        parent="run",
        prefetch=True,
        retain=(Retain(priority=40, min_ttl=3600),),
    )


@pytest.mark.parametrize(("said", "priority"), [(1, 36), (65, 100), (10**30, 100)])
def test_dynamos_priority_is_counted_from_the_neutral_one(said: int, priority: int) -> None:
    raw = of_dynamo({}, {"nvext": {"agent_hints": {"priority": said}}})
    assert raw == {"retain": [{"priority": priority}]}
    assert of_fields(None, -said) == raw, "vLLM gets it negated"


@pytest.mark.parametrize("said", [-5, -(10**30)])
def test_a_low_priority_says_nothing_of_the_cache(said: int) -> None:
    """A request that may wait is not one whose conversation has ended."""
    assert of_dynamo({}, {"nvext": {"agent_hints": {"priority": said}}}) == {}
    assert of_fields(None, -said) == {}


def test_a_priority_of_nought_says_nothing() -> None:
    assert of_dynamo({}, {"nvext": {"agent_hints": {"priority": 0}}}) == {}
    assert of_fields("", 0) == {}


def test_the_header_of_a_priority_is_stronger() -> None:
    body = {"nvext": {"agent_hints": {"priority": 1}}}
    assert of_dynamo({"x-dynamo-request-priority": "5"}, body) == {"retain": [{"priority": 40}]}
    assert rejected(of_dynamo({"x-dynamo-request-priority": "high"}, body)) == ["retain"]


@pytest.mark.parametrize(
    ("headers", "hint"),
    [
        ({"x-session-id": "s"}, {"session": "s"}),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, {"session": "s", "parent": "p"}),
        ({"thread-id": "t", "x-codex-parent-thread-id": "t"}, {"session": "t"}),
        ({"x-claude-code-session-id": "c", "thread-id": "t"}, {"session": "c"}),
        (
            {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"},
            {"session": "a", "parent": "c"},
        ),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "b",
            },
            {"session": "a", "parent": "b"},
        ),
        ({"x-claude-code-session-id": "c", "x-claude-code-parent-agent-id": "b"}, {"session": "c"}),
        ({"thread-id": " "}, {}),
        ({"x-dynamo-session-id": "d", "x-parent-session-id": "p", "x-session-id": "s"}, {"session": "d"}),
        (
            {
                "x-dynamo-session-id": "d",
                "x-dynamo-parent-session-id": "p",
                "x-dynamo-session-final": "true",
            },
            {"session": "d", "parent": "p", "final": True},
        ),
        ({"thread-id": "t", "x-dynamo-session-final": "True"}, {"session": "t", "final": True}),
        ({"x-dynamo-session-final": "false"}, {"final": False}),
    ],
)
def test_headers_name_sessions(headers: dict[str, str], hint: dict[str, object]) -> None:
    assert over(of_dynamo_headers(headers), of_agents(headers)) == hint


# ---- vLLM


def test_flat_names() -> None:
    xargs = {
        "kvbm_session": "s",
        "kvbm_parent": "p",
        "kvbm_final": 1,
        "kvbm_expect_s": 3.5,
        "kvbm_prefetch": "true",
        "kvbm_demote": 0.0,
        "kvbm_store": "0",
        "other": [1, 2],
    }
    assert read(of_xargs(xargs)) == Hint(
        session="s", parent="p", final=True, expect_s=3.5, prefetch=True, store=False
    )
    assert rejected(of_xargs({"kvbm_retain": [1], "kvbm_final": "perhaps"})) == ["final", UNKNOWN]


def envelope(*actions: tuple[str, str, object]) -> dict[str, object]:
    return {
        "protocol_version": "0.1",
        "message_id": "m-1",
        "actions": [
            {"action_id": str(i), "action_type": kind, "action_version": version, "payload": payload}
            for i, (kind, version, payload) in enumerate(actions)
        ],
    }


def test_an_envelope_is_executed_only_where_it_has_our_form() -> None:
    said = envelope(
        ("kvbm.hint", "1.0", {"session": "s"}), ("kvbm.hint", "1.2", {"session": "t", "final": True})
    )
    assert read(of_kv_hints(said)) == Hint(session="s", final=True)
    as_objects = SimpleNamespace(actions=[SimpleNamespace(**each) for each in said["actions"]])  # type: ignore[attr-defined]
    assert of_kv_hints(as_objects) == of_kv_hints(said)


@pytest.mark.parametrize(
    "action",
    [
        ("kv.fetch", "1.0", {"source": "worker-7"}),
        ("kv.demote", "1.0", {}),
        ("kvbm.hint", "2.0", {"session": "s"}),
        ("kvbm.hint", "1.0", ["session"]),
        ("session", "1.0", {}),
    ],
)
def test_other_actions_are_rejected(action: tuple[str, str, object]) -> None:
    raw = of_kv_hints(envelope(action))
    assert read_hint(raw).hint == Hint()
    assert rejected(raw) == [UNKNOWN]


# ---- TensorRT-LLM


def test_priorities_of_blocks_become_ranges() -> None:
    raw = hint_of_priorities([80, 80, 80, 35, 35, 10, None, 100], block_tokens=32)
    assert read(raw) == Hint(
        retain=(
            Retain(start=0, end=96, priority=80),
            Retain(start=160, end=192, priority=10),
            Retain(start=224, end=256, priority=100),
        )
    )


def test_priorities_of_later_blocks() -> None:
    assert hint_of_priorities([90], 16, first_block=4) == {
        "retain": [{"start": 64, "end": 80, "priority": 90}]
    }


@pytest.mark.parametrize("priorities", [None, [], [35] * 9, [None], "80", 80])
def test_priorities_that_say_nothing(priorities: object) -> None:
    assert hint_of_priorities(priorities, 16) == {}


def test_priorities_without_end_are_cut_and_said_to_be() -> None:
    raw = hint_of_priorities([80, 35] * 10_000, 16)
    hint, verdicts = read_hint(raw)
    assert len(hint.retain) == RANGES_MAX
    assert verdicts[-1].outcome is Outcome.CLIPPED
    assert rejected(hint_of_priorities([-1], 16)) == ["retain"]


# ---- all of them


def http(body: dict[str, object], **headers: str) -> dict[str, object] | None:
    return hint_of_http({name.replace("_", "-"): value for name, value in headers.items()}, body)


def test_the_strongest_dialect_decides_part_by_part() -> None:
    body = chat("hello", prompt_cache_key="key", prompt_cache_options={"ttl": "30m"})
    assert http(body) == {"session": "key", "retain": [{"min_ttl": 1800}]}
    assert http(body, thread_id="t", x_dynamo_session_final="true") == {
        "session": "t", "final": True, "retain": [{"min_ttl": 1800}],
    }  # fmt: skip
    body["nvext"] = {"agent_hints": {"priority": 10}}
    assert http(body, thread_id="t") == {"session": "t", "retain": [{"priority": 45, "min_ttl": 1800}]}
    body["session_id"] = "field"
    assert (http(body, thread_id="t") or {})["session"] == "field"
    assert (http(body, x_dynamo_session_id="d") or {})["session"] == "d"
    body["vllm_xargs"] = {"kvbm_session": "flat", "kvbm_expect_s": 9}
    assert (http(body, x_dynamo_session_id="d") or {})["session"] == "flat"
    body["kv_transfer_params"] = {"kvbm": {"session": "own", "retain": []}}
    assert http(body, x_dynamo_session_id="d", x_dynamo_parent_session_id="p") == {
        "session": "own", "retain": [], "expect_s": 9, "parent": "p",
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        chat("hello"),
        chat("hello", session_id="s", priority=3, vllm_xargs={"kvbm_final": True}),
        chat("hello", kv_transfer_params={"kvbm": {"final": True}}),
        chat("hello", kv_transfer_params={"kvbm": "final"}, prompt_cache_key="k"),
        chat("hello", kv_transfer_params=[], prompt_cache_key="k"),
    ],
)
def test_what_the_engine_reads_itself_is_not_said_again(body: dict[str, object]) -> None:
    assert http(body) is None
    assert http(chat("hello"), x_session_id="s", x_vllm_priority="3") is None


# ---- the parts


@pytest.mark.parametrize(
    ("duration", "found"),
    [("5m", 300), ("1h", 3600), ("90s", 90), ("2d", 172_800), (30, 30), ("soon", "soon")],
)
def test_durations(duration: object, found: object) -> None:
    assert seconds(duration) == found


def test_ranges_of_one_extent_are_one() -> None:
    first: dict[str, object] = {"retain": [{"priority": 90}, {"end": 5, "min_ttl": 1}]}
    second: dict[str, object] = {"retain": [{"priority": 10, "min_ttl": 7}, {"end": 6}], "final": True}
    assert joined(first, second) == {
        "retain": [{"priority": 90, "min_ttl": 7}, {"end": 5, "min_ttl": 1}, {"end": 6}], "final": True,
    }  # fmt: skip
    assert first["retain"] == [{"priority": 90}, {"end": 5, "min_ttl": 1}]


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (0.5, {"end": 50}),
        (0.0001, {"end": 1}),
        (1, {}),
        (0, {"end_share": 0}),
        (True, {"end_share": True}),
        (10**400, {"end_share": 10**400}),
        ("half", {"end_share": "half"}),
    ],
)
def test_shares_become_tokens(share: object, found: dict[str, Any]) -> None:
    assert resolved({"retain": [{"end_share": share}]}, 100) == {"retain": [found]}
