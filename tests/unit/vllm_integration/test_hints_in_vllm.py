"""vLLM's own server with the middleware, down to the request that the scheduler gets.

No engine is started: handlers that only take what vLLM has parsed stand where its own would be.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from vllm.v1.request import Request

from kvbm.hints import Hint, Retain, read_hint
from kvbm.vllm_integration.hints import hint_of

launchers = pytest.importorskip("vllm.entrypoints.launchers.app", reason="this vLLM keeps its app elsewhere")

MIDDLEWARE = "kvbm.vllm_integration.hints.Middleware"
KEY = "secret"
TEXT = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
PARTS = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "cache_control": {"type": "ephemeral"}},
    "/v1/completions": {"prompt": "hi", "cache_control": {"type": "ephemeral"}},
    "/v1/responses": {"input": PARTS, "cache_control": {"type": "ephemeral"}},
    "/v1/messages": {
        "messages": TEXT,
        "max_tokens": 5,
        "tools": [{"name": "t", "input_schema": {}}],
        "cache_control": {"type": "ephemeral"},
    },
}


class Parsed(Exception):
    """What a handler was given."""

    def __init__(self, request: Any) -> None:
        super().__init__("parsed")
        self.request = request


class Handlers:
    """Every handler of the server: it takes the parsed request out of the call."""

    def __init__(self) -> None:
        self.parsed: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def take(request: Any, raw_request: Any) -> None:
            self.parsed.append(request)
            raise Parsed(request)

        return take


class Server:
    """vLLM's application as `vllm serve --middleware … --api-key …` builds it."""

    def __init__(self) -> None:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(["--middleware", MIDDLEWARE, "--api-key", KEY])
        self._app = launchers.build_app(args, ("generate",))
        self.handlers = Handlers()
        for name in ("chat", "completion", "responses"):
            setattr(self._app.state, f"openai_serving_{name}", self.handlers)
        self._app.state.anthropic_serving_messages = self.handlers

    def post(self, path: str, body: bytes, **headers: str) -> int:
        """The status of the answer."""
        said = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "server": ("127.0.0.1", 1),
            "client": ("127.0.0.1", 2),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in said.items()],
        }
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            if not sent:
                await asyncio.Event().wait()
            return sent.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        sent = [{"type": "http.request", "body": body, "more_body": False}]
        try:
            asyncio.run(self._app(scope, receive, send))
        except Parsed:
            pass
        return statuses[0]


@pytest.fixture(scope="module")
def server() -> Server:
    level = logging.root.level
    try:
        # Our own plug-in would set up logging for an engine's process, which this one is not.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm.plugins.plugins_loaded", True)
            return Server()
    finally:
        logging.root.setLevel(level)  # a package that the application takes in sets it


def scheduled(parsed: Any) -> Request:
    """The request that vLLM makes of what was parsed, as its scheduler gets it."""
    if type(parsed).__name__ == "AnthropicMessagesRequest":
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

        parsed = AnthropicServingMessages._build_base_request(parsed, [{"role": "user", "content": "hi"}])
    params = parsed.to_sampling_params(5, {})
    session = getattr(parsed, "session_id", None)
    return Request("r", [1] * 100, params, None, session_id=session, priority=parsed.priority)


@pytest.mark.parametrize("path", BODIES)
def test_a_hint_arrives_at_the_scheduler(server: Server, path: str) -> None:
    body = json.dumps({"model": "m", "prompt_cache_key": "conv", **BODIES[path]}).encode()
    headers = {"x_dynamo_session_id": "run:a", "x_dynamo_parent_session_id": "run"}
    server.handlers.parsed.clear()
    server.post(path, body, authorization=f"Bearer {KEY}", **headers)
    (parsed,) = server.handlers.parsed
    if "kv_transfer_params" not in type(parsed).model_fields:
        pytest.skip(f"this vLLM passes no kv_transfer_params on from {path}")
    hint = read_hint(hint_of(scheduled(parsed))).hint
    assert hint == Hint(session="run:a", parent="run", retain=(Retain(min_ttl=300.0),))


def test_flat_names_survive_vllms_types(server: Server) -> None:
    xargs = {"kvbm_session": "s", "kvbm_final": True, "kvbm_store": False, "kvbm_expect_s": 2.5}
    body = json.dumps({"model": "m", "messages": TEXT, "vllm_xargs": xargs}).encode()
    server.handlers.parsed.clear()
    server.post("/v1/chat/completions", body, authorization=f"Bearer {KEY}")
    hint = read_hint(hint_of(scheduled(server.handlers.parsed[0]))).hint
    assert (hint.session, hint.final, hint.store, hint.expect_s) == ("s", True, False, 2.5)


def test_a_client_without_the_key_is_turned_away(server: Server) -> None:
    server.handlers.parsed.clear()
    body = json.dumps({"model": "m", "prompt_cache_key": "conv", "messages": TEXT}).encode()
    assert server.post("/v1/chat/completions", body) == 401
    assert server.handlers.parsed == []


def test_what_vllm_refuses_it_still_refuses(server: Server) -> None:
    refused = server.post("/v1/chat/completions", b'{"prompt_cache_key": "k"', authorization=f"Bearer {KEY}")
    assert refused == 400
