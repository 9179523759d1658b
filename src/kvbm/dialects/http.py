"""A request of HTTP, as clients of several APIs send it to one engine: all dialects, in one order."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.dialects.agents import HEADERS, of_agents, of_dynamo_headers
from kvbm.dialects.anthropic import of_anthropic
from kvbm.dialects.dynamo import PRIORITY_HEADER, of_dynamo
from kvbm.dialects.openai import of_openai
from kvbm.dialects.raw import RawHint, joined, over
from kvbm.dialects.vllm import of_body, of_xargs

FIELDS = (
    "cache_control",
    "kv_transfer_params",
    "nvext",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "session_id",
    "vllm_xargs",
)
"""The fields of a body that say something."""
WORDS = (b"prompt_cache", b"cache_control", b"nvext")
"""A body without any of these says nothing that an engine does not read itself."""
SESSION_HEADERS = HEADERS | {PRIORITY_HEADER}
"""The headers that say something, in lower case."""


def hint_of_http(headers: Mapping[str, str], body: Mapping[str, object]) -> RawHint | None:
    """What is to be told to an engine that reads its own fields and ours, and no others. None: nothing more than it
    reads itself.

    The strongest first: our own form, our flat names, Dynamo, vLLM's fields, agents' headers, Anthropic, OpenAI. The
    names of `headers` are in lower case. What a client said in our form stands.
    """
    params = _said_mapping(body.get("kv_transfer_params"))
    own = _said_mapping(params.get("kvbm")) if params is not None else None
    if own is None:
        return None
    said = over(own, of_xargs(body.get("vllm_xargs")))
    read_anyway = of_body(headers, body)
    derived = joined(
        of_dynamo_headers(headers),
        of_dynamo(headers, body),
        {"session": body.get("session_id") or None},
        of_agents(headers),
        read_anyway,
        of_anthropic(body),
        of_openai(body),
    )
    hint = over(said, derived)
    return hint if hint != over(said, read_anyway) else None


def _said_mapping(value: object) -> RawHint | None:
    """A mapping, empty where nothing was said; None for what is no mapping."""
    return {} if value is None else value if isinstance(value, dict) else None
