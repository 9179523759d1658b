"""The page and the admin API of a real manager, as an operator's browser and programs use them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli.web.listener import BODY_BYTES_MAX
from kvbm.cli.web.operations import OPERATIONS
from kvbm.client.kept_process import STARTS_MAX
from rigs.admin import Node
from rigs.manager import KEYS
from rigs.manager_probe import free_port, wait_for
from rigs.web import Web, page_processes, served, token_of

END_S = 20.0
MakeNode = Callable[..., Node]


def gone(web: Web) -> bool:
    try:
        web.get("/api/status")
    except OSError:
        return True
    except http.client.HTTPException:
        return False  # it ended in the middle of its answer
    return False


# ---- who may ask, and what is refused


def test_without_the_token_there_is_nothing_of_the_manager(make_node: MakeNode, tmp_path: Path) -> None:
    """The page and its parts hold no data: anybody may have them. All data needs the header, and nothing else helps."""
    node, web = served(make_node, tmp_path)
    file = node.runtime_dir / "admin.token"
    assert (stat.S_IMODE(file.stat().st_mode), len(web.token) >= 40) == (0o600, True)
    stranger = Web(web.port)
    for target in (
        "/",
        "/docs",
        "/openapi.json",
        "/page.js",
        "/page.css",
        "/favicon.ico",
        f"/?token={web.token}",
    ):
        answer = stranger.get(target)
        assert (answer.status, answer.headers["Set-Cookie"], web.token in answer.text) == (
            200,
            None,
            False,
        ), target
        for told in (node.managers[0].pid, node.runtime_dir / "manager.sock"):
            assert str(told) not in answer.text, target
    assert str(file) in stranger.get("/").text
    for target in (*(each.path for each in OPERATIONS if each.method == "GET"), "/api/nothing", "/nothing"):
        answer = stranger.get(target)
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), target
    assert stranger.post("/api/reset", {"tier": "all"}).status == 401
    for wrong in (f"Bearer {web.token}x", f"Basic {web.token}", web.token, "Bearer", "Bearer \xe9"):
        assert stranger.get("/api/status", Authorization=wrong).status == 401, wrong
    assert stranger.get(f"/api/status?token={web.token}").status == 401
    assert stranger.get("/api/status", Cookie=f"kvbm_token={web.token}; token={web.token}").status == 401
    assert web.get("/api/status").headers["Set-Cookie"] is None


def test_another_sites_page_can_change_nothing(make_node: MakeNode, tmp_path: Path) -> None:
    """A name server can call this machine anything."""
    _, web = served(make_node, tmp_path)
    body = {"tier": "all"}
    assert web.post("/api/reset", body, Origin=f"http://127.0.0.1:{web.port}").status == 200
    for origin in ("http://127.0.0.1:1", "http://evil.example", "null", f"https://127.0.0.1:{web.port}"):
        assert web.post("/api/reset", body, Origin=origin).status == 403, origin
    for host in (
        "evil.example",
        f"evil.example:{web.port}",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "127.0.0.1:x",
    ):
        answer = web.get("/api/status", Host=host)
        assert (answer.status, answer.error.startswith("Host must be one of")) == (403, True), host
    for host in ("localhost", "localhost:1234", "127.0.0.1:80", "[::1]", "[::1]:9"):
        assert web.get("/api/status", Host=host).status == 200, host
    policy = web.get("/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "form-action 'none'" in policy and "unsafe" not in policy
    assert web.get("/api/status").headers["Access-Control-Allow-Origin"] is None


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One manager for the tests that leave it as it is."""
    port = free_port()
    node = Node(tmp_path_factory.mktemp("web"), admin_http=f"127.0.0.1:{port}")
    node.engine(node.manage()).store(KEYS[:5])
    yield Web(port, token_of(node))
    node.close()


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("/api/leases?limit=0", "limit"),
        ("/api/leases?limit=1001", "limit"),
        ("/api/leases?limit=x", "limit"),
        ("/api/leases?start=-1", "start"),
        ("/api/leases?page=2", "unknown field `page`"),
        ("/api/leases?start=1&start=2", "twice"),
        ("/api/leases?start", "bad query field"),
        ("/api/blocks?tier=G1", "tier"),
        ("/api/why?request=%ff", "utf-8"),
        ("/api/top?live=perhaps", "live"),
        ("/api/status?" + "&".join(f"a{i}=1" for i in range(20)), "Max number of fields"),
    ],
)
def test_a_query_that_cannot_be_used(lasting: Web, target: str, told: str) -> None:
    answer = lasting.get(target)
    assert (answer.status, told in answer.error) == (400, True), answer.text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "Input data was truncated"),
        (b"{", "Input data was truncated"),
        (b'{"tokens": [1], "hours": "1"}', "$.hours"),
        (b'{"tokens": [-1]}', "$.tokens"),
        (b'{"tokens": []}', "$.tokens"),
        (b'{"tokens": [1], "hours": 169}', "$.hours"),
        (b'{"tokens": [1.5]}', "$.tokens"),
        (b'{"tokens": [1], "hours": 1e999}', "the body cannot be used"),
        (b'{"tokens": [1.5], "hours": NaN}', "the body cannot be used"),
        (b'{"tokens": [1], "hours": 0}', "$.hours"),
        (b'{"tokens": [1], "minutes": 5}', "unknown field `minutes`"),
        (b'{"hours": 1}', "required field `tokens`"),
        (b"[" * 100_000, "the body cannot be used"),
        (b'{"tokens": "\xff"}', "the body cannot be used"),
    ],
)
def test_a_body_that_cannot_be_used(lasting: Web, body: bytes, told: str) -> None:
    answer = lasting.ask("POST", "/api/pin", body, Content_Type="application/json")
    assert (answer.status, told in answer.error) == (400, True), answer.text


