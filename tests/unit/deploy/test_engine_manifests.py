"""vLLM on Kubernetes: the manifests are valid, and engine and manager find each other."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import typer

from kvbm.cli.manager import app
from kvbm.manager.probes import LIVE_PATH, READY_PATH
from kvbm.settings import Settings, load_settings
from kvbm.settings.parse import GB
from kvbm.settings.schema import SCHEMA
from rigs.checkout import ROOT
from rigs.kubernetes import MANIFESTS, VERSIONS, containers, environment, manifest, pod_of, render, validate

pytestmark = pytest.mark.skipif(not MANIFESTS.exists(), reason="a source distribution has no manifests")

EXAMPLE, SIDECAR = "vllm-example.yaml", "vllm-sidecar.yaml"
EACH = pytest.mark.parametrize("name", [EXAMPLE, SIDECAR])
READERS = {setting.variable: setting.reader for setting in SCHEMA}


def deployment(name: str) -> dict[str, Any]:
    (found,) = (each for each in manifest(name) if each["kind"] == "Deployment")
    return found


def engine_of(name: str) -> dict[str, Any]:
    (engine,) = pod_of(deployment(name))["containers"]
    return engine


@pytest.mark.parametrize(
    ("name", "version"),
    # Sidecar containers came with 1.29.
    [
        (name, version)
        for name in (EXAMPLE, SIDECAR)
        for version in VERSIONS
        if name == EXAMPLE or version >= "1.29"
    ],
)
def test_every_field_is_one_of_kubernetes(name: str, version: str) -> None:
    for resource in manifest(name):
        validate(resource, version)


@EACH
def test_variables_exist_and_matter_to_engines(name: str) -> None:
    ours = [variable for variable in environment(engine_of(name)) if variable.startswith("DYN_")]
    assert len(ours) == 2
    assert {READERS[variable] for variable in ours} <= {"engine", "both"}
    load_settings(environment(engine_of(name)))


@EACH
def test_selectors_find_the_engines(name: str) -> None:
    labels = deployment(name)["spec"]["template"]["metadata"]["labels"]
    for resource in manifest(name):
        selector = resource["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= labels.items()


@EACH
def test_mounts_have_volumes_and_the_engine_reaches_the_socket(name: str) -> None:
    pod = pod_of(deployment(name))
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in containers(pod):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    socket = environment(engine_of(name))["DYN_KVBM_MANAGER"]
    mounts = [mount["mountPath"] for mount in engine_of(name)["volumeMounts"]]
    assert any(os.path.commonpath([socket, path]) == path for path in mounts)


def test_the_engine_mounts_what_the_charts_manager_serves() -> None:
    daemon_set, pod = pod_of(render()["DaemonSet"]), pod_of(deployment(EXAMPLE))
    theirs = next(
        volume["hostPath"]["path"] for volume in daemon_set["volumes"] if volume["name"] == "socket"
    )
    ours = next(volume["hostPath"] for volume in pod["volumes"] if volume["name"] == "kvbm")
    assert ours == {"path": theirs, "type": "Directory"}
    toml = render()["ConfigMap"]["data"]["kvbm.toml"]
    assert f'manager = "{environment(engine_of(EXAMPLE))["DYN_KVBM_MANAGER"]}"\n' in toml
    for field in ("runAsUser", "runAsGroup", "seccompProfile"):
        assert pod["securityContext"][field] == daemon_set["securityContext"][field]
    assert pod["tolerations"] == daemon_set["tolerations"]


def test_the_sidecars_command_line_says_what_the_engine_looks_for() -> None:
    pod = pod_of(deployment(SIDECAR))
    (sidecar,) = pod["initContainers"]
    command: Any = typer.main.get_command(app)
    words = sidecar["args"]
    assert words[0] == "manager" and sidecar["restartPolicy"] == "Always"
    given = command.make_context("kvbm manager", words[1:]).params
    assert given["manager"] == environment(engine_of(SIDECAR))["DYN_KVBM_MANAGER"]
    assert given["runtime_dir"] == environment(engine_of(SIDECAR))["DYN_KVBM_RUNTIME_DIR"]
    assert given["metrics"] is True
    assert sidecar["ports"][0]["containerPort"] == Settings().metrics_port
    assert sidecar["startupProbe"]["httpGet"]["path"] == READY_PATH
    assert sidecar["livenessProbe"]["httpGet"]["path"] == LIVE_PATH
    limit_bytes = int(sidecar["resources"]["limits"]["memory"].removesuffix("G")) * GB
    assert limit_bytes >= 2 * int(given["host_bytes"].removesuffix("GB")) * GB + GB, (
        "see the chart's memoryLimit"
    )


def test_the_sidecars_pod_keeps_the_restricted_standard() -> None:
    pod = pod_of(deployment(SIDECAR))
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    assert {next(key for key in volume if key != "name") for volume in pod["volumes"]} == {"emptyDir"}
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}


@EACH
def test_the_connector_is_there_and_called_as_everywhere(name: str) -> None:
    words = engine_of(name)["args"]
    configuration = words[words.index("--kv-transfer-config") + 1]
    module = json.loads(configuration)["kv_connector_module_path"].replace(".", "/")
    assert (ROOT / "src" / f"{module}.py").exists() or (ROOT / "src" / module).is_dir()
    assert configuration in (ROOT / "docs" / "guides" / "vllm.md").read_text()
