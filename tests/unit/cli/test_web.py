"""The server of the page: its bounds, a defect behind it, the pace of heavy calls, and where it may listen."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from kvbm.cli.web.access import Token
from kvbm.cli.web.listener import (
    BODY_BYTES_MAX,
    CONNECTION_S_MAX,
    CONNECTIONS_MAX,
    HEAD_BYTES_MAX,
    Listener,
    Reply,
    Request,
)
from kvbm.cli.web.operations import STATE_S, ManagerGate
from kvbm.cli.web.pace import Pace
from kvbm.cli.web.site import HEAVY_BURST, Site
from kvbm.cli.web.troubles import Denied
from kvbm.client.admin_http import admin_token, listening, url_of
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUnavailable, SettingsError
from kvbm.manager.admin_page import admin_page
from kvbm.settings import Settings
from rigs.manager_probe import wait_for
from rigs.served import ServedManager
from rigs.web import FINE, Web, page_processes, serving

SECRET = "a-token-of-the-test"
SEEN_S = 20.0


# ---- bounds


def test_connections_are_bounded_and_those_that_show_no_token_make_room() -> None:
    """Any user of the machine may open them all, and keep opening them: whoever has the token gets in."""
    with serving() as web, contextlib.ExitStack() as ends:
        before = threading.active_count()
        idle = []
        for _ in range(2 * CONNECTIONS_MAX):
            idle.append(ends.enter_context(socket.create_connection(("127.0.0.1", web.port))))
        for connection in idle[:CONNECTIONS_MAX]:
            connection.settimeout(SEEN_S)
            assert connection.recv(1) == b""
        assert threading.active_count() <= before + CONNECTIONS_MAX
        assert web.get("/").text == "fine"
        for connection in idle[CONNECTIONS_MAX + 1 :]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_whoever_has_shown_the_token_keeps_the_place() -> None:
    entered, done = threading.Semaphore(0), threading.Event()

    def answer(request: Request) -> Reply:
        if request.target == "/let-in":
            request.let_in()
            entered.release()
            assert done.wait(SEEN_S)
        return FINE

    with serving(answer) as web, contextlib.ExitStack() as ends:
        insiders = []
        for _ in range(CONNECTIONS_MAX):
            insider = ends.enter_context(socket.create_connection(("127.0.0.1", web.port)))
            insider.settimeout(SEEN_S)
            insider.sendall(b"GET /let-in HTTP/1.1\r\nHost: localhost\r\n\r\n")
            insiders.append(insider)
            assert entered.acquire(timeout=SEEN_S)
        assert not answers(web)
        done.set()
        assert all(insider.recv(15).startswith(b"HTTP/1.1 200") for insider in insiders)
        wait_for(lambda: answers(web), SEEN_S, "no room again")


def answers(web: Web) -> bool:
    try:
        return web.get("/").text == "fine"
    except OSError:
        return False


def test_a_client_that_takes_for_ever_is_hung_up_on() -> None:
    clock = ManualClock()
    with serving(clock=clock) as web:
        with socket.create_connection(("127.0.0.1", web.port)) as slow:
            slow.settimeout(SEEN_S)
            slow.sendall(b"GET / HTTP/1.1\r\n")
            assert web.get("/").text == "fine"  # it has been accepted by now
            clock.advance(CONNECTION_S_MAX + 1.0)
            assert slow.recv(1) == b""


def test_an_answer_that_takes_long_is_waited_for_where_it_says_so() -> None:
    clock = ManualClock()

    def slow(request: Request) -> Reply:
        if request.target == "/long":
            request.extend(CONNECTION_S_MAX * 10.0)
        clock.advance(CONNECTION_S_MAX + 1.0)
        for _ in range(2):  # one look at the clock may have been under way
            serviced.clear()
            assert serviced.wait(SEEN_S)
        returned.set()
        return FINE

    serviced, returned = threading.Event(), threading.Event()
    with serving(slow, clock) as web, pytest.MonkeyPatch.context() as patch:
        service = Listener.service_actions
        patch.setattr(Listener, "service_actions", lambda self: (service(self), serviced.set()))
        assert web.get("/long").text == "fine"
        returned.clear()
        with pytest.raises(http.client.RemoteDisconnected):
            web.get("/short")
        assert returned.wait(SEEN_S)  # the server serves until it has looked at the clock twice


def test_a_body_is_asked_for_only_if_it_will_be_taken() -> None:
    def read(request: Request) -> Reply:
        return Reply(status=200, content_type="text/plain", body=request.body())

    with serving(read) as web:
        for length, first in ((4, b"HTTP/1.1 100 Continue"), (BODY_BYTES_MAX + 1, b"HTTP/1.1 413 ")):
            with socket.create_connection(("127.0.0.1", web.port)) as client:
                client.settimeout(SEEN_S)
                head = f"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
                client.sendall(head.encode())
                assert client.recv(len(first)) == first
        for length in ("x", "-1", "1" * 30):
            assert web.ask("POST", "/", b"a", Content_Length=length).status == 400
        with socket.create_connection(("127.0.0.1", web.port)) as client:
            client.settimeout(SEEN_S)
            client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab")
            client.shutdown(socket.SHUT_WR)
            assert b"ended after 2 of 5 bytes" in client.makefile("rb").read()


def test_nonsense_gets_an_answer_and_takes_nothing_down() -> None:
    with serving() as web:
        for nonsense in (
            b"\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\0",
            b"A" * 70_000,
        ):
            with socket.create_connection(("127.0.0.1", web.port)) as client:
                client.settimeout(SEEN_S)
                with contextlib.suppress(OSError):
                    client.sendall(nonsense)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(1 << 16):
                        pass
        assert web.get("/").text == "fine"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([f"X-Long-{i}: {'x' * 1000}" for i in range(40)], 431),
        ([f"X-Long: {'x' * HEAD_BYTES_MAX}"], 431),
        ([f"X-Long-{i}: {'x' * 1000}" for i in range(20)], 200),
        (["Host: evil.example"], 400),
        (["Content-Length: 0", "Content-Length: 3"], 400),
    ],
)
def test_headers_are_few_and_those_that_count_come_once(headers: list[str], status: int) -> None:
    """Before the token is looked at: whoever has none costs no memory."""
    with serving() as web, socket.create_connection(("127.0.0.1", web.port)) as client:
        client.settimeout(10.0)
        client.sendall("\r\n".join(("GET / HTTP/1.1", "Host: localhost", *headers, "", "")).encode())
        assert client.recv(1 << 16).split()[1] == str(status).encode()


@pytest.mark.swallows("^ZeroDivisionError: $")
def test_a_defect_is_a_500_in_one_line_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Request) -> Reply:
        raise ZeroDivisionError

    with serving(broken) as web, caplog.at_level(logging.ERROR):
        answer = web.get("/a?token=secret")
    assert (answer.status, answer.error) == (500, "a defect of KVBM; the log has it")
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "secret" not in record.getMessage()


def test_a_pace() -> None:
    clock = ManualClock()
    pace = Pace(2.0, 3.0, clock)
    assert [pace.take() for _ in range(4)] == [True, True, True, False]
    clock.advance(0.5)
    assert [pace.take(), pace.take()] == [True, False]
    clock.advance(100.0)
    assert [pace.take() for _ in range(4)] == [True, True, True, False]


def test_heavy_calls_are_paced_and_light_ones_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    gate = ManagerGate(Settings(manager=str(tmp_path / "none.sock")), clock)
    site = Site(gate, Token(SECRET), "file", clock)
    with serving(site.answer) as web:
        web.token = SECRET
        statuses = [web.post("/api/reset", {"tier": "all"}).status for _ in range(int(HEAVY_BURST) + 1)]
        assert statuses == [503] * int(HEAVY_BURST) + [429]
        assert web.get("/api/blocks").headers["Retry-After"] == "1"
        assert web.get("/api/queues").status == 503
        clock.advance(1.0)
        assert web.get("/api/blocks").status == 503


@pytest.mark.parametrize("shown", [f"Bearer {SECRET}", "Bearer wrong", ""])
def test_only_who_shows_the_token_keeps_the_place(tmp_path: Path, shown: str) -> None:
    gate = ManagerGate(Settings(manager=str(tmp_path / "none.sock")), ManualClock())
    site = Site(gate, Token(SECRET), "file", ManualClock())
    let_in = list[str]()
    for target in ("/", "/page.js", "/api/nothing"):
        request = Request(
            method="GET",
            target=target,
            headers={"host": "localhost", "authorization": shown},
            body=bytes,
            let_in=lambda target=target: let_in.append(target),
        )
        with contextlib.suppress(Denied):
            site.answer(request)
    assert let_in == (["/api/nothing"] if SECRET in shown else [])


# ---- the manager behind it


def test_one_snapshot_serves_all_who_look_within_half_a_second(tmp_path: Path) -> None:
    """However many pages are open."""
    manager = ServedManager(tmp_path, {"host_blocks": 8})
    try:
        clock = ManualClock()
        gate = ManagerGate(Settings(manager=manager.path, runtime_dir=str(tmp_path)), clock)
        first, since = gate.state()
        assert gate.state() == (first, since)
        clock.advance(STATE_S)
        second, since = gate.state()
        assert second.now.at_s > first.now.at_s
        assert since == first.now  # flows are counted from there on
    finally:
        manager.stop()
    clock.advance(STATE_S)
    with pytest.raises(ManagerUnavailable, match="no manager at"):
        gate.state()


def test_a_question_does_not_wait_for_ever_for_its_turn(tmp_path: Path) -> None:
    gate = ManagerGate(Settings(manager=str(tmp_path / "m.sock")), ManualClock(), answer_s=0.01)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "m.sock"))
    listener.listen()
    with listener, gate._turn, pytest.raises(ManagerUnavailable, match=r"took longer than 0\.01 s"):
        with gate.session():
            pass


# ---- where it listens


def test_the_next_port_is_taken_where_any_will_do() -> None:
    with listening("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        with listening(f"localhost:{port}", tries=16) as second:
            assert port < second.getsockname()[1] < port + 16
        with pytest.raises(SettingsError, match=r"^DYN_KVBM_ADMIN_HTTP=.*Address already in use"):
            with listening(f"127.0.0.1:{port}"):
                pass


def test_ipv6() -> None:
    try:
        with listening("[::1]:0") as listener:
            assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}/"
    except SettingsError:
        pytest.skip("no IPv6 on this machine")


def test_a_unix_socket_that_nobody_listens_at_any_more_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with listening(f"unix:{path}"):
        kept = path.stat().st_ino
        with pytest.raises(SettingsError, match="Address already in use"):
            with listening(f"unix:{path}"):
                pass
        assert path.stat().st_ino == kept
    assert not path.exists()
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    with listening(f"unix:{path}") as listener:
        assert url_of(listener) == f"unix:{path}"
    path.write_text("a file of somebody's")
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_ADMIN_HTTP="):
        with listening(f"unix:{path}"):
            pass
    assert path.read_text() == "a file of somebody's"


def test_an_engines_own_manager_does_without_rather_than_not_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "admin.token").write_text("short")
    settings = Settings(runtime_dir=str(tmp_path), admin_http="127.0.0.1:0")
    with caplog.at_level(logging.WARNING), admin_page(settings, "m.sock", private=True) as start:
        start()
    assert "no admin page: admin token=" in caplog.text
    with pytest.raises(SettingsError, match=r"^admin token="):
        with admin_page(settings, "m.sock", private=False):
            pass


def test_engines_managers_beside_one_another_have_ports_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        settings = Settings(runtime_dir=str(tmp_path), admin_http=f"127.0.0.1:{port}")
        with (
            caplog.at_level(logging.INFO),
            admin_page(settings, str(tmp_path / "m.sock"), private=True) as start,
        ):
            start()
            web = Web(int(caplog.text.partition("http://127.0.0.1:")[2].partition("/")[0]))
            assert port < web.port < port + 16
            web.token = admin_token(str(tmp_path))
            (manager,) = web.document("/api/status")["managers"]
            assert "no manager at" in manager["faults"][0]


def test_a_child_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.client.kept_process.END_S", 0.1)
    settings = Settings(runtime_dir=str(tmp_path), admin_http="127.0.0.1:0")
    with admin_page(settings, "m.sock", private=False) as start:
        start()
        (child,) = page_processes(os.getpid())
        os.kill(child, signal.SIGSTOP)
    assert page_processes(os.getpid()) == []


def test_the_token_is_made_once_and_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    token = admin_token(str(run))
    assert admin_token(str(run)) == token
    (run / "admin.token").unlink()
    assert admin_token(str(run)) != token
    (run / "admin.token").unlink()
    (run / "admin.token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match=r"^admin token="):
        admin_token(str(run))
    assert not (tmp_path / "elsewhere").exists()
