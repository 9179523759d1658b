"""The Helm chart rendered by Helm's own engine, and manifests checked against the schemas of Kubernetes; no cluster."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from rigs.checkout import ROOT

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

CHART = ROOT / "deploy" / "helm" / "kvbm"
MANIFESTS = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.25", "1.29", "1.31", "1.33", "1.35")
"""Versions of Kubernetes; the chart's `kubeVersion` is the first. Schemas of later ones differ little."""
_OTHERS = {"ServiceMonitor"}
"""Kinds that are not of Kubernetes itself."""

Resource = dict[str, Any]


def render(**values: Any) -> dict[str, Resource]:
    """The resources by kind: a release `kvbm` in the namespace `kvbm`. Raises HelmError for values that it refuses."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="kvbm", namespace="kvbm")
    documents = [
        each for name, text in files.items() if name.endswith(".yaml") for each in documents_of(text)
    ]
    found = {each["kind"]: each for each in documents}
    assert len(found) == len(documents), "two resources of a kind: this rig tells them apart by kind"
    return found


def notes(**values: Any) -> str:
    """What Helm prints after an installation."""
    with helm.Chart.load(str(CHART)) as chart:
        return str(chart.render(values, name="kvbm", namespace="kvbm")["kvbm/templates/NOTES.txt"])


def documents_of(text: str) -> list[Resource]:
    """The documents of a YAML stream that are not empty."""
    return [each for each in yaml.safe_load_all(text) if each]


@functools.cache
def manifest(name: str) -> tuple[Resource, ...]:
    """The resources of a file in `deploy/kubernetes`."""
    return tuple(documents_of((MANIFESTS / name).read_text()))


def validate(resource: Resource, version: str) -> None:
    """Raises where a field does not exist in that version, is missing, or has another type."""
    if resource["kind"] not in _OTHERS:
        used = kubernetes_validate.validate(resource, version, strict=True)
        assert used.startswith(version), f"there are no schemas of {version}, only of {used}"


def pod_of(resource: Resource) -> Resource:
    """The pod's specification in a DaemonSet or a Deployment."""
    pod = resource["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def containers(pod: Resource) -> Iterator[Resource]:
    """All containers of a pod."""
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def environment(container: Resource) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
