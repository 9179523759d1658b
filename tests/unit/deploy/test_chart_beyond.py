"""The Helm chart, where blocks leave the node: fleets, their certificates, stores, and the network's rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.fleet.directory import is_private, split_address
from kvbm.fleet.named import certificates
from kvbm.settings import Settings, load_settings
from kvbm.tiers.remote.sealing_keys import keys_from_file
from rigs.certificates import make_node
from rigs.checkout import ROOT
from rigs.kubernetes import CHART, VERSIONS, helm, pod_of, render, validate, yaml

pytestmark = pytest.mark.skipif(not CHART.exists(), reason="a source distribution has no chart")

FLEET = {
    "fleet": {"enabled": True, "name": "llama", "etcd": ["http://etcd.etcd:2379", "https://[fd00::1]:2379"]}
}
ADDRESSES = ("10.0.0.7", "fd00::7")
NODE = "node-7.example"


def with_fleet(**more: Any) -> dict[str, Any]:
    return {"fleet": {**FLEET["fleet"], **more}}


def manager_of(**values: Any) -> dict[str, Any]:
    (manager,) = pod_of(render(**values)["DaemonSet"])["containers"]
    return manager


def environment(manager: dict[str, Any], address: str) -> dict[str, str]:
    """The container's variables as kubelet sets them in a pod at this address: in order, each sees those before it."""
    fields = {"status.podIP": address, "spec.nodeName": NODE}
    found: dict[str, str] = {}
    for each in manager.get("env", ()):
        if "valueFrom" in each:
            found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), each["value"])
    return found


def settings(directory: Path, address: str = ADDRESSES[0], **values: Any) -> Settings:
    """What the manager in such a pod makes of file and variables; it has no remark of them."""
    path = directory / "kvbm.toml"
    path.write_text(render(**values)["ConfigMap"]["data"]["kvbm.toml"])
    loaded = load_settings(environment(manager_of(**values), address), file=path, directory=directory)
    assert not loaded.warnings
    return loaded.settings