def test_the_other_statuses(lasting: Web) -> None:
    assert lasting.get("/nothing").status == 404
    assert lasting.get("/api/status/").status == 404
    for method, target, allow in (
        ("POST", "/api/status", "GET, HEAD"),
        ("DELETE", "/api/pin", "POST"),
        ("GET", "/api/reset", "POST"),
        ("PUT", "/", "GET, HEAD"),
        ("OPTIONS", "/api/reset", "POST"),
    ):
        answer = lasting.ask(method, target)
        assert (answer.status, answer.headers["Allow"]) == (405, allow), (method, target)
    assert lasting.ask("BREW", "/").status == 405
    assert lasting.post("/api/reset?tier=all", {"tier": "all"}).status == 400
    text = lasting.ask("POST", "/api/reset", b'{"tier": "all"}', Content_Type="text/plain")
    assert (text.status, "application/json" in text.error) == (415, True)
    kind = {"Content_Type": "application/json"}
    assert lasting.ask("POST", "/api/reset", None, **kind, Transfer_Encoding="chunked").status == 411
    long = lasting.ask("POST", "/api/pin", b" " * (BODY_BYTES_MAX + 1), **kind)
    assert (long.status, f"at most {BODY_BYTES_MAX}" in long.error) == (413, True)
    assert lasting.get("/" + "x" * 70_000).status == 414
    head = lasting.ask("HEAD", "/")
    assert (head.status, head.text, int(head.headers["Content-Length"]) > 1000) == (200, "", True)


def test_the_port_of_the_metrics_has_the_metrics_alone(make_node: MakeNode, tmp_path: Path) -> None:
    port = free_port()
    _, web = served(make_node, tmp_path, metrics="true", metrics_port=port)
    metrics = Web(port, web.token)
    assert "kvbm_matched_tokens 0" in metrics.get("/metrics").text
    for target in ("/", "/docs", "/openapi.json", "/api/status", "/page.js", f"/?token={web.token}"):
        assert metrics.get(target).status == 404, target
    assert web.get("/metrics").status == 404


