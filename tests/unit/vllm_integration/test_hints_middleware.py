"""The middleware by hand-made ASGI: hints go into bodies, and everything else passes as it came."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any

import pytest

from kvbm.vllm_integration import hints
from kvbm.vllm_integration.hints import BODY_BYTES_MAX, PATHS, Message, Middleware, Receive, Scope, Send

BODY = (
    b'{"model": "m", "messages" : [{"role":"user","content":"\xc3\xbc"}],\n'
    b' "prompt_cache_key":"conv-1", "seed": 1.50}'
)
PLAIN = b'{"model": "m", "messages": [{"role": "user", "content": "no hint in here"}]}'


def scope_of(body: bytes, path: str = PATHS[0], **headers: str) -> dict[str, Any]:
    said = {"content_type": "application/json", "content_length": str(len(body)), **headers}
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in said.items()],
    }


def pieces(body: bytes, size: int = 1 << 30) -> list[Message]:
    """The messages of a server that reads a body in pieces of this size, and then of a client that goes away."""
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    sent: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    sent[-1]["more_body"] = False
    return [*sent, {"type": "http.disconnect"}]


class Seen:
    """An application that receives until the client goes away, and answers."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while not self.messages or self.messages[-1]["type"] != "http.disconnect":
            self.messages.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def hint(self) -> object:
        return json.loads(self.body)["kv_transfer_params"]["kvbm"]

    @property
    def content_length(self) -> int:
        return int(dict(self.scope["headers"])[b"content-length"])


def run(scope: Scope, messages: Iterable[Message]) -> Seen:
    """One request through the middleware; the application's answer passes it too."""
    seen, left, answers = Seen(), list(messages), list[Message]()

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Message) -> None:
        answers.append(message)

    asyncio.run(Middleware(seen)(scope, receive, send))
    assert [answer["type"] for answer in answers] == ["http.response.start"]
    return seen


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 7, 1 << 30])
def test_a_hint_goes_into_the_body(path: str, size: int) -> None:
    seen = run(scope_of(BODY, path), pieces(BODY, size))
    assert seen.hint == {"session": "conv-1"}
    assert seen.content_length == len(seen.body) > len(BODY)
    assert [message["type"] for message in seen.messages] == ["http.request", "http.disconnect"]
    said = json.loads(seen.body)
    del said["kv_transfer_params"]
    assert said == json.loads(BODY)
    assert b'[{"role":"user","content":"\xc3\xbc"}]' in seen.body, "values keep their bytes"
    assert b"1.50" in seen.body


def test_what_others_say_in_the_same_field_stays() -> None:
    own = {"do_remote_decode": True, "kvbm": {"session": "own", "expect_s": 3}, "lmcache.tag": 1.0}
    body = json.dumps({"prompt_cache_key": "k", "kv_transfer_params": own, "nvext": {}}).encode()
    seen = run(scope_of(body, x_dynamo_parent_session_id="p", x_dynamo_session_id="d"), pieces(body))
    params = json.loads(seen.body)["kv_transfer_params"]
    assert params == {**own, "kvbm": {"session": "own", "expect_s": 3, "parent": "p"}}
    body = json.dumps({"prompt_cache_key": "k", "kv_transfer_params": None}).encode()
    assert run(scope_of(body), pieces(body)).hint == {"session": "k"}


def test_headers_alone_are_a_hint() -> None:
    headers = {"X-Claude-Code-Session-ID": "c", "X-Dynamo-Session-Final": "true"}
    seen = run(scope_of(PLAIN, PATHS[3], **headers), pieces(PLAIN))
    assert seen.hint == {"session": "c", "final": True}


def test_a_server_that_strips_a_prefix() -> None:
    scope = {**scope_of(BODY, "/models/a/v1/responses"), "root_path": "/models/a"}
    assert run(scope, pieces(BODY)).hint == {"session": "conv-1"}


