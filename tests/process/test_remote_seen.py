"""A manager over a directory that nodes share, as its operator sees it: works, is off, and is back."""

from __future__ import annotations

import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from rigs.admin import Node
from rigs.manager import KEYS, LAYOUT, NAMESPACE
from rigs.manager_probe import SharedManager, free_port, wait_for
from rigs.web import served

END_S = 30.0
MakeNode = Callable[..., Node]


@pytest.mark.slow
def test_commands_and_page_know_the_store(make_node: MakeNode, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    node, web = served(make_node, tmp_path, remote=f"file://{shared}", remote_linger_s=1)
    engine = node.engine(str(node.runtime_dir / "manager.sock"))
    engine.store(KEYS[:5])
    engine.lookup(KEYS[:8])

    def report() -> dict[str, object]:
        (manager,) = web.document("/api/status")["managers"]
        (space,) = manager["description"]["spaces"]
        (remote,) = space["remotes"]
        tier = next(tier for tier in space["tiers"] if tier["tier"] == "remote")
        assert (tier["blocks"], tier["resident"], tier["fault"]) == (0, remote["blocks"], remote["fault"])
        return remote

    wait_for(lambda: report()["blocks"] == 5, END_S, "not in the store")
    code, out, err = node.kvbm("status")
    assert (code, err) == (0, ""), out
    line = next(line for line in out.splitlines() if line.startswith(f" {NAMESPACE.short}") and "G4" in line)
    assert "5 known" in line and line.rstrip().endswith("on"), out
    assert f"file://{shared}" in out

    shown = node.json("top", "--once")
    assert {tier["name"]: tier["resident_blocks"] for tier in shown["tiers"]}["remote"] == 5
    assert ("host", "remote") in {(flow["source"], flow["target"]) for flow in shown["flows"]}
    assert {tier["name"] for tier in web.document("/api/top")["tiers"]} == {"host", "disk", "remote"}
    (request,) = node.json("why")["requests"][-1:]
    assert (request["remote"], "remote" in request["tiers"]) == (0, True)
    assert web.document("/api/why")["requests"][-1].keys() == request.keys()
    assert (
        node.json("inspect", "queues")["queues"][0].keys() == web.document("/api/queues")["queues"][0].keys()
    )
    assert "kvbm remote" in node.refused("reset", "--tier", "G4")
    assert set(node.json("reset", "--tier", "all")["tiers"]) == {"host", "disk"}
    checks = {check["name"]: check for check in node.json("doctor")["checks"]}
    assert (checks["remote store"]["state"], checks["remote rights"]["state"]) == ("ok", "ok")
    (there,) = node.json("remote", "show")["namespaces"]
    assert (there["fingerprint"], there["blocks"]) == (NAMESPACE.fingerprint.hex(), 5)
    assert there["pack_bytes"] > 5 * LAYOUT.block_bytes

    shared.rename(tmp_path / "away")

    def noticed() -> bool:
        """It is while blocks are asked for: others may have written them by now."""
        engine.lookup(KEYS[50:52])
        return report()["fault"] != ""

    wait_for(noticed, END_S, "still on")
    code, out, _ = node.kvbm("status")
    assert code == 1
    assert re.search(r"fault: G4 remote of namespace .* does not work: .*is it mounted", out), out
    levels = {finding["level"] for finding in node.json("top", "--once")["findings"]}
    assert "fault" in levels
    code, out, _ = node.kvbm("doctor")
    assert (code, len(re.findall("^FAULT", out, re.MULTILINE))) == (1, 2), (
        "the store, and the manager that has it"
    )
    (tmp_path / "away").rename(shared)
    wait_for(lambda: report()["fault"] == "", END_S, "still off")


def is_ready(manager: SharedManager) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{manager.metrics_port}/ready") as page:
            return page.status == 200
    except urllib.error.HTTPError:
        return False


def test_a_store_that_is_wrong_has_a_line_before_any_engine(tmp_path: Path) -> None:
    """The manager starts, and is ready all the same: it serves without."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as short:
        words = ("--host-memory", "50MB", "--remote", f"file://{tmp_path}/none")
        manager = SharedManager(tmp_path, f"{short}/manager.sock", *words)
        try:
            wait_for(
                lambda: "that DYN_KVBM_REMOTE names cannot be used now" in manager.log(), END_S, manager.log
            )
            assert f"{tmp_path}/none" in manager.log()
            wait_for(lambda: is_ready(manager), END_S, manager.log)
        finally:
            manager.close()


@pytest.mark.parametrize("at", ["@", "%40"])
def test_a_password_in_a_store_s_url_is_not_in_the_log(tmp_path: Path, at: str) -> None:
    pytest.importorskip("valkey")
    url = f"redis://u:TOPSECRET@127.0.0.1:{free_port()}/0"
    if at == "%40":
        pytest.importorskip("mooncake")
        url = f"mooncake://m:1?index={quote(url, safe='')}"
    with tempfile.TemporaryDirectory(prefix="kvbm-") as short:
        manager = SharedManager(
            tmp_path,
            f"{short}/manager.sock",
            "--host-memory",
            "50MB",
            "--remote",
            url,
            "--log-level",
            "debug",
        )
        try:
            wait_for(lambda: "cannot be used now" in manager.log(), END_S, manager.log)
            assert "***@127.0.0.1" in manager.log()
            assert "TOPSECRET" not in manager.log()
        finally:
            manager.close()
