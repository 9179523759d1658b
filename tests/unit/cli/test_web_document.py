"""The OpenAPI document against the code: its operations, and every status of an error."""

from __future__ import annotations

import ast
import http.server
import inspect
import socket
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

from kvbm.cli.web import openapi
from kvbm.cli.web.documents import Nothing
from kvbm.cli.web.listener import HEAD_BYTES_MAX, Reply, Request
from kvbm.cli.web.operations import OPERATIONS
from kvbm.cli.web.troubles import TROUBLES
from rigs.web import serving

SEEN_S = 20.0


def statuses_of(source: str, callers: set[str]) -> set[int]:
    """The statuses that a source gives to these functions, as numbers or as names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            status = node.args[0]
            if name in callers and isinstance(status, ast.Constant):
                found.add(int(status.value))
            elif name in callers and isinstance(status, ast.Attribute) and status.attr.isupper():
                found.add(int(HTTPStatus[status.attr]))
    return found


def test_every_status_that_is_given_is_in_the_document_and_no_other() -> None:
    ours = set[int]()
    for part in Path(openapi.__file__).parent.glob("*.py"):
        ours |= statuses_of(part.read_text(), {"Denied", "trouble"})
    # An unknown method is a 405, and not the 501 of the base class.
    base = statuses_of(inspect.getsource(http.server.BaseHTTPRequestHandler), {"send_error"}) - {501}
    assert ours | base == set(TROUBLES)
    assert set(openapi.document()["components"]["responses"]) == set(map(str, TROUBLES))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"GET\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n12", 408),
        (b"POST / HTTP/1.1\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        pytest.param(b"HEAD / HTTP/1.1\r\n\r\n", 500, marks=pytest.mark.swallows("^AssertionError: .*'HEAD'")),
    ],
)  # fmt: skip
def test_what_the_server_itself_answers_is_in_the_document(
    sent: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(request: Request) -> Reply:
        assert request.method == "POST"
        return Reply(status=200, content_type="text/plain", body=request.body())

    monkeypatch.setattr("kvbm.cli.web.listener._Handler.timeout", 0.2)
    with serving(read) as web, socket.create_connection(("127.0.0.1", web.port)) as client:
        client.settimeout(SEEN_S)
        client.sendall(sent)
        answer = client.makefile("rb").readline().split()
    assert (answer[0], int(answer[1]), int(answer[1]) in TROUBLES) == (b"HTTP/1.1", status, True)


def test_the_document_is_that_of_the_operations() -> None:
    document = openapi.document()
    assert document["openapi"] == "3.1.0"
    paths = {(method.upper(), path) for path, found in document["paths"].items() for method in found}
    assert paths == {(each.method, each.path) for each in OPERATIONS}
    for each in OPERATIONS:
        found = document["paths"][each.path][each.method.lower()]
        assert ("requestBody" in found) == (each.method == "POST")
        named = {parameter["name"] for parameter in found.get("parameters", ())}
        fields = {field.encode_name for field in msgspec.structs.fields(each.given)}
        assert set(found["responses"]) == {"200", *map(str, TROUBLES)}
        assert named == (fields if each.method == "GET" else set()), each.path
    assert Nothing.__name__ not in document["components"]["schemas"]
    page = openapi.page()
    for each in OPERATIONS:
        assert f"<code>{each.path}</code>" in page
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page