def test_a_body_without_a_length_gets_none() -> None:
    scope = scope_of(BODY)
    scope["headers"] = [header for header in scope["headers"] if header[0] != b"content-length"]
    seen = run(scope, pieces(BODY, 10))
    assert seen.hint == {"session": "conv-1"}
    assert [name for name, _ in seen.scope["headers"]] == [b"content-type"]


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (PLAIN, {}),
        (PLAIN, {"x_session_id": "vllm reads it itself"}),
        (BODY, {"content_type": "text/plain"}),
        (BODY[:-1], {}),
        (BODY + b"}", {}),
        (b"", {"x_dynamo_session_id": "d"}),
        (b"[]", {"x_dynamo_session_id": "d"}),
        (b"\xff\xfe{}", {"x_dynamo_session_id": "d"}),
        (b'{"prompt_cache_key": NaN}', {}),
        (b'{"prompt_cache_key": "\\ud800"}', {}),
        (b'{"prompt_cache_key": "k", "kv_transfer_params": [1]}', {}),
        (b'{"prompt_cache_key": "k", "kv_transfer_params": {"kvbm": 1}}', {}),
        (b'{"cache_control": {}, "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
    ],
    ids=range(13),
)
def test_a_body_that_says_nothing_passes_byte_for_byte(body: bytes, changes: dict[str, str]) -> None:
    scope = scope_of(body, **changes)
    headers = list(scope["headers"])
    seen = run(scope, pieces(body, 5000))
    assert seen.messages == pieces(body, 5000)
    assert seen.scope["headers"] == headers


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "GET"},
        {"path": "/v1/messages/count_tokens"},
        {"path": "/v1/embeddings"},
        {"headers": [(b"content-type", b"application/json"), (b"content-length", b"9" * 5000)]},
        {"headers": [(b"content-type", b"application/json"), (b"content-length", b"many")]},
        {
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % (BODY_BYTES_MAX + 1)),
            ]
        },
        {"type": "websocket"},
        {"type": "lifespan"},
    ],
    ids=str,
)
def test_other_requests_get_the_servers_own_receive(changes: dict[str, Any]) -> None:
    async def receive() -> Message:
        raise AssertionError("nobody asked")

    got: list[object] = []

    async def application(scope: Scope, given: Receive, send: Send) -> None:
        got.extend([scope, given])

    scope = {**scope_of(BODY), **changes}
    asyncio.run(Middleware(application)(scope, receive, None))  # type: ignore[arg-type]
    assert got == [scope, receive]


def test_a_long_body_passes_and_is_kept_no_longer_than_needed() -> None:
    """One without a length, which is seen to be long only while it comes in."""
    scope = scope_of(BODY)
    scope["headers"] = [(b"content-type", b"application/json")]
    body = b'{"prompt_cache_key": "k", "x": "' + b"y" * (BODY_BYTES_MAX * 2) + b'"}'
    sent = pieces(body, BODY_BYTES_MAX // 2 + 1)
    left = [*sent]
    kept: list[int] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        for expected in sent:
            assert await receive() is expected
            kept.append(len(sent) - len(left))

    async def receive() -> Message:
        return left.pop(0)

    asyncio.run(Middleware(application)(scope, receive, None))  # type: ignore[arg-type]
    assert kept == [2, 2, 3, 4, 5, 6], "what came before the bound, and from there on one by one"


def test_a_client_that_goes_away_in_the_middle() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": BODY[:20], "more_body": True},
        {"type": "http.disconnect"},
    ]
    assert run(scope_of(BODY), messages).messages == messages


def test_nothing_is_read_before_the_application_reads() -> None:
    """So a client without an API key makes nobody keep its body."""

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def receive() -> Message:
        raise AssertionError("it was read")

    async def send(message: Message) -> None:
        assert message["status"] == 401

    asyncio.run(Middleware(refuses)(scope_of(BODY), receive, send))


def test_a_read_that_is_cancelled_loses_nothing() -> None:
    async def main() -> bytes:
        come = asyncio.Event()
        left = pieces(BODY, 30)

        async def receive() -> Message:
            if len(left) == 3:
                await come.wait()
            return left.pop(0)

        got: list[bytes] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            first = asyncio.ensure_future(receive())
            done, _ = await asyncio.wait([first], timeout=0)
            while len(left) > 3:
                await asyncio.sleep(0)
            assert not done
            first.cancel()
            come.set()
            got.append((await receive())["body"])

        await Middleware(application)(scope_of(BODY), receive, None)  # type: ignore[arg-type]
        return got[0]

    assert json.loads(asyncio.run(main()))["kv_transfer_params"] == {"kvbm": {"session": "conv-1"}}


@pytest.mark.swallows("^ZeroDivisionError: $")
def test_a_defect_costs_the_hint_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defective(headers: object, body: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hints, "hint_of_http", defective)
    monkeypatch.setattr(hints._Body, "defect_told", False)
    with caplog.at_level(logging.ERROR, logger="kvbm.vllm"):
        for _ in range(3):
            assert run(scope_of(BODY), pieces(BODY, 9)).messages == pieces(BODY, 9)
    (record,) = caplog.records
    assert "the request is served without it" in record.message


def test_an_error_of_the_application_or_the_server_is_not_ours() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def receive() -> Message:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        asyncio.run(Middleware(fails)(scope_of(BODY), receive, None))  # type: ignore[arg-type]
