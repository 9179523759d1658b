"""The dashboard, its queries against a real Prometheus that scraped a loaded manager, and the alerts."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbm
from kvbm.observe.metric_kinds import MetricKind
from kvbm.observe.metric_table import TABLE
from kvbm.protocol import Lookup, LookupReply
from kvbm.settings import variable
from rigs.admin import Engine
from rigs.checkout import ROOT
from rigs.library import NAMESPACE, layout
from rigs.manager_probe import SharedManager, wait_for
from rigs.prometheus import Prometheus
from rigs.system_packages import require

DEPLOY, SCRIPTS = ROOT / "deploy", ROOT / "scripts"
RULES = DEPLOY / "prometheus" / "kvbm-alerts.yml"
if not DEPLOY.is_dir():
    pytest.skip("a source distribution has no dashboard", allow_module_level=True)
sys.path.insert(0, str(SCRIPTS))
from panel_queries import WINDOW, Panel  # noqa: E402  # a script is found once its folder is on the path
from panels import ROWS  # noqa: E402

pytestmark = pytest.mark.slow

PANELS = {f"{row.title}: {panel.title}": panel for row in ROWS for panel in row.panels}
SEEN_S = 60.0


def names_in(text: str) -> set[str]:
    """The metrics that an expression names; a histogram's series are its own."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvbm_\w+", text)}


