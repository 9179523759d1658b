"""`kvbm status`, `inspect` and `reset`, as an operator runs them against managers that serve engines."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rigs.admin import Node
from rigs.manager import KEYS, NAMESPACE, OTHER


@pytest.fixture
def node(make_node: Callable[..., Node], tmp_path: Path) -> Node:
    """With a disk tier."""
    return make_node(disk_blocks=40, disk_dir=tmp_path / "disk", disk_admission="all")


# ---- status


def test_status_without_a_manager_says_where_it_looked(make_node: Callable[..., Node]) -> None:
    node = make_node()
    code, out, err = node.kvbm("status")
    assert (code, out) == (1, "")
    assert err == f"kvbm: no manager runs in {node.runtime_dir}\n"


def test_status_shows_tiers_engines_and_hits(node: Node) -> None:
    path = node.manage()
    engine = node.engine(path)
    engine.store(KEYS[:5])
    (manager,) = node.json("status")["managers"]
    described = manager["description"]
    (space,), (connected,) = described["spaces"], described["engines"]
    host, disk = space["tiers"]
    assert (manager["socket"], manager["faults"]) == (path, [])
    assert described["pid"] == node.managers[0].pid
    assert (host["tier"], host["blocks"], host["resident"], host["leased"]) == ("host", 16, 5, 5)
    assert (disk["tier"], disk["blocks"], disk["fault"]) == ("disk", 40, "")
    assert (space["model"], space["fingerprint"]) == (NAMESPACE.model, NAMESPACE.fingerprint.hex())
    assert (connected["engine"], connected["model"], connected["ranks"]) == ("engine-1", NAMESPACE.model, [0])
    assert (connected["led"], connected["leases"], connected["leased_blocks"]) == (True, 1, 5)
    assert (described["asked_blocks"], described["hit_blocks"]) == (5, {"host": 5, "disk": 0})
    code, out, err = node.kvbm("status")
    assert (code, err) == (0, "")
    for word in (f"{path}: works", "G2 host", "G3 disk", "31.2%", NAMESPACE.model, "engine-1", "1 of 1"):
        assert word in out, out


def test_status_names_an_engine_whose_scheduler_has_gone(node: Node) -> None:
    engine = node.engine(node.manage())
    engine.leader.close()
    code, out, _ = node.kvbm("status")
    assert code == 1
    assert "engine engine-1 runs without a KV cache: its scheduler not connected" in out


def test_status_shows_every_manager(make_node: Callable[..., Node]) -> None:
    node = make_node()
    paths = [node.manage("a.sock"), node.manage("b.sock")]
    assert [each["socket"] for each in node.json("status")["managers"]] == paths
    (only,) = node.json("status", "--manager", paths[1])["managers"]
    assert only["socket"] == paths[1]


@pytest.mark.slow
def test_status_of_a_manager_that_is_stopped_says_that_it_does_not_answer(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    path = node.manage()
    node.managers[0].send_signal(signal.SIGSTOP)
    try:
        code, out, err = node.kvbm("status", "--json")
    finally:
        node.managers[0].send_signal(signal.SIGCONT)
    assert (code, err) == (1, "")
    (manager,) = json.loads(out)["managers"]
    (fault,) = manager["faults"]
    assert path in fault
    assert "did not answer within 10 s" in fault


def test_a_socket_that_a_killed_manager_left_is_not_a_manager(make_node: Callable[..., Node]) -> None:
    node = make_node()
    node.manage("dead.sock")
    node.managers[0].kill()
    node.managers[0].wait()
    assert (node.runtime_dir / "dead.sock").exists()
    path = node.manage("alive.sock")
    assert [each["socket"] for each in node.json("status")["managers"]] == [path]
    assert node.json("reset", "--tier", "all")["manager"] == path


# ---- which manager


def test_without_a_manager_a_command_says_where_it_looked(make_node: Callable[..., Node]) -> None:
    node = make_node()
    assert f"no manager runs in {node.runtime_dir}" in node.refused("inspect", "queues")
    nowhere = str(node.runtime_dir / "nowhere.sock")
    assert f"no manager at {nowhere}" in node.refused("reset", "--tier", "G2", "--manager", nowhere)


# ---- inspect


def test_blocks_come_in_pages(node: Node) -> None:
    node.engine(node.manage()).store(KEYS[:5])
    first = node.json("inspect", "blocks", "--limit", "3")
    second = node.json("inspect", "blocks", "--limit", "3", "--start", str(first["next"]))
    rows = first["blocks"] + second["blocks"]
    assert (len(first["blocks"]), second["next"]) == (3, -1)
    assert [row["key"] for row in rows] == [key.hex() for key in KEYS[:5]]
    assert {(row["state"], row["leased"]) for row in rows} == {("resident", True)}
    code, out, _ = node.kvbm("inspect", "blocks", "--limit", "3")
    assert code == 0
    assert KEYS[0].hex()[:16] in out
    assert f"There are more: --start {first['next']}" in out
    assert "No blocks in G2 host from slot 9 on." in node.kvbm("inspect", "blocks", "--start", "9")[1]


def test_leases_name_the_engine_that_holds_them(node: Node) -> None:
    engine = node.engine(node.manage())
    engine.store(KEYS[:5])
    engine.lookup(KEYS[:2])
    page = node.json("inspect", "leases")
    assert [(row["engine"], row["blocks"], row["ready"]) for row in page["leases"]] == [
        ("engine-1", 5, 5),
        ("engine-1", 2, 2),
    ]
    assert all(0 < row["ends_in_s"] <= 120 for row in page["leases"])
    assert (page["total"], page["next"]) == (2, -1)
    part = node.json("inspect", "leases", "--limit", "1")
    assert (len(part["leases"]), part["next"]) == (1, 1)
    code, out, _ = node.kvbm("inspect", "leases")
    assert (code, "engine-1" in out) == (0, True)


def test_a_namespace_is_chosen_by_its_first_digits(node: Node) -> None:
    path = node.manage("manager.sock", "--namespaces", "2")
    node.engine(path, "one").store(KEYS[:2])
    node.engine(path, "two", OTHER).store(KEYS[10:13])
    said = node.refused("inspect", "blocks")
    assert NAMESPACE.short in said and OTHER.short in said
    page = node.json("inspect", "blocks", "--namespace", OTHER.short[:4])
    assert [row["key"] for row in page["blocks"]] == [key.hex() for key in KEYS[10:13]]
    code, out, _ = node.kvbm("inspect", "namespaces")
    assert code == 0
    for word in (NAMESPACE.short, OTHER.short, "weights", "aa", "bb", "4 tokens"):
        assert word in out
    shorts = [space["namespace"] for space in node.json("inspect", "namespaces")["namespaces"]]
    assert shorts == [NAMESPACE.short, OTHER.short]


def test_queues_show_what_is_under_way(node: Node) -> None:
    engine = node.engine(node.manage())
    engine.store(KEYS[:5])
    (queue,) = node.json("inspect", "queues")["queues"]
    assert queue["namespace"] == NAMESPACE.short
    assert queue["reservations"] == 0
    code, out, _ = node.kvbm("inspect", "queues")
    assert (code, NAMESPACE.short in out) == (0, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("inspect", "blocks", "--tier", "G4"), "--tier='G4' cannot be used: one of G2, G3"),
        (("inspect", "blocks", "--namespace", "zz"), "--namespace='zz' cannot be used"),
        (("reset", "--tier", "G1"), "--tier='G1' cannot be used: one of G2, G3, all"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(node: Node, words: tuple[str, ...], told: str) -> None:
    node.engine(node.manage()).store(KEYS[:5])
    assert told in node.refused(*words)
    assert node.json("status")["managers"][0]["description"]["spaces"][0]["tiers"][0]["resident"] == 5


@pytest.mark.parametrize("command", ["blocks", "leases"])
@pytest.mark.parametrize(("option", "value"), [("--limit", "1001"), ("--limit", "0"), ("--start", "x")])
def test_a_page_that_cannot_be_is_refused(
    make_node: Callable[..., Node], command: str, option: str, value: str
) -> None:
    said = make_node().refused("inspect", command, option, value)
    assert said.startswith(f"kvbm: {option}={value!r} cannot be used: a number from")


# ---- reset


def test_reset_drops_what_is_not_in_use_and_says_what_stays(node: Node) -> None:
    path = node.manage()
    engine, other = node.engine(path), node.engine(path, "engine-2")
    engine.store(KEYS[:5])
    other.lookup(KEYS[:2])
    engine.close()  # its leases end; those of the other stay
    while any(row["engine"] == "engine-1" for row in node.json("inspect", "leases")["leases"]):
        pass
    result = node.json("reset", "--tier", "g2")
    assert result == {
        "manager": path,
        "tiers": {"host": {"type": "reset_done", "dropped": 3, "in_use": 2, "undone": ""}},
    }
    kept = node.json("inspect", "blocks")["blocks"]
    assert [row["key"] for row in kept] == [key.hex() for key in KEYS[:2]]


def test_reset_of_disk_leaves_host_memory_alone(node: Node) -> None:
    engine = node.engine(node.manage())
    engine.store(KEYS[:5])
    while len(node.json("inspect", "blocks", "--tier", "G3")["blocks"]) < 5:
        pass
    code, out, err = node.kvbm("reset", "--tier", "G3")
    assert (code, err) == (0, "")
    assert "G3 disk: 5 blocks dropped" in out
    assert node.json("inspect", "blocks", "--tier", "G3")["blocks"] == []
    assert len(node.json("inspect", "blocks")["blocks"]) == 5


def test_reset_of_a_tier_that_the_manager_lacks_is_refused(make_node: Callable[..., Node]) -> None:
    node = make_node()
    path = node.manage()
    code, out, _ = node.kvbm("reset", "--tier", "all")
    assert (code, "there is nothing to drop" in out) == (0, True)
    node.engine(path).store(KEYS[:5])
    assert "it has no disk tier" in node.refused("reset", "--tier", "G3")
    assert "no disk tier" in node.refused("inspect", "blocks", "--tier", "G3")
    code, out, _ = node.kvbm("reset", "--tier", "all")
    assert (code, "G2 host: 0 blocks dropped, 5 stay because they are in use" in out) == (0, True)


# ---- doctor


def test_doctor_compares_host_memory_with_the_cache_of_an_engine_that_runs(node: Node) -> None:
    path = node.manage()
    node.engine(path, "small", device_blocks=10)
    node.engine(path, "large", device_blocks=4000)
    node.engine(path, "silent")
    _, out, err = node.kvbm("doctor", "--json")
    assert err == ""
    found = {each["name"]: each for each in json.loads(out)["checks"] if each["name"].startswith("engine ")}
    host = json.loads(node.kvbm("status", "--json")[1])["managers"][0]["description"]["spaces"][0]["tiers"][0]
    large = found["engine large"]
    assert list(found) == ["engine large"]
    assert large["state"] == "advice"
    assert large["measured"] == {"host_blocks": host["blocks"], "device_blocks": 4000}
    assert "fewer than the device's 4000" in large["found"]
