"""Asks the page and the admin API, as a program does."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbm.cli.web.listener import Listener, Reply, Request
from kvbm.client.admin_http import listening
from kvbm.clock import ManualClock
from kvbm.manager.admin_page import PROGRAM
from rigs.admin import Node
from rigs.manager_probe import free_port

TIMEOUT_S = 30.0
FINE = Reply(status=200, content_type="text/plain", body=b"fine")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


class Answer:
    """An answer, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> str:
        """The one line of an error."""
        line = self.json()["error"]
        assert isinstance(line, str) and "\n" not in line
        return line


class Web:
    """One address; `token` goes into the header of every request unless it is empty."""

    def __init__(self, port: int = 0, token: str = "", path: str = "") -> None:
        self.port, self.token, self._path = port, token, path

    def ask(self, method: str, target: str, body: bytes | None = None, **headers: str) -> Answer:
        """Names of headers are written with `_`."""
        connection = (
            _UnixConnection(self._path)
            if self._path
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        )
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token:
            given = {"Authorization": f"Bearer {self.token}", **given}
        try:
            connection.request(method, target, body, given)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, target: str, **headers: str) -> Answer:
        return self.ask("GET", target, **headers)

    def post(self, target: str, document: object, **headers: str) -> Answer:
        body = json.dumps(document).encode()
        return self.ask("POST", target, body, **{"Content_Type": "application/json", **headers})

    def document(self, target: str) -> Any:
        """What an operation that must succeed answers."""
        answer = self.get(target)
        assert answer.status == 200, answer.text
        return answer.json()


def page_processes(manager: int) -> list[int]:
    """The processes that serve a page for the manager of this number."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            status = (entry / "status").read_text().split()
        except OSError:
            continue
        if PROGRAM in words and status[status.index("PPid:") + 1] == str(manager):
            found.append(int(entry.name))
    return found


def served(
    make_node: Callable[..., Node], tmp_path: Path, *words: str, **settings: object
) -> tuple[Node, Web]:
    """A manager with a disk tier and the page."""
    port = free_port()
    disk = {"disk_blocks": 40, "disk_dir": tmp_path / "disk", "disk_admission": "all"}
    node = make_node(**{**disk, "admin_http": f"127.0.0.1:{port}", **settings})
    node.manage("manager.sock", *words)
    return node, Web(port, token_of(node))


def token_of(node: Node) -> str:
    return (node.runtime_dir / "admin.token").read_text().strip()


@contextlib.contextmanager
def serving(
    answer: Callable[[Request], Reply] = lambda request: FINE, clock: ManualClock | None = None
) -> Iterator[Web]:
    """The server of the page, in a thread of the test's process."""
    with listening("127.0.0.1:0") as listener:
        server = Listener(listener, answer, clock or ManualClock())
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield Web(listener.getsockname()[1])
        finally:
            server.stop()
            thread.join()