def test_the_file_is_that_of_the_table() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    command = [sys.executable, str(ROOT / "scripts" / "dashboard.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (DEPLOY / "grafana" / "kvbm.json").read_text() == made, (
        "python scripts/dashboard.py > deploy/grafana/kvbm.json"
    )


def test_every_metric_is_on_a_panel() -> None:
    shown = {
        name for panel in PANELS.values() for query in panel.queries for name in names_in(query.expression)
    }
    assert shown == {metric.name for metric in TABLE}


def test_the_originals_panels_have_their_titles() -> None:
    """Those of the original's dashboard, by row, with the raw series."""
    titles = {row.title: [panel.title for panel in row.panels] for row in ROWS}
    assert titles["Cache hit"][:2] == ["Host Cache Hit Rate", "Disk Cache Hit Rate"]
    assert "Matched Tokens" in titles["Cache hit"]
    assert titles["Offload"][:3] == [
        "Offload Blocks - Device to Host",
        "Offload Blocks - Host to Disk",
        "Offload Blocks - Device to Disk (Bypass Host)",
    ]
    assert titles["Onboard"][:2] == ["Onboard Blocks - Host to Device", "Onboard Blocks - Disk to Device"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that scrapes a manager with blocks on their way through every tier, as long as the tests run."""
    pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")
    from process.library_child import load, store

    require("prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    disk = ("--disk-blocks", "64", "--disk-dir", str(directory / "disk"), "--disk-admission", "all")
    (directory / "shared").mkdir()
    remote = ("--remote", f"file://{directory / 'shared'}", "--remote-linger", "0")
    with contextlib.ExitStack() as ends:
        manager = SharedManager(directory, str(directory / "m.sock"), "--host-blocks", "16", *disk, *remote)
        ends.callback(manager.close)
        prometheus = Prometheus(directory, manager.metrics_port, rules=RULES)
        ends.callback(prometheus.close)
        client = ends.enter_context(
            kvbm.BlockManager.connect(manager.socket_path, layout(), NAMESPACE, join_timeout_s=30.0)
        )

        engine = Engine(manager.socket_path, "hinting", NAMESPACE, layout=layout())
        ends.callback(engine.close)
        numbers = itertools.count(1)

        def seen_under_load() -> bool:
            """Eight prompts of five blocks are more than host memory holds: each comes back from disk."""
            engine.leader.send(Lookup(lookup=next(numbers), keys=bytes(32), hint={"session": "s"}))
            engine.expect(LookupReply)
            for seed in range(8):
                assert store(client, seed) >= 0
                assert load(client, (seed + 4) % 8) >= 0
            return not empty(prometheus)

        wait_for(seen_under_load, SEEN_S, lambda: f"empty: {empty(prometheus)}")
        yield prometheus


def answers(prometheus: Prometheus, panel: Panel) -> list[list[float]]:
    """The values behind each query of a panel, as Grafana would ask for them."""
    chosen = {"$job": ".*", "$instance": ".*", WINDOW: "30s"}
    asked = [query.expression for query in panel.queries]
    for placeholder, value in chosen.items():
        asked = [expression.replace(placeholder, value) for expression in asked]
    return [prometheus.query(expression) for expression in asked]


def empty(prometheus: Prometheus) -> list[str]:
    """The panels with a query that answers nothing, or no number."""
    return [
        title
        for title, panel in PANELS.items()
        if not all(any(map(math.isfinite, values)) for values in answers(prometheus, panel))
    ]


def test_every_panel_has_data(prometheus: Prometheus) -> None:
    assert [target["health"] for target in prometheus.targets()] == ["up"]
    assert empty(prometheus) == []


def test_promtool_finds_nothing_in_a_scrape_but_names_of_the_original(prometheus: Prometheus) -> None:
    (target,) = prometheus.targets()
    with urllib.request.urlopen(target["scrapeUrl"], timeout=10.0) as reply:
        scraped = reply.read()
    found = {line.split()[2] for line in scraped.decode().splitlines() if line.startswith("# TYPE ")}
    ours = {metric.name for metric in TABLE}
    assert found == ours
    ended = subprocess.run(
        [require("promtool"), "check", "metrics"], input=scraped, capture_output=True, check=False
    )
    complaints = (ended.stdout + ended.stderr).decode().splitlines()
    counters = (metric for metric in TABLE if metric.compatible and metric.kind is MetricKind.COUNTER)
    assert sorted(filter(None, complaints)) == sorted(
        f'{metric.name} counter metrics should have "_total" suffix' for metric in counters
    )


def test_a_young_manager_that_is_well_raises_no_alert(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        return all(rule["health"] == "ok" for rule in prometheus.rules())

    wait_for(evaluated, SEEN_S, lambda: f"{prometheus.rules()}")
    names = {rule["name"] for rule in prometheus.rules()}
    assert names == set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert prometheus.query("count_over_time(ALERTS[10m])") == [], "nor was one pending"


def test_the_alerts_fire() -> None:
    promtool, directory = require("promtool"), RULES.parent
    for words in (
        ("check", "rules", "kvbm-alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "kvbm-alerts.test.yml"),
    ):
        ended = subprocess.run([promtool, *words], cwd=directory, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    rules = (directory / "kvbm-alerts.yml").read_text()
    cases = (directory / "kvbm-alerts.test.yml").read_text()
    for name in re.findall(r"alert: (\w+)", rules):
        assert re.search(rf"alertname: {name}\n +exp_alerts:\n", cases), f"{name} is fired by no case"
    assert names_in(rules) <= {metric.name for metric in TABLE}


def test_compose_mounts_what_is_there() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    file = DEPLOY / "compose" / "compose.yml"
    services = yaml.safe_load(file.read_text())["services"]
    assert set(services) == {"vllm", "prometheus", "grafana"}
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())]
    for mount in mounts:
        if mount.startswith("."):
            assert (file.parent / mount).exists(), mount
    build = services["vllm"]["build"]
    assert (file.parent / build["context"] / build["dockerfile"]).exists()
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["vllm:6880"]
    transfer = next(word for word in services["vllm"]["command"] if word.startswith("{"))
    assert json.loads(transfer)["kv_connector_module_path"] == "kvbm.vllm_integration.connector"
    for path in ("provisioning/datasources/prometheus.yml", "provisioning/dashboards/kvbm.yml"):
        assert yaml.safe_load((DEPLOY / "grafana" / path).read_text())["apiVersion"] == 1


@pytest.mark.parametrize(("name", "engines"), [("compose.yml", 1), ("dynamo.yml", 2)])
def test_digests_of_weights_outlive_the_containers_of_compose(name: str, engines: int) -> None:
    """The runtime directory is a folder in a named volume: the volume itself has a mode that we do not choose."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    composed = yaml.safe_load((DEPLOY / "compose" / name).read_text())
    set_in = [
        service
        for service in composed["services"].values()
        if "DYN_KVBM_CPU_CACHE_GB" in service.get("environment", ())
    ]
    assert len(set_in) == engines
    for service in set_in:
        mounts = {path: volume for volume, _, path in (mount.partition(":") for mount in service["volumes"])}
        runtime_dir = Path(service["environment"][variable("runtime_dir")])
        assert mounts[str(runtime_dir.parent)] in composed["volumes"]


def test_compose_with_dynamo_is_whole() -> None:
    """etcd and NATS are where the parts look for them; workers are configured as the launch scripts configure them."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    folder = DEPLOY / "compose"
    services = yaml.safe_load((folder / "dynamo.yml").read_text())["services"]
    watching = {name for name, service in services.items() if service.get("profiles") == ["metrics"]}
    assert watching == {"prometheus", "grafana"}
    assert set(services) - watching == {"frontend", "worker-0", "worker-1", "etcd", "nats"}
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "dynamo.yml").read_text())["scrape_configs"]
    hosts = {
        target.partition(":")[0]
        for job in scraped
        for each in job["static_configs"]
        for target in each["targets"]
    }
    assert hosts == {"frontend", "worker-0", "worker-1"}
    base = services["grafana"]["extends"]
    assert base["service"] in yaml.safe_load((folder / base["file"]).read_text())["services"]
    script = (DEPLOY / "launch" / "common.sh").read_text()
    for name in ("frontend", "worker-0", "worker-1"):
        service = services[name]
        assert service["environment"]["ETCD_ENDPOINTS"] == "http://etcd:2379"
        assert service["environment"]["NATS_SERVER"] == "nats://nats:4222"
        assert set(service["depends_on"]) == {"etcd", "nats"}
        assert (folder / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        words = service["command"]
        if name != "frontend":
            assert f"KVBM='{words[words.index('--kv-transfer-config') + 1]}'" in script
            assert json.loads(words[words.index("--kv-events-config") + 1])["replay_endpoint"]


def test_a_stack_that_ends_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    lines = "set -euo pipefail; . ./common.sh; events 7; echo; (exit 3) & serve"
    ended = subprocess.run(
        ["bash", "-c", lines],
        cwd=DEPLOY / "launch",
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr == "a part of the stack ended; the others are stopped\n"
    assert json.loads(ended.stdout)["replay_endpoint"].startswith(f"ipc://{tmp_path}/dynamo.")
    assert list(tmp_path.iterdir()) == []


def test_launch_scripts_are_clean() -> None:
    scripts = sorted(path.name for path in (DEPLOY / "launch").glob("*.sh"))
    checked = subprocess.run(
        [require("shellcheck"), "-x", "-S", "warning", *scripts],
        cwd=DEPLOY / "launch",
        capture_output=True,
        text=True,
    )
    assert not checked.stdout
