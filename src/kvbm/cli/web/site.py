"""What is answered at which path: the page, its parts, the OpenAPI document and the operations."""

from __future__ import annotations

import html
import importlib.resources
import json
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from kvbm.cli import why
from kvbm.cli.web import openapi
from kvbm.cli.web.access import Token, check_host, check_origin
from kvbm.cli.web.documents import Given
from kvbm.cli.web.listener import JSON, Reply, Request, trouble
from kvbm.cli.web.operations import OPERATIONS, ManagerGate, Operation
from kvbm.cli.web.pace import Pace
from kvbm.cli.web.troubles import Denied
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ManagerRefused, SettingsError

HEAVY_PER_S, HEAVY_BURST = 20.0, 100.0
PARAMETERS_MAX = 16
HTML = "text/html; charset=utf-8"
_NAMES = {"--prompt-file": "tokens", "REQUEST_ID": "request"}
"""The API's names of what the command line calls otherwise."""
_NOT_THERE = {"--namespace", "--model", "--tier", "REQUEST_ID"}
"""What is refused because the manager has none like it."""
_READ = ("GET", "HEAD")


class Site:
    """Answers requests for one manager."""

    def __init__(self, gate: ManagerGate, token: Token, token_file: str, clock: Clock) -> None:
        """`token_file` is where an operator of this machine finds the token."""
        self._gate = gate
        self._token = token
        self._pace = Pace(HEAVY_PER_S, HEAVY_BURST, clock)
        self._operations = {path: each for each in OPERATIONS for path in (each.path, each.also) if path}
        document = msgspec.json.encode(openapi.document())
        # These say nothing of a manager: anybody may have them. The page's script asks for the token.
        self._pages = {
            "/": Reply(status=200, content_type=HTML, body=_page(token_file)),
            "/docs": Reply(status=200, content_type=HTML, body=openapi.page().encode()),
            "/openapi.json": Reply(status=200, content_type=JSON, body=document),
            # Where a browser looks for it, whichever page it has.
            "/favicon.ico": Reply(status=200, content_type="image/svg+xml", body=_part("favicon.svg")),
            "/page.css": Reply(status=200, content_type="text/css; charset=utf-8", body=_part("page.css")),
            "/page.js": Reply(
                status=200, content_type="text/javascript; charset=utf-8", body=_part("page.js")
            ),
        }

    def answer(self, request: Request) -> Reply:
        """The answer to a request. Raises Denied."""
        host = request.headers.get("host")
        check_host(host)
        path, _, query = request.target.partition("?")
        operation = self._operations.get(path)
        allowed = _READ if operation is None or operation.method == "GET" else (operation.method,)
        page = self._pages.get(path)
        if page is not None and request.method in _READ:
            return page
        if not self._token.in_header(request.headers.get("authorization")):
            return trouble(401, "the token is missing or wrong", (("WWW-Authenticate", "Bearer"),))
        request.let_in()
        if operation is None and page is None:
            raise Denied(404, f"{path[:100]} is not here; /docs lists what is")
        if operation is None or request.method not in allowed:
            return trouble(405, f"{path} needs {allowed[0]}", (("Allow", ", ".join(allowed)),))
        if operation.method == "POST":
            check_origin(request.headers.get("origin"), host)
        given = _given(operation, request, query)
        if operation.heavy and not self._pace.take():
            return trouble(429, "too many calls; wait a second", (("Retry-After", "1"),))
        if operation.seconds:
            request.extend(operation.seconds)
        return self._run(operation, given)

    def _run(self, operation: Operation, given: Given) -> Reply:
        try:
            answer = operation.run(self._gate, given)
        except SettingsError as error:
            status = 404 if error.field in _NOT_THERE else 409
            field = _NAMES.get(error.field, error.field.lstrip("-"))
            raise Denied(status, str(SettingsError(field, error.value, error.accepted))) from None
        except ManagerRefused as error:
            raise Denied(409, str(error)) from None
        except KvbmError as error:
            raise Denied(503, str(error)) from None
        return Reply(status=200, content_type=JSON, body=msgspec.json.encode(answer))


def _given(operation: Operation, request: Request, query: str) -> Given:
    """The query or the body, checked. Raises Denied."""
    try:
        if operation.method == "POST":
            if query:
                raise Denied(400, "a query cannot be used here: the body has all")
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != JSON:
                raise Denied(415, f"Content-Type={kind[:100]!r} cannot be used: {JSON}")
            return _decoded(request.body(), operation.given)
        pairs = parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), errors="strict",
            max_num_fields=PARAMETERS_MAX,
        )  # fmt: skip
        values: dict[str, Any] = dict(pairs)
        if len(values) < len(pairs):
            raise Denied(400, "a parameter was given twice")
        return msgspec.convert(values, operation.given, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        what = "body" if operation.method == "POST" else "query"
        raise Denied(400, f"the {what} cannot be used: {error}") from None


def _decoded(body: bytes, kind: type[Given]) -> Given:
    """A JSON body. 3.0 is a whole number too, in JSON: only where there is one, the slower way is taken."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        if b"." not in body and b"e" not in body.lower():
            raise
        return msgspec.convert(json.loads(body, parse_float=_number, parse_constant=_no_number), kind)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _page(token_file: str) -> bytes:
    """The page, with what the reasons mean: the words are those of `kvbm why`; and with where the token is."""
    meanings = msgspec.json.encode(why.MEANINGS).replace(b"<", b"\\u003c")
    file = html.escape(token_file).encode("utf-8", "replace")
    return _part("page.html").replace(b"{{meanings}}", meanings).replace(b"{{file}}", file)


def _part(name: str) -> bytes:
    return importlib.resources.files("kvbm.cli.web").joinpath(f"static/{name}").read_bytes()