def mounted(name: str, **values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume, and how the manager mounts it."""
    pod = pod_of(render(**values)["DaemonSet"])
    (volume,) = (each for each in pod["volumes"] if each["name"] == name)
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == name)
    return volume, mount


# ---- a fleet


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_pod_lends_at_its_own_address_in_its_nodes_name(address: str, tmp_path: Path) -> None:
    loaded = settings(tmp_path, address, **FLEET, extraEnv=[{"name": "DYN_LOG", "value": "debug"}])
    assert (loaded.fleet, loaded.fleet_node, loaded.log_level) == ("llama", NODE, "debug")
    assert loaded.fleet_etcd == "http://etcd.etcd:2379,https://[fd00::1]:2379"
    assert loaded.fleet_listen is not None and loaded.fleet_certs is None
    host, port = split_address("fleet_listen", loaded.fleet_listen)
    assert (host, port) == (address, 7400) and is_private(host)
    ports = {each["name"]: each["containerPort"] for each in manager_of(**FLEET)["ports"]}
    assert ports["fleet"] == port


def test_peers_can_be_listed(tmp_path: Path) -> None:
    loaded = settings(tmp_path, fleet={"enabled": True, "peers": ["10.0.0.8:7400", "[fd00::9]:7400"]})
    assert (loaded.fleet_peers, loaded.fleet_etcd) == ("10.0.0.8:7400,[fd00::9]:7400", None)


def test_without_a_fleet_nothing_of_it_is_there(tmp_path: Path) -> None:
    values = {"fleet": {**FLEET["fleet"], "enabled": False, "certsSecret": "certs"}}
    assert render(**values) == render()
    assert "env" not in manager_of() and settings(tmp_path).fleet is None


def test_each_node_finds_its_certificate_in_the_one_secret(tmp_path: Path) -> None:
    values = with_fleet(certsSecret="fleet-certs")
    volume, mount = mounted("fleet-certs", **values)
    assert volume["secret"]["secretName"] == "fleet-certs" and mount["readOnly"] is True
    loaded = settings(tmp_path, **values)
    assert loaded.fleet_certs == mount["mountPath"]
    for node in (NODE, "node-8.example"):
        make_node(tmp_path / "certs", node, 30, "llama")
    (tmp_path / "certs" / "ca.key").unlink()
    files = certificates(msgspec.structs.replace(loaded, fleet_certs=str(tmp_path / "certs")))
    assert files is not None and [path.name for path in files] == ["ca.pem", f"{NODE}.pem", f"{NODE}.key"]


def test_certificates_can_be_the_nodes_own_files(tmp_path: Path) -> None:
    values = {
        **FLEET,
        "settings": {"fleet_certs": "/etc/certs"},
        "extraVolumes": [{"name": "certs", "hostPath": {"path": "/etc/kvbm/fleet", "type": "Directory"}}],
        "extraVolumeMounts": [{"name": "certs", "mountPath": "/etc/certs", "readOnly": True}],
    }
    volume, mount = mounted("certs", **values)
    assert volume["hostPath"]["path"] == "/etc/kvbm/fleet"
    assert settings(tmp_path, **values).fleet_certs == mount["mountPath"]
    validate(render(**values)["DaemonSet"], VERSIONS[0])


# ---- stores


@pytest.mark.parametrize(
    ("directory", "source"),
    [
        ({"existingClaim": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
        ({"hostPath": "/mnt/nfs"}, {"hostPath": {"path": "/mnt/nfs", "type": "Directory"}}),
    ],
)
def test_a_directory_is_the_store(directory: dict[str, str], source: dict[str, Any], tmp_path: Path) -> None:
    volume, mount = mounted("remote", remote={"directory": directory})
    assert volume == {"name": "remote", **source} and not mount.get("readOnly")
    assert settings(tmp_path, remote={"directory": directory}).remote == f"file://{mount['mountPath']}"


def test_the_key_file_is_a_secrets(tmp_path: Path) -> None:
    values = {"remote": {"keys": {"secret": "keys", "file": "k.txt"}}, "settings": {"remote": "s3://bucket"}}
    volume, mount = mounted("remote-keys", **values)
    assert volume["secret"]["items"] == [{"key": "k.txt", "path": "k.txt"}] and mount["readOnly"] is True
    loaded = settings(tmp_path, **values)
    assert (loaded.remote, loaded.remote_key_file) == ("s3://bucket", f"{mount['mountPath']}/k.txt")


def test_secrets_have_a_mode_that_the_manager_accepts(tmp_path: Path) -> None:
    """kubelet adds that the pod's fsGroup may read; others may never."""
    values = {
        **with_fleet(certsSecret="c"),
        "remote": {"keys": {"secret": "keys"}, "directory": {"hostPath": "/m"}},
    }
    for name in ("fleet-certs", "remote-keys"):
        assert mounted(name, **values)[0]["secret"]["defaultMode"] == 0o400
    key = tmp_path / "key"
    key.write_text("a:" + "A" * 43 + "=")
    key.chmod(0o400)
    assert len(keys_from_file(str(key), "remote_key_file")) == 1


def test_the_init_container_leaves_what_all_nodes_share_alone() -> None:
    pod = pod_of(render(remote={"directory": {"hostPath": "/mnt/nfs"}})["DaemonSet"])
    assert {each["name"] for each in pod["initContainers"][0]["volumeMounts"]} == {"socket"}


# ---- the network


def policy(**values: Any) -> dict[str, Any]:
    found = render(**values)["NetworkPolicy"]["spec"]
    assert isinstance(found, dict)
    return found


def test_managers_of_a_fleet_reach_each_other_and_nobody_else_gets_there() -> None:
    values = with_fleet(port=7500)
    labels = render(**values)["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    found = policy(**values)
    for side, rules in (("from", found["ingress"][1:]), ("to", found["egress"][:1])):
        (rule,) = rules
        assert rule["ports"] == [{"protocol": "TCP", "port": 7500}]
        (other,) = rule[side]
        assert set(other) == {"podSelector"}, "of our own namespace alone"
        selector = other["podSelector"]["matchLabels"]
        assert selector and selector.items() <= labels.items()


NAMES = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
STORE = [{"ports": [{"port": 443}]}]


def test_who_is_let_out_may_ask_for_names() -> None:
    assert policy()["egress"] == []
    assert policy(networkPolicy={"egress": STORE})["egress"] == [{"ports": NAMES}, *STORE]
    assert policy(**FLEET)["egress"][1:] == [{"ports": NAMES}]
    dns = {"ports": [5353], "to": [{"namespaceSelector": {}}]}
    (rule,) = policy(networkPolicy={"egress": STORE, "dns": dns})["egress"][:1]
    assert [each["port"] for each in rule["ports"]] == [5353, 5353] and rule["to"] == dns["to"]
    assert policy(networkPolicy={"egress": STORE, "dns": {"enabled": False}})["egress"] == STORE


# ---- what is refused, and what the page says


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"fleet": {"enabled": True}}, "fleet.enabled needs fleet.etcd, or fleet.peers"),
        (with_fleet(peers=["10.0.0.8:7400"]), "cannot be used together"),
        (with_fleet(port=6880), "it is metrics.port"),
        (with_fleet(port=80), "port"),
        (with_fleet(name="a/b"), "name"),
        (with_fleet(etcd=["etcd:2379"]), "etcd"),
        (with_fleet(etcd=["http://user:word@etcd:2379"]), "etcd"),
        ({"fleet": {"enabled": True, "peers": ["10.0.0.8"]}}, "peers"),
        (with_fleet(certsSecret="Certs"), "certsSecret"),
        (with_fleet(listen="10.0.0.7:7400"), "listen"),
        ({"remote": {"directory": {"existingClaim": "a", "hostPath": "/b"}}}, "cannot be used together"),
        ({"remote": {"directory": {"hostPath": "mnt"}}}, "hostPath"),
        ({"remote": {"keys": {"secret": "a", "file": "../b"}}}, "file"),
        ({"remote": {"url": "s3://b"}}, "url"),
        (
            {"remote": {"directory": {"existingClaim": "a"}}, "settings": {"remote": "s3://b"}},
            "settings.remote",
        ),
        (
            {"remote": {"keys": {"secret": "a"}}, "settings": {"remote_key_file": "/k"}},
            "settings.remote_key_file",
        ),
        ({**with_fleet(certsSecret="c"), "settings": {"fleet_certs": "/c"}}, "settings.fleet_certs"),
        *(
            ({**FLEET, "settings": {name: "a"}}, f"settings.{name} cannot be used")
            for name in ("fleet", "fleet_listen", "fleet_node", "fleet_etcd", "fleet_peers")
        ),
        ({**FLEET, "extraEnv": [{"name": "POD_IP", "value": "1.2.3.4"}]}, "extraEnv POD_IP"),
        ({"extraVolumes": [{"secret": {"secretName": "a"}}]}, "name"),
        ({"extraVolumeMounts": [{"name": "a"}]}, "mountPath"),
        ({"networkPolicy": {"dns": {"ports": []}}}, "ports"),
        ({"networkPolicy": {"dns": {"port": 53}}}, "port"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(line)):
        render(**values)


def test_the_pages_examples_of_values_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operating" / "kubernetes.md").read_text()
    examples = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)]
    assert len(examples) == 4
    for values in examples:
        settings(tmp_path, **values)
        for resource in render(**values).values():
            validate(resource, VERSIONS[-1])
