"""The HTTP server of the page and the admin API: bounded in connections, time and bytes, whoever connects."""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

import msgspec

from kvbm.cli.web.documents import Trouble
from kvbm.cli.web.troubles import TROUBLES, Denied
from kvbm.clock import Clock, monotonic
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.web")

CONNECTIONS_MAX = 32
CLIENT_TIMEOUT_S = 5.0
"""A client that sends or reads nothing for this long is hung up on."""
PLACE_S_MAX = 0.5
"""A connection that was hung up on has left its place by then."""
CONNECTION_S_MAX = 30.0
"""A connection ends after this long, however slowly its client goes on: it has one request."""
BODY_BYTES_MAX = 16 << 20
HEAD_BYTES_MAX = 32 << 10
"""All headers of a request together: they are read before anybody is asked for the token."""
ONCE = ("host", "origin", "authorization", "content-type", "content-length")
"""Headers that must not be there twice: somebody on the way may have looked at the other one."""
DRAIN_BYTES_MAX = 4 * BODY_BYTES_MAX
_POLL_S = 0.1
_CHUNK = 1 << 16
JSON = "application/json"
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    (
        "Content-Security-Policy",
        _CONTENT_POLICY,
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as it was read. `body` reads the rest; it raises Denied. Its connection ends in time, unless
    `extend` gives it so many seconds from now on, and before its time where others need its place, unless it is
    `let_in`."""

    method: str
    target: str
    headers: dict[str, str]
    body: Callable[[], bytes]
    extend: Callable[[float], None] = lambda seconds: None
    let_in: Callable[[], None] = lambda: None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. `headers` come on top of those that every answer has."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def trouble(status: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    """An error, for a program; the status is one of `TROUBLES`."""
    assert status in TROUBLES, status
    body = msgspec.json.encode(Trouble(error=" ".join(text.split())))
    return Reply(status=status, content_type=JSON, body=body, headers=headers)


class Listener(ThreadingHTTPServer):
    """Answers at a socket that listens already, with what `answer` says; `answer` runs on the server's threads."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listening: socket.socket, answer: Callable[[Request], Reply], clock: Clock = monotonic
    ) -> None:
        socketserver.BaseServer.__init__(self, listening.getsockname(), _Handler)
        self.socket = listening
        self.answer = answer
        self._clock = clock
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._ends_s: dict[socket.socket, float] = {}
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not shown the token, the oldest first."""
        self._lock = threading.Lock()

    # The type stubs name `socket | (bytes, socket)`; we only pass the request on, hence the ignores.
    def process_request(self, request: object, client_address: object) -> None:
        if not (self._room.acquire(blocking=False) or self._made_room()):
            self.shutdown_request(request)  # type: ignore[arg-type]  # as above
            return
        with self._lock:
            self._ends_s[request] = self._clock() + CONNECTION_S_MAX  # type: ignore[index]  # as above
            self._strangers[request] = None  # type: ignore[index]  # as above
        super().process_request(request, client_address)  # type: ignore[arg-type]  # as above

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]  # as above
        finally:
            with self._lock:
                self._ends_s.pop(request, None)  # type: ignore[call-overload]  # as above
                self._strangers.pop(request, None)  # type: ignore[call-overload]  # as above
            self._room.release()

    def _made_room(self) -> bool:
        """Hang up on the connection that has not shown the token for longest: any user of this machine may hold
        places, and whoever has the token shows it at once. Whether its place is ours now."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            _hang_up(oldest)
        return self._room.acquire(timeout=PLACE_S_MAX)

    def let_in(self, connection: socket.socket) -> None:
        """This connection has shown the token: it keeps its place."""
        with self._lock:
            self._strangers.pop(connection, None)

    def service_actions(self) -> None:
        """Hang up on clients that keep their connection for too long."""
        with self._lock:
            now_s = self._clock()
            late = [connection for connection, ends_s in self._ends_s.items() if ends_s < now_s]
            for connection in late:
                del self._ends_s[connection]
                _hang_up(connection)

    def extend(self, connection: socket.socket, seconds: float) -> None:
        """Let a connection last for so many seconds from now on."""
        with self._lock:
            if connection in self._ends_s:
                self._ends_s[connection] = self._clock() + seconds

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client that closes its connection early is no error of ours."""

    def run(self) -> None:
        """Answer until `stop`."""
        self.serve_forever(_POLL_S)

    def stop(self) -> None:
        """End `run`, from another thread; connections that are being answered are given up."""
        self.shutdown()


def _hang_up(connection: socket.socket) -> None:
    """Wake up whoever reads from it or writes to it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has just ended


