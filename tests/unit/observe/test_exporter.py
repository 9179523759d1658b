"""`/metrics` over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request

import pytest

from kvbm.errors import SettingsError
from kvbm.observe.exporter import CONNECTIONS_MAX, Answer, MetricsServer, bind_nearby
from kvbm.observe.exposition import render
from kvbm.observe.metrics import Metrics
from kvbm.settings import Settings


@contextlib.contextmanager
def serving(page=lambda: "a 1\n", host="127.0.0.1"):
    server = MetricsServer(page, host, 0)
    server.start()
    try:
        yield server
    finally:
        server.close()


def ask(server, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def test_the_page_as_the_original_serves_it():
    metrics = Metrics()
    with serving(lambda: render(metrics)) as server:
        metrics.add("kvbm_matched_tokens", 16)
        status, headers, body = ask(server)
        assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
        assert int(headers["Content-Length"]) == len(body.encode())
        assert "\nkvbm_matched_tokens 16\n" in body
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/favicon.ico"])
def test_other_paths_are_not_found(path):
    with serving() as server:
        assert ask(server, path)[0] == 404


def test_pages_beside_the_metrics_have_a_status_of_their_own():
    beside = {"/ready": lambda: Answer(503, "not ready: x\n"), "/metrics": lambda: Answer(500, "")}
    for make in (MetricsServer, lambda *a: bind_nearby(*a[:2], 0, 1, a[3])):
        server = make(lambda: "a 1\n", "127.0.0.1", 0, beside)
        server.start()
        try:
            assert ask(server, "/ready?verbose")[::2] == (503, "not ready: x\n")
            assert ask(server)[::2] == (200, "a 1\n")
            assert ask(server, "/live")[0] == 404
        finally:
            server.close()


def test_a_query_is_ignored_and_head_has_no_body():
    with serving() as server:
        assert ask(server, "/metrics?x=1")[::2] == (200, "a 1\n")
        status, headers, body = ask(server, method="HEAD")
        assert (status, headers["Content-Length"], body) == (200, "4", "")
        assert ask(server, method="POST")[0] == 501


def test_a_port_in_use_is_one_line_at_once():
    with serving() as server:
        with pytest.raises(SettingsError) as caught:
            MetricsServer(lambda: "", "127.0.0.1", server.port)
        assert str(caught.value) == (
            f"DYN_KVBM_METRICS_PORT={server.port} cannot be used:"
            f" choose a free port; 127.0.0.1:{server.port} is in use"
        )


def test_a_port_is_taken_before_anything_is_served():
    server = MetricsServer(lambda: "", "127.0.0.1", 0)
    try:
        with pytest.raises(SettingsError):
            MetricsServer(lambda: "", "127.0.0.1", server.port)
    finally:
        server.close()


def test_the_next_port_that_is_free_is_taken_within_a_bound():
    with serving() as first:
        second = bind_nearby(lambda: "", "127.0.0.1", first.port, 16)
        try:
            assert first.port < second.port < first.port + 16
        finally:
            second.close()
        assert bind_nearby(lambda: "", "127.0.0.1", first.port, 1) is None
        with pytest.raises(SettingsError, match=r"^DYN_KVBM_METRICS_HOST="):
            bind_nearby(lambda: "", "192.0.2.1", first.port, 16)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_METRICS_HOST=") as caught:
        MetricsServer(lambda: "", host, 0)
    assert "\n" not in str(caught.value)


def test_close_frees_the_port():
    with serving() as server:
        port = server.port
    MetricsServer(lambda: "", "127.0.0.1", port).close()


def test_all_addresses_by_default_and_a_line_that_can_be_used():
    """A Prometheus in a container must reach it; the address in the log is one that this machine can open."""
    server = MetricsServer(lambda: "kvbm_engines 1\n", Settings().metrics_host, 0)
    server.start()
    try:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(server.url.replace("127.0.0.1", "127.0.0.2"), timeout=5.0) as reply:
            assert reply.read() == b"kvbm_engines 1\n"
    finally:
        server.close()


def test_ipv6():
    try:
        server = MetricsServer(lambda: "", "::1", 0)
    except SettingsError:
        pytest.skip("no IPv6 on this machine")
    assert server.url == f"http://[::1]:{server.port}/metrics"
    server.close()


def test_silent_clients_are_bounded(capfd):
    with serving() as server:
        before = threading.active_count()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4 * CONNECTIONS_MAX)]
        # Those over the bound are hung up on; the first ones are still waited for.
        for connection in idle[CONNECTIONS_MAX:]:
            connection.settimeout(10)
            assert connection.recv(1) == b""
        assert threading.active_count() <= before + CONNECTIONS_MAX
        for connection in idle:
            connection.close()
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_ends_makes_room_for_another():
    with serving() as server:
        for _ in range(3 * CONNECTIONS_MAX):
            assert ask(server)[2] == "a 1\n"


def test_a_page_that_fails_takes_nothing_down(capfd):
    pages = iter([ValueError("x"), "b 2\n"])

    def page():
        text = next(pages)
        if isinstance(text, Exception):
            raise text
        return text

    with serving(page) as server:
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server)
        assert ask(server)[2] == "b 2\n"
    assert capfd.readouterr() == ("", "")
