"""The Helm chart: it renders, Kubernetes knows every field, and it agrees with the manager."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvbm.client.finder import SOCKET_NAME
from kvbm.manager import node_door, peer_server
from kvbm.manager.closing import CLOSE_S_MAX
from kvbm.manager.probes import LIVE_PATH, READY_PATH
from kvbm.settings import FIELDS, Settings, load_settings
from kvbm.settings.parse import GB
from rigs.checkout import PROJECT, ROOT
from rigs.kubernetes import (
    CHART,
    MANIFESTS,
    VERSIONS,
    containers,
    helm,
    notes,
    pod_of,
    render,
    validate,
    yaml,
)

pytestmark = pytest.mark.skipif(not CHART.exists(), reason="a source distribution has no chart")

CERTIFIED = {
    "fleet": {
        "enabled": True,
        "name": "llama",
        "etcd": ["http://etcd.etcd:2379"],
        "certsSecret": "fleet-certs",
    }
}
CLAIMED = {
    "remote": {"directory": {"existingClaim": "shared"}, "keys": {"secret": "keys", "file": "keys.txt"}}
}
ALL = {
    "nameOverride": "cache",
    "image": {"repository": "registry.example/kvbm", "tag": "x"},
    "imagePullSecrets": [{"name": "pull"}],
    "namespaces": 3,
    "disk": {"sizeGB": 1500.5},
    "settings": {
        "disk_admission": "ghost",
        "salt_share": 0.25,
        "max_concurrent_transfers": 8,
        "disk_unowned_bytes": 3_000_000_000_000,
        "huge_pages": False,
        "peer_uids": "0,2000",
        "events_endpoint": "tcp://*:5557",
    },
    "metrics": {"port": 7000, "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "secretRefs": ["store-credentials"],
    "extraEnv": [{"name": "DYN_LOG", "value": "debug"}],
    "priorityClassName": "system-node-critical",
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "maxUnavailable": "10%",
    "networkPolicy": {
        "metricsFrom": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ],
        "ingress": [{"ports": [{"port": 5557}]}],
        "egress": [{"ports": [{"port": 443}]}],
        "dns": {"to": [{"namespaceSelector": {}}]},
    },
    **CERTIFIED,
    **CLAIMED,
    "extraVolumes": [{"name": "more", "secret": {"secretName": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/more", "readOnly": True}],
}
"""Every value that makes something appear."""
LEAST = {
    "metrics": {"service": {"enabled": False}},
    "networkPolicy": {"enabled": False},
    "serviceAccount": {"create": False},
    "initDirectories": {"enabled": False},
    "tolerations": [],
}
DISK_ALONE = {
    "hostMemoryGB": 0,
    "disk": {"sizeGB": 100, "type": "ephemeral", "ephemeral": {"storageClassName": "local"}},
}
CLAIM = {"disk": {"sizeGB": 10, "type": "existingClaim", "existingClaim": "cache"}}
LISTED = {
    "fleet": {"enabled": True, "port": 7500, "peers": ["10.0.0.8:7500", "[fd00::9]:7500"]},
    "remote": {"directory": {"hostPath": "/mnt/nfs/kvbm"}},
}
VALUES = {
    "defaults": {},
    "all": ALL,
    "least": LEAST,
    "disk alone": DISK_ALONE,
    "claim": CLAIM,
    "a list of peers": LISTED,
}
EACH = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)


def toml(tmp_path: Path, **values: Any) -> Path:
    """The settings file as the pod sees it."""
    path = tmp_path / "kvbm.toml"
    path.write_text(render(**values)["ConfigMap"]["data"]["kvbm.toml"])
    return path


def settings(tmp_path: Path, **values: Any) -> Settings:
    """What the manager makes of it, which must leave no remark that it names a wrong setting."""
    loaded = load_settings({}, file=toml(tmp_path, **values), directory=tmp_path)
    assert not [line for line in loaded.warnings if "not a setting" in line]
    return loaded.settings


def manager_of(daemon_set: dict[str, Any]) -> dict[str, Any]:
    (manager,) = pod_of(daemon_set)["containers"]
    return manager


def test_helm_has_nothing_to_say() -> None:
    found = helm.lint(str(CHART), strict=True)
    assert [each for each in found["messages"] if "icon" not in each["error"]] == [] == found["errors"]


@pytest.mark.parametrize("version", VERSIONS)
@EACH
def test_every_field_is_one_of_kubernetes(values: dict[str, Any], version: str) -> None:
    for resource in render(**values).values():
        validate(resource, version)


def test_the_validation_finds_what_is_no_field() -> None:
    daemon_set = render()["DaemonSet"]
    pod_of(daemon_set)["restartPolicies"] = "Always"
    with pytest.raises(Exception, match="restartPolicies"):
        validate(daemon_set, VERSIONS[0])


def test_what_appears_for_which_values() -> None:
    usual = {"ConfigMap", "DaemonSet", "NetworkPolicy", "Service", "ServiceAccount"}
    assert set(render()) == usual
    assert set(render(**ALL)) == usual | {"ServiceMonitor"}
    assert set(render(**LEAST)) == {"ConfigMap", "DaemonSet"}


# ---- settings


@EACH
def test_every_setting_is_one_that_the_manager_reads(values: dict[str, Any], tmp_path: Path) -> None:
    path = toml(tmp_path, **values)
    for name in re.findall(r"^(\w+) =", path.read_text(), flags=re.MULTILINE):
        assert FIELDS[name].reader in ("manager", "both"), name
    settings(tmp_path, **values)


def test_values_arrive_as_they_were_written(tmp_path: Path) -> None:
    loaded = settings(tmp_path, **ALL)
    assert (loaded.host_bytes, loaded.disk_bytes) == (20 * GB, 1500.5 * GB)
    assert (loaded.disk_admission, loaded.salt_share, loaded.max_concurrent_transfers) == ("ghost", 0.25, 8)
    assert (loaded.disk_unowned_bytes, loaded.huge_pages, loaded.peer_uids) == (3000 * GB, False, (0, 2000))
    assert (loaded.metrics, loaded.metrics_port, loaded.events_endpoint) == (True, 7000, "tcp://*:5557")


@pytest.mark.parametrize(
    "name",
    [
        "manager",
        "runtime_dir",
        "host_bytes",
        "host_blocks",
        "disk_bytes",
        "disk_dir",
        "metrics",
        "metrics_port",
    ],
)
def test_a_setting_that_another_value_says_is_refused(name: str) -> None:
    with pytest.raises(helm.HelmError, match=f"settings.{name} cannot be used"):
        render(settings={name: "1"})


def test_names_of_settings_in_the_values_exist() -> None:
    """Also those in comments, and in the page."""
    text = (CHART / "values.yaml").read_text() + (ROOT / "docs" / "operating" / "kubernetes.md").read_text()
    named = re.findall(r"settings\.(\w+)", text) + re.findall(r"^#  (\w+): ", text, flags=re.MULTILINE)
    assert "peer_uids" in named and "disk_admission" in named
    assert [name for name in named if name not in FIELDS and name != "md"] == []


def test_a_change_of_settings_replaces_the_pods() -> None:
    sums = {
        render(settings={"log_level": level})["DaemonSet"]["spec"]["template"]["metadata"]["annotations"][
            "checksum/settings"
        ]
        for level in ("info", "debug")
    }
    assert len(sums) == 2


# ---- paths, ports, probes


@EACH
def test_directories_of_the_settings_are_mounted_and_can_be_written(
    values: dict[str, Any], tmp_path: Path
) -> None:
    loaded, daemon_set = settings(tmp_path, **values), render(**values)["DaemonSet"]
    mounts = {
        each["mountPath"]: each["name"]
        for each in manager_of(daemon_set)["volumeMounts"]
        if not each.get("readOnly")
    }
    volumes = {each["name"]: each for each in pod_of(daemon_set)["volumes"]}
    assert set(mounts.values()) <= set(volumes)
    assert loaded.manager == os.path.join(loaded.runtime_dir, SOCKET_NAME), "the name that commands look for"
    socket = volumes[mounts[loaded.runtime_dir]]["hostPath"]
    assert socket["path"] == loaded.runtime_dir, "an engine finds it at the same path"
    assert (loaded.disk_dir in mounts) == loaded.disk_on == ("disk" in volumes)


@EACH
def test_probes_ask_for_pages_that_there_are(values: dict[str, Any], tmp_path: Path) -> None:
    loaded, manager = settings(tmp_path, **values), manager_of(render(**values)["DaemonSet"])
    port = manager["ports"][0]
    assert loaded.metrics and port["containerPort"] == loaded.metrics_port
    asked = {name: manager[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {each["port"] for each in asked.values()} == {port["name"]}
    assert [each["path"] for each in asked.values()] == [LIVE_PATH, LIVE_PATH, READY_PATH]


def test_ports_are_those_of_the_manager() -> None:
    resources = render(**ALL)
    assert yaml.safe_load((CHART / "values.yaml").read_text())["metrics"]["port"] == Settings().metrics_port
    service, monitor, policy = (
        resources[kind]["spec"] for kind in ("Service", "ServiceMonitor", "NetworkPolicy")
    )
    name = manager_of(resources["DaemonSet"])["ports"][0]["name"]
    assert service["ports"][0]["port"] == 7000 and service["ports"][0]["targetPort"] == name
    assert monitor["endpoints"][0]["port"] == service["ports"][0]["name"]
    assert policy["ingress"][0]["ports"][0]["port"] == name
    assert service["publishNotReadyAddresses"], "a manager that is not ready is still scraped"


@EACH
def test_selectors_find_the_pods(values: dict[str, Any]) -> None:
    resources = render(**values)
    labels = resources["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    selectors = [resources["DaemonSet"]["spec"]["selector"]["matchLabels"]]
    if "Service" in resources:
        selectors += [resources["Service"]["spec"]["selector"]]
    if "NetworkPolicy" in resources:
        selectors += [resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    if "ServiceMonitor" in resources:
        wanted = resources["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= resources["Service"]["metadata"]["labels"].items()
    for selector in selectors:
        assert selector and selector.items() <= labels.items()


# ---- the end, memory


@pytest.mark.parametrize("namespaces", [1, 2, 64])
def test_the_grace_period_is_longer_than_a_stop_can_take(namespaces: int) -> None:
    """Other nodes are sent away, and the tiers of all namespaces are closed within one bound."""
    drain_s = math.ceil(CLOSE_S_MAX + node_door.END_S + peer_server.END_S)
    assert pod_of(render(namespaces=namespaces)["DaemonSet"])["terminationGracePeriodSeconds"] > drain_s
    assert f"at most {drain_s:.0f} s" in notes(namespaces=namespaces)
    longer = render(namespaces=namespaces, terminationGracePeriodSeconds=int(drain_s) + 1)
    assert pod_of(longer["DaemonSet"])["terminationGracePeriodSeconds"] == drain_s + 1
    with pytest.raises(helm.HelmError, match="terminationGracePeriodSeconds="):
        render(namespaces=namespaces, terminationGracePeriodSeconds=int(drain_s))


def test_two_managers_never_meet_on_a_node() -> None:
    rolling = render()["DaemonSet"]["spec"]["updateStrategy"]["rollingUpdate"]
    assert (rolling["maxSurge"], rolling["maxUnavailable"]) == (0, 1)


@EACH
def test_the_memory_holds_all_blocks_and_for_a_while_those_of_a_manager_that_crashed(
    values: dict[str, Any], tmp_path: Path
) -> None:
    loaded = settings(tmp_path, **values)
    resources = manager_of(render(**values)["DaemonSet"])["resources"]
    assert "cpu" not in resources["limits"]
    asked, limit = (
        int(resources[kind]["memory"].removesuffix("M")) * 10**6 for kind in ("requests", "limits")
    )
    held = loaded.host_bytes or loaded.staging_bytes
    assert held + GB <= asked <= held + 1.2 * GB
    assert 2 * held + GB <= limit <= 2 * held + 1.4 * GB


def test_memory_can_be_named() -> None:
    resources = {"memory": "32Gi", "memoryLimit": "64Gi"}
    found = manager_of(render(resources=resources)["DaemonSet"])["resources"]
    assert (found["requests"]["memory"], found["limits"]["memory"]) == ("32Gi", "64Gi")


def test_a_claim_of_the_pods_own_has_room_for_the_disk() -> None:
    claim = pod_of(render(**DISK_ALONE)["DaemonSet"])["volumes"][-1]["ephemeral"]["volumeClaimTemplate"][
        "spec"
    ]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("120G", "local")


# ---- security


@EACH
def test_it_runs_with_no_privilege(values: dict[str, Any]) -> None:
    resources = render(**values)
    pod = pod_of(resources["DaemonSet"])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"] and "privileged" not in context
    assert "add" not in manager_of(resources["DaemonSet"])["securityContext"]["capabilities"]


def test_only_the_init_container_is_root_and_it_only_gives_directories_away(tmp_path: Path) -> None:
    values = {"disk": {"sizeGB": 10}, "runAsUser": 1234, "runAsGroup": 99}
    pod, loaded = pod_of(render(**values)["DaemonSet"]), settings(tmp_path, **values)
    (init,) = pod["initContainers"]
    assert init["command"] == ["chown", "1234:99", loaded.runtime_dir, loaded.disk_dir]
    assert init["securityContext"]["capabilities"]["add"] == ["CHOWN"]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (1234, 99)
    assert "initContainers" not in pod_of(render(**LEAST)["DaemonSet"])
    assert pod_of(render(**CLAIM)["DaemonSet"])["initContainers"][0]["command"][2:] == [loaded.runtime_dir]


def test_secrets_are_named_and_never_written_out() -> None:
    manager = manager_of(render(**ALL)["DaemonSet"])
    assert manager["envFrom"] == [{"secretRef": {"name": "store-credentials"}}]
    assert "Secret" not in render(**ALL)


def test_by_default_nobody_gets_in_but_to_the_metrics_and_it_gets_out_nowhere() -> None:
    policy = render()["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and policy["egress"] == []
    assert [each["ports"] for each in policy["ingress"]] == [[{"protocol": "TCP", "port": "metrics"}]]


# ---- what is refused


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"hostMemory": 20}, "hostMemory"),
        ({"disk": {"size": 1}}, "size"),
        ({"disk": {"type": "nfs"}}, "type"),
        ({"namespaces": 0}, "namespaces"),
        ({"runAsUser": 0}, "runAsUser"),
        ({"socket": {"hostPath": "run/kvbm"}}, "hostPath"),
        ({"settings": {"Bad Name": 1}}, "Bad Name"),
        ({"hostMemoryGB": 0}, "a manager needs a tier"),
        ({"disk": {"sizeGB": 1, "type": "existingClaim"}}, "name a claim"),
        (
            {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
            "needs metrics.service",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(line)):
        render(**values)


def test_the_versions_and_the_user_are_those_of_the_image() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    dockerfile = (MANIFESTS / "Dockerfile").read_text()
    assert f"\nUSER {values['runAsUser']}:{values['runAsGroup']}\n" in dockerfile
    assert f"{values['image']['repository']}:{chart['appVersion']}" in dockerfile