class _Bounded:
    """What a client sends, of which headers take so many bytes at most."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._left = -1  # the request line comes first, and has a bound of its own

    def readline(self, limit: int = -1) -> bytes:
        """The next line. Raises LineTooLong, which the base class answers."""
        line = self._file.readline(limit)
        if self._left < 0:
            self._left = HEAD_BYTES_MAX
        elif (left := self._left - len(line)) >= 0:
            self._left = left
        else:
            raise LineTooLong("headers")
        return line

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server: Listener

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(io.BufferedReader, _Bounded(self.rfile))

    def _serve(self) -> None:
        self.close_connection = True
        self._left = -1
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(
            method=self.command,
            target=self.path,
            headers=headers,
            body=self._body,
            extend=lambda seconds: self.server.extend(self.connection, seconds),
            let_in=lambda: self.server.let_in(self.connection),
        )
        try:
            if twice := [name for name in ONCE if len(self.headers.get_all(name, ())) > 1]:
                raise Denied(400, f"the header {twice[0]} was given twice")
            reply = self.server.answer(request)
        except Denied as denied:
            reply = trouble(denied.status, str(denied))
        except TimeoutError:
            reply = trouble(408, "the body did not come in time")
        except Exception as error:
            record_swallowed(error)
            log.exception("a request failed: %s %s", self.command, self.path.partition("?")[0])
            reply = trouble(500, "a defect of KVBM; the log has it")
        self._send(reply)
        self._drain()

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815  # the names that the base class looks for
    do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = _serve  # noqa: N815  # the same

    def _length(self) -> int:
        """The length of the body. Raises Denied."""
        text = self.headers.get("Content-Length")
        if text is None or "Transfer-Encoding" in self.headers:
            raise Denied(411, "Content-Length is needed")
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise Denied(400, f"Content-Length={text!r} cannot be used: a number of bytes")
        if int(text) > BODY_BYTES_MAX:
            raise Denied(413, f"a body of {text} bytes cannot be used: at most {BODY_BYTES_MAX}")
        return int(text)

    def _body(self) -> bytes:
        length = self._length()
        self._left = 0
        try:
            body = self.rfile.read(length)
        except ConnectionError:
            raise Denied(400, "the connection ended before the body") from None
        if len(body) < length:
            raise Denied(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in (
            ("Content-Type", reply.content_type),
            ("Content-Length", str(len(reply.body))),
            ("Connection", "close"),
            *SECURITY_HEADERS,
            *reply.headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _drain(self) -> None:
        """Read what is left of a body that was refused: the kernel would drop our answer with it otherwise."""
        length = self.headers.get("Content-Length", "0")
        if self._left == 0 or (length == "0" and "Transfer-Encoding" not in self.headers):
            return
        try:
            self.connection.shutdown(socket.SHUT_WR)
            left = DRAIN_BYTES_MAX
            while left > 0 and (read := self.connection.recv(_CHUNK)):
                left -= len(read)
        except OSError:
            pass  # it has gone, or sends no more

    def handle_expect_100(self) -> bool:
        """Ask for the body, unless it would be refused: a client then need not send it."""
        try:
            self._length()
        except Denied:
            return True
        return super().handle_expect_100()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of the protocol itself, in the form of all others. A method that nobody knows is not allowed."""
        self.close_connection = True
        if not hasattr(self, "headers"):
            self.command = ""
        status = 405 if code == 501 else int(code)
        if self.request_version == "HTTP/0.9":
            self.request_version = "HTTP/1.0"
        allow = (("Allow", "GET, HEAD, POST"),) if status == 405 else ()
        self._send(trouble(status, message or self.responses.get(status, ("not possible", ""))[0], allow))

    def version_string(self) -> str:
        """Not the version of Python."""
        return "kvbm"

    def log_message(self, *_: object) -> None:
        """Do not log requests: their address may have the token."""