# ---- where it listens


def test_off_unless_it_is_asked_for(make_node: MakeNode) -> None:
    node = make_node()
    node.manage()
    assert not (node.runtime_dir / "admin.token").exists()
    assert page_processes(node.managers[0].pid) == []


def test_a_unix_socket_needs_no_token(make_node: MakeNode, tmp_path: Path) -> None:
    path = tmp_path / "run" / "page.sock"
    node = make_node(admin_http=f"unix:{path}")
    node.manage()
    web = Web(path=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    wait_for(path.exists, END_S, "no socket")
    assert web.get("/").status == 200
    assert web.post("/api/reset", {"tier": "all"}).status == 200
    # A tunnel brings a browser here, with whatever page it has open.
    assert web.post("/api/reset", {"tier": "all"}, Origin="http://evil.example").status == 403
    assert web.get("/", Host="evil.example").status == 403
    node.managers[0].terminate()
    wait_for(lambda: not path.exists(), END_S, "the socket stays")


@pytest.mark.parametrize(
    "address", ["0.0.0.0:6881", "192.0.2.1:80", "127.0.0.1", "127.0.0.1:65536", "localhost:x", ":1", "unix:"]
)
def test_an_address_that_others_could_reach_is_refused(make_node: MakeNode, address: str) -> None:
    node = make_node()
    said = node.refused("manager", "--admin-http", address)
    assert said.startswith(f"kvbm: --admin-http={address!r} cannot be used") or address == "unix:"
    assert "cannot be used" in said


def test_a_port_in_use_is_one_line(make_node: MakeNode, tmp_path: Path) -> None:
    node, web = served(make_node, tmp_path)
    address = f"127.0.0.1:{web.port}"
    said = node.refused("manager", "--socket", str(tmp_path / "run" / "other.sock"))
    assert said.startswith(f"kvbm: DYN_KVBM_ADMIN_HTTP='{address}' cannot be used")
    assert said == node.refused("web", "--listen", address)


def test_a_token_of_the_operators_own(make_node: MakeNode) -> None:
    node = make_node(admin_http=f"127.0.0.1:{free_port()}")
    node.runtime_dir.mkdir(mode=0o700)
    file = node.runtime_dir / "admin.token"
    file.write_text("short\n")
    file.chmod(0o600)
    assert node.refused("manager").startswith(f"kvbm: admin token='{file}' cannot be used")
    file.write_text("a-token-of-the-operators-own\n")
    for mode in (0o666, 0o644, 0o640):
        file.chmod(mode)
        assert f"mode {mode:o}" in node.refused("manager")
    file.chmod(0o400)
    node.manage()
    port = int(node.environment["DYN_KVBM_ADMIN_HTTP"].rpartition(":")[2])
    assert Web(port, "a-token-of-the-operators-own").get("/api/status").status == 200


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_page_ends_with_its_manager(make_node: MakeNode, tmp_path: Path, end: signal.Signals) -> None:
    node, web = served(make_node, tmp_path)
    assert web.get("/api/status").status == 200
    assert len(page_processes(node.managers[0].pid)) == 1
    node.managers[0].send_signal(end)
    wait_for(lambda: gone(web), END_S, "the page outlives its manager")


def page_of(node: Node) -> int:
    """The page's process, once there is one."""
    manager = node.managers[0].pid
    wait_for(lambda: len(page_processes(manager)) == 1, END_S, "no page")
    return page_processes(manager)[0]


def test_a_page_that_dies_is_started_again_three_times(
    make_node: MakeNode, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And it is told; then it is off, and nobody waits for an answer that will not come."""
    node, web = served(make_node, tmp_path)
    seen = set[int]()
    said = ""
    for times in range(STARTS_MAX):
        wait_for(lambda: not seen & set(page_processes(node.managers[0].pid)), END_S, "it does not end")
        child = page_of(node)
        assert web.get("/api/status").status == 200  # also where it waits in the queue for the new one
        with socket.create_connection(("127.0.0.1", web.port)) as waiting:
            waiting.settimeout(END_S)
            waiting.sendall(b"GET /")
            os.kill(child, signal.SIGKILL)
            if times == STARTS_MAX - 1:
                with contextlib.suppress(ConnectionResetError):
                    assert waiting.recv(1) == b""
        seen.add(child)
    wait_for(lambda: gone(web), END_S, "the address still takes connections")
    said = capfd.readouterr().err
    assert said.count("the process of the admin page ended, killed by signal 9; it is started again") == 3
    assert said.count("the admin page is off until the manager starts again") == 1
    assert len(seen) == STARTS_MAX
    # The manager goes on.
    assert json.loads(node.kvbm("status", "--json")[1])["managers"][0]["faults"] == []


def test_a_page_that_cannot_start_again_says_why_in_a_line(
    make_node: MakeNode, capfd: pytest.CaptureFixture[str]
) -> None:
    node = make_node(admin_http=f"127.0.0.1:{free_port()}")
    file = node.runtime_dir / "admin.token"
    node.manage()
    child = page_of(node)
    web = Web(int(node.environment["DYN_KVBM_ADMIN_HTTP"].rpartition(":")[2]))
    assert web.get("/").status == 200
    file.chmod(0o644)
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: gone(web), END_S, "the address still takes connections")
    said = capfd.readouterr().err
    assert said.count(f"no admin page: admin token='{file}' cannot be used") == STARTS_MAX - 1
    assert "the admin page is off until the manager starts again" in said
    assert "Traceback" not in said


# ---- the command


class Command:
    """`kvbm web`, and the address that it printed."""

    def __init__(self, node: Node, *words: str) -> None:
        command = [sys.executable, "-m", "kvbm.cli.main", "web", *words]
        self.process = subprocess.Popen(command, env=node.environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=END_S)
        return self.process.returncode


def test_the_command_serves_the_only_manager_until_it_is_stopped(make_node: MakeNode) -> None:
    node = make_node()
    path = node.manage()
    command = Command(node)
    match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=(\S+)", command.url)
    assert match is not None, command.url
    web = Web(int(match[1]), match[2])
    assert web.document("/api/status")["managers"][0]["socket"] == path
    node.managers[0].kill()
    node.managers[0].wait()
    for target in ("/api/top", "/api/why", "/api/blocks"):
        answer = web.get(target)
        assert (answer.status, "no manager" in answer.error) == (503, True), answer.text
    (manager,) = web.document("/api/status")["managers"]
    assert len(manager["faults"]) == 1
    node.manage()
    assert web.document("/api/status")["managers"][0]["description"]["pid"] == node.managers[1].pid
    node.managers[1].kill()
    node.managers[1].wait()
    node.manage("another.sock")
    # The page of one manager never shows another one.
    answer = web.get("/api/top")
    assert (answer.status, f"no manager at {path}" in answer.error) == (503, True), answer.text
    node.managers.pop().terminate()
    assert command.end() == 0


def test_the_command_needs_to_know_which_manager(make_node: MakeNode) -> None:
    node = make_node()
    assert "no manager runs" in node.refused("web")
    paths = [node.manage("a.sock"), node.manage("b.sock")]
    nowhere = str(node.runtime_dir / "nowhere.sock")
    assert f"no manager at {nowhere}" in node.refused("web", "--manager", nowhere)
    said = node.refused("web")
    assert all(path in said for path in paths)
    assert node.refused("web", "--manager", paths[0], "--listen", "0.0.0.0:1").startswith("kvbm: --listen=")
    where = node.runtime_dir / "page.sock"
    command = Command(node, "--manager", paths[1], "--listen", f"unix:{where}")
    assert command.url == f"unix:{where}"
    (manager,) = Web(path=str(where)).document("/api/status")["managers"]
    assert manager["socket"] == paths[1]
    assert command.end() == 0
    assert not os.path.exists(where)
