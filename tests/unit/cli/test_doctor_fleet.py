"""`kvbm doctor` and a fleet: certificates, the address to lend at, what lists the nodes, and the nodes themselves."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvbm.cli.doctor_check import Check
from kvbm.cli.doctor_fleet import check_fleet
from kvbm.fleet.tls import lending_context
from kvbm.settings import Settings
from rigs.certificates import make_node
from rigs.manager_probe import free_port
from rigs.peers import LendingNode

NOW_S = time.time()
DAY_S = 86400.0


def checks(manager_runs: bool = False, **settings: object) -> dict[str, Check]:
    """The last check of each name."""
    chosen = Settings(**{"fleet_node": "reader", **settings})  # type: ignore[arg-type]
    return {check.name: check for check in check_fleet(chosen, lambda: NOW_S, manager_runs)}


@pytest.fixture
def lender() -> Iterator[LendingNode]:
    node = LendingNode("lender", fleet="f")
    yield node
    node.close()


def test_without_a_fleet_there_is_one_line() -> None:
    (check,) = checks().values()
    assert (check.state, "DYN_KVBM_FLEET turns it on" in check.found) == ("ok", True)


def test_a_fleet_that_works(lender: LendingNode) -> None:
    ours = f"127.0.0.1:{free_port()}"
    found = checks(fleet="f", fleet_listen=ours, fleet_peers=f"{ours},{lender.address}")
    assert {name: check.state for name, check in found.items()} == {
        "fleet address": "ok",
        "fleet directory": "ok",
        "fleet nodes": "ok",
    }
    assert found["fleet nodes"].found == "1 of 1 other nodes answer"


def test_nodes_that_do_not_answer_or_are_of_another_fleet(lender: LendingNode) -> None:
    away = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        deaf = f"127.0.0.1:{silent.getsockname()[1]}"
        check = checks(fleet="f", fleet_peers=f"{lender.address},{away},{deaf}")["fleet nodes"]
    assert check.state == "advice" and check.found.startswith("1 of 3 other nodes answer: ")
    assert f"{away}: [Errno 111] Connection refused, {deaf}: nothing was heard for 3 s" in check.found
    check = checks(fleet="other", fleet_peers=lender.address)["fleet nodes"]
    assert check.state == "fault" and "a node of the fleet 'f', not of 'other'" in check.found


def test_the_address(lender: LendingNode) -> None:
    taken = {"fleet": "f", "fleet_listen": lender.address, "fleet_peers": lender.address}
    check = checks(**taken)["fleet address"]
    assert check.state == "fault" and "DYN_KVBM_FLEET_LISTEN" in check.found
    assert checks(manager_runs=True, **taken)["fleet address"].state == "ok"
    elsewhere = {**taken, "fleet_listen": "192.0.2.1:7400"}
    assert checks(manager_runs=True, **elsewhere)["fleet address"].state == "fault", "it is not ours"
    del taken["fleet_listen"]
    assert checks(**taken)["fleet address"].state == "advice"


@pytest.mark.parametrize("both", [{}, {"fleet_peers": "h:1", "fleet_etcd": "http://h:1"}])
def test_one_list_is_needed(both: dict[str, str]) -> None:
    assert checks(fleet="f", **both)["fleet directory"].state == "fault"


def test_certificates_that_are_not_there() -> None:
    (check,) = checks(fleet="f", fleet_peers="h:1", fleet_certs="/nonexistent").values()
    assert check.state == "fault"
    assert "DYN_KVBM_FLEET_CERTS='/nonexistent'" in check.found


@pytest.mark.parametrize(
    ("days", "authority_days", "made_days_ago", "state"),
    [(90, 3650, 0, "ok"), (20, 3650, 0, "advice"), (90, 20, 0, "advice"), (5, 3650, 10, "fault")],
)
def test_certificates_are_good_until(
    tmp_path: Path, days: int, authority_days: int, made_days_ago: int, state: str
) -> None:
    made_s = NOW_S - made_days_ago * DAY_S
    make_node(tmp_path, "reader", days, "f", now_s=made_s, authority_days=authority_days)
    days = min(days, authority_days)
    check = checks(fleet_certs=str(tmp_path), fleet="f", fleet_peers="127.0.0.1:1")["fleet certificates"]
    assert check.state == state, check
    assert ("expired" in check.found) == (state == "fault")
    assert check.measured.get("left_days", 0.0) == pytest.approx(days if state != "fault" else 0, abs=0.01)


def test_certificates_that_do_not_fit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_node(tmp_path / name, "reader", 90, "f")
    certs = {"fleet_certs": str(tmp_path / "one"), "fleet": "f", "fleet_peers": "127.0.0.1:1"}
    assert "of the fleet 'f'; ours is 'g'" in checks(**{**certs, "fleet": "g"})["fleet certificates"].found
    for suffix in ("pem", "key"):
        (tmp_path / "one" / f"node-9.{suffix}").write_bytes(
            (tmp_path / "one" / f"reader.{suffix}").read_bytes()
        )
    check = checks(**certs, fleet_node="node-9")["fleet certificates"]
    assert (check.state, "is of node 'reader', and this is 'node-9'" in check.found) == ("fault", True)
    (tmp_path / "one" / "ca.pem").write_bytes((tmp_path / "two" / "ca.pem").read_bytes())
    check = checks(**certs)["fleet certificates"]
    assert (check.state, "certificate verify failed" in check.found) == ("fault", True), check


def test_nodes_are_asked_with_the_certificate(tmp_path: Path) -> None:
    files = make_node(tmp_path, "lender", 90, "f")
    make_node(tmp_path, "reader", 90, "f")
    node = LendingNode("lender", fleet="f", tls=lending_context(files))
    try:
        certs = {"fleet_certs": str(tmp_path), "fleet": "f", "fleet_peers": node.address}
        found = checks(**certs)
        assert (found["fleet certificates"].state, found["fleet nodes"].state) == ("ok", "ok")
        del certs["fleet_certs"]
        assert checks(**certs)["fleet nodes"].state == "fault", "it shows none"
    finally:
        node.close()


class Etcd(BaseHTTPRequestHandler):
    """What etcd's JSON gateway answers to a question for all entries: there are none; and to one for its version."""

    def do_POST(self) -> None:
        self._answer({"header": {}})

    def do_GET(self) -> None:
        self._answer({"etcdserver": "3.5.0", "etcdcluster": "3.5.0"})

    def _answer(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_an_etcd_that_is_away() -> None:
    pytest.importorskip("etcd3gw")
    away = f"http://127.0.0.1:{free_port()}"
    check = checks(fleet="f", fleet_etcd=away)["fleet directory"]
    assert check.state == "fault" and f"etcd at {away}: etcd cannot be reached: " in check.found
    server = HTTPServer(("127.0.0.1", 0), Etcd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        there = f"http://127.0.0.1:{server.server_port}"
        found = list(
            check_fleet(Settings(fleet="f", fleet_node="n", fleet_etcd=f"{away},{there}"), time.time, False)
        )
        states = [check.state for check in found if check.name == "fleet directory"]
        assert states == ["advice", "ok"], found
    finally:
        server.shutdown()
        server.server_close()


def test_etcd_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    check = checks(fleet="f", fleet_etcd="http://h:1")["fleet directory"]
    assert (check.state, "pip install 'openkvbm[fleet]'" in check.found) == ("fault", True)
