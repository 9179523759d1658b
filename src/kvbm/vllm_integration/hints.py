"""What clients say about a request's future, from vLLM's HTTP server to the connector.

`Middleware` writes what other APIs' fields and headers say into a field that vLLM passes on, before vLLM drops them:

    vllm serve MODEL --middleware kvbm.vllm_integration.hints.Middleware …

`hint_of` reads a request as the connector sees it. Neither needs the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import msgspec

from kvbm.dialects.http import FIELDS, SESSION_HEADERS, WORDS, hint_of_http
from kvbm.dialects.raw import RawHint, over, resolved
from kvbm.dialects.vllm import of_fields, of_kv_hints, of_xargs
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.vllm")

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""The endpoints whose bodies declare `kv_transfer_params` (vLLM 0.32)."""
BODY_BYTES_MAX = 32_000_000
"""A longer body is passed on as it is, and is not kept in memory on the way."""

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Reads an object without its values, which are passed on byte for byte."""


def hint_of(request: Any) -> RawHint | None:
    """What was said about a request of vLLM, for `hints.read_hint`; None where nothing was. Nothing raises.

    The strongest first, part by part: `kv_transfer_params.kvbm`, the flat names of `vllm_xargs`, `kv_hints`, and the
    fields `session_id` and `priority`.
    """
    params = getattr(request, "kv_transfer_params", None)
    own = params.get("kvbm") if isinstance(params, dict) else None
    if own is not None and not isinstance(own, dict):
        own = {"kvbm": own}  # a part that there is not: rejected, and the rest is read
    hint = over(
        own or {},
        of_xargs(getattr(getattr(request, "sampling_params", None), "extra_args", None)),
        of_kv_hints(getattr(request, "kv_hints", None)),
        of_fields(getattr(request, "session_id", None), getattr(request, "priority", None)),
    )
    return resolved(hint, int(getattr(request, "num_prompt_tokens", 0))) or None


class Middleware:
    """ASGI, as `--middleware` takes it: `app` gets every request as it came, some with one field more in the body."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, _Body(scope, receive) if _may_say(scope) else receive, send)


class _Body:
    """The body of one request, as the application receives it.

    Nothing is read before the application asks for it: vLLM's check of API keys lies behind us, and a client that it
    turns away cannot make us keep anything.
    """

    defect_told = False

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        # What was read and not passed on. The application may cancel a call: what it had read by then stays here.
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._complete = False

    async def __call__(self) -> Message:
        """The next message of the client."""
        while not self._complete:
            message = await self._receive()
            self._messages.append(message)
            self._bytes += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            self._complete = not more or self._bytes > BODY_BYTES_MAX
            if message["type"] == "http.request" and not more and self._bytes <= BODY_BYTES_MAX:
                self._translate()
        return self._messages.popleft() if self._messages else await self._receive()

    def _translate(self) -> None:
        """Put the hint into the body. Where that fails, the body stays as it came."""
        try:
            headers = _headers(self._scope)
            body = with_hint(headers, b"".join(message.get("body", b"") for message in self._messages))
        except Exception as error:
            record_swallowed(error)
            # One line for each process: a client could cause any number of them.
            if not _Body.defect_told:
                _Body.defect_told = True
                log.exception("a hint was not read, after a defect in KVBM; the request is served without it")
            return
        if body is None:
            return
        self._messages = deque([{"type": "http.request", "body": body, "more_body": False}])
        self._scope["headers"] = [
            (name, b"%d" % len(body) if name.lower() == b"content-length" else value)
            for name, value in self._scope["headers"]
        ]


def with_hint(headers: Mapping[str, str], body: bytes) -> bytes | None:
    """The body of a request with its hint in `kv_transfer_params.kvbm`; None where it stays as it is.

    The names of `headers` are in lower case. All other members keep their bytes.
    """
    if not any(word in body for word in WORDS) and SESSION_HEADERS.isdisjoint(headers):
        return None
    try:
        members = _MEMBERS.decode(body)
        fields = {name: msgspec.json.decode(members[name]) for name in FIELDS if name in members}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # vLLM says what is wrong with it, if anything is
    hint = hint_of_http(headers, fields)
    if hint is None:
        return None
    params = _MEMBERS.decode(members["kv_transfer_params"]) if fields.get("kv_transfer_params") else {}
    params["kvbm"] = msgspec.Raw(msgspec.json.encode(hint))
    members["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(params))
    return msgspec.json.encode(members)


def _may_say(scope: Scope) -> bool:
    """Whether a scope is a request that can carry a hint to the engine."""
    if scope["type"] != "http" or scope.get("method") != "POST":
        return False
    if str(scope.get("path", "")).removeprefix(scope.get("root_path", "")) not in PATHS:
        return False
    headers = _headers(scope)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    length = headers.get("content-length", "0")
    too_long = not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES_MAX
    return media_type == "application/json" and not too_long


def _headers(scope: Scope) -> dict[str, str]:
    """By lower-case name; of several of one name the first."""
    found: dict[str, str] = {}
    for name, value in scope.get("headers", ()):
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found
