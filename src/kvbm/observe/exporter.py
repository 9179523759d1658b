"""Serves `/metrics`, and other pages beside it, over HTTP, on threads of its own."""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from kvbm.errors import SettingsError
from kvbm.settings import variable

CONTENT_TYPE = "text/plain; charset=utf-8"
CONNECTIONS_MAX = 8
CLIENT_TIMEOUT_S = 5.0
"""The connection of a scraper that sends or reads nothing for this long is closed."""

PORTS = 1 << 16
_STOP_POLL_S = 0.05


class Answer(NamedTuple):
    """The status and the text of a page."""

    status: int
    text: str


Pages = Mapping[str, Callable[[], Answer]]
"""Pages by path."""


def metrics_url(host: str, port: int) -> str:
    """The address to scrape, as a program on this machine would, of a server that listens at `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


class PortTaken(SettingsError):
    """Another process listens on the port."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The default of 5 makes a burst of connections wait for the kernel's retries.
    request_queue_size = 4 * CONNECTIONS_MAX

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        pages: Pages,
    ) -> None:
        self.address_family = family
        self.pages = pages
        self._connections = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the host's full name here, and may wait for a name server.
        socketserver.TCPServer.server_bind(self)

    # The type stubs name `socket | (bytes, socket)`; we only pass the request on, hence the ignores.
    def process_request(self, request: object, client_address: object) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]  # as above
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]  # as above

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]  # as above
        finally:
            self._connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a scraper that closes its connection early is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        page = self.server.pages.get(self.path.partition("?")[0], _not_found)
        status, text = page()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log scrapes."""


def _not_found() -> Answer:
    return Answer(404, "not found; the metrics are at /metrics\n")


class MetricsServer:
    """Serves `render()` at `http://host:port/metrics`, and `beside` at their own paths; every other path is 404.

    The constructor binds the socket, so that a port in use is found before anything else starts; `start` begins to
    answer. `render` and the others are called on the server's threads.
    """

    def __init__(self, render: Callable[[], str], host: str, port: int, beside: Pages | None = None) -> None:
        pages = {**(beside or {}), "/metrics": lambda: Answer(200, render())}
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._server = _Server(family, (str(address[0]), int(address[1])), pages)
        except OSError as error:
            raise _bind_error(error, host, port) from None
        self._thread: threading.Thread | None = None
        self._host = host

    @property
    def port(self) -> int:
        """The bound port: the given one, or for 0 the one that the kernel chose."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address to scrape, as a program on this machine would."""
        return metrics_url(self._host, self.port)

    def start(self) -> None:
        """Answer from now on, on a daemon thread."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_POLL_S,), name="kvbm-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


def bind_nearby(
    render: Callable[[], str], host: str, port: int, tries: int, beside: Pages | None = None
) -> MetricsServer | None:
    """A `MetricsServer` at the first free port of the `tries` ports from `port` on; None if all are in use.

    Raises SettingsError, as the constructor does, for an address or a port that cannot be used at all.
    """
    for candidate in range(port, min(port + tries, PORTS)):
        try:
            return MetricsServer(render, host, candidate, beside)
        except PortTaken:
            continue
    return None


def _bind_error(error: OSError, host: str, port: int) -> SettingsError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(variable("metrics_port"), port, f"choose a free port; {host}:{port} is in use")
    if error.errno == errno.EACCES:
        return SettingsError(variable("metrics_port"), port, "choose a port that this user may listen on")
    return SettingsError(variable("metrics_host"), host, f"an address of this machine ({error.strerror})")
