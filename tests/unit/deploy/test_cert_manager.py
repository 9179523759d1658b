"""cert-manager's manifests: of the form that it takes, and what it makes of them names a fleet's nodes to managers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli.doctor_fleet import shown_to_itself
from kvbm.fleet.named import certificates
from kvbm.fleet.tls import lending_context, reading_context
from kvbm.settings import Settings
from rigs.certificates import make_node
from rigs.checkout import ROOT
from rigs.kubernetes import MANIFESTS, manifest, pod_of, render, yaml

pytestmark = pytest.mark.skipif(not MANIFESTS.exists(), reason="a source distribution has no manifests")

FILE = "cert-manager.yaml"
PAGE = ROOT / "docs" / "operating" / "kubernetes.md"
ISSUER_REF = {"name": str, "kind": str, "group": str}
FIELDS: dict[str, dict[str, Any]] = {
    "Certificate": {
        "secretName": str,
        "isCA": bool,
        "commonName": str,
        "uris": list,
        "duration": str,
        "renewBefore": str,
        "privateKey": {"algorithm": str, "size": int, "rotationPolicy": str},
        "usages": list,
        "issuerRef": ISSUER_REF,
    },
    "Issuer": {"selfSigned": {}, "ca": {"secretName": str}},
}
"""The fields of `spec` in cert-manager.io/v1, of which only these are used (cert-manager's `deploy/crds`)."""
WORDS = {
    "algorithm": {"RSA", "ECDSA", "Ed25519"},
    "rotationPolicy": {"Never", "Always"},
    "usages": {"digital signature", "cert sign", "crl sign", "server auth", "client auth"},
}
"""What those fields may say."""


def strange_fields(value: Any, known: Any, path: str) -> list[str]:
    """The fields that are not known, have another type or say another word."""
    if isinstance(known, dict):
        if not isinstance(value, dict):
            return [path]
        return [
            strange
            for name, each in value.items()
            for strange in (
                strange_fields(each, known[name], f"{path}.{name}") if name in known else [f"{path}.{name}"]
            )
        ]
    words = WORDS.get(path.rpartition(".")[2])
    said = set(value) if isinstance(value, list) else {value}
    strange = type(value) is not known or (words is not None and not said <= words)
    if known is str and path.endswith(("duration", "renewBefore")):
        strange = strange or not re.fullmatch(r"\d+h", value)
    return [path] if strange else []


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """Name → specification."""
    return {each["metadata"]["name"]: each["spec"] for each in manifest(FILE) if each["kind"] == kind}


def nodes() -> dict[str, dict[str, Any]]:
    """The certificates of nodes: name → specification."""
    return {name: spec for name, spec in of_kind("Certificate").items() if not spec.get("isCA")}


def test_every_field_is_one_of_cert_managers() -> None:
    for each in manifest(FILE):
        assert (each["apiVersion"], set(each["metadata"])) == ("cert-manager.io/v1", {"name"})
        assert strange_fields(each["spec"], FIELDS[each["kind"]], each["kind"]) == []
    assert all({"issuerRef", "secretName"} <= set(spec) for spec in of_kind("Certificate").values())


@pytest.mark.parametrize(
    "change",
    [
        {"uri": ["kvbm://f/n"]},
        {"duration": 8760},
        {"duration": "1y"},
        {"usages": ["server"]},
        {"privateKey": {"algorithm": "EC"}},
        {"privateKey": "ECDSA"},
    ],
)
def test_a_field_of_another_form_is_noticed(change: dict[str, Any]) -> None:
    (spec, *_) = nodes().values()
    assert len(strange_fields({**spec, **change}, FIELDS["Certificate"], "Certificate")) == 1


def test_one_authority_signs_all_nodes_and_its_issuer_is_there() -> None:
    issuers, made = of_kind("Issuer"), of_kind("Certificate")
    ((authority, spec),) = ((name, spec) for name, spec in made.items() if spec.get("isCA"))
    assert issuers[spec["issuerRef"]["name"]] == {"selfSigned": {}}
    assert len(spec["commonName"]) <= 64, "an X.509 bound"
    for node in nodes().values():
        assert issuers[node["issuerRef"]["name"]] == {"ca": {"secretName": made[authority]["secretName"]}}
    assert len({spec["secretName"] for spec in made.values()}) == len(made)


def values_of_the_page() -> dict[str, Any]:
    """The chart's values under the page's heading of cert-manager."""
    part = PAGE.read_text().partition("\n### Certificates of cert-manager\n")[2]
    (text, *_) = re.findall(r"```yaml\n(.*?)```", part, flags=re.DOTALL)
    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    return values


def test_managers_find_their_certificates_among_what_the_chart_mounts(tmp_path: Path) -> None:
    """Secrets are filled as cert-manager does it, and mounted as kubelet does it."""
    values = values_of_the_page()
    fleet = values["fleet"]["name"]
    secrets = {}
    for name, spec in nodes().items():
        days = int(spec["duration"].removesuffix("h")) / 24
        files = make_node(tmp_path / "issued", name, days, fleet, uris=tuple(spec["uris"]))
        contents = (path.read_bytes() for path in files)
        secrets[spec["secretName"]] = dict(zip(("ca.crt", "tls.crt", "tls.key"), contents, strict=True))
    pod = pod_of(render(**values)["DaemonSet"])
    (volume,) = (each for each in pod["volumes"] if each["name"] == "certs")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for source in (each["secret"] for each in volume["projected"]["sources"]):
        for item in source["items"]:
            assert not (mounted / item["path"]).exists(), "kubelet takes each path once"
            (mounted / item["path"]).write_bytes(secrets[source["name"]][item["key"]])
    assert len(secrets) == 2
    for node in ("worker-1", "worker-2"):
        here = certificates(Settings(fleet=fleet, fleet_node=node, fleet_certs=str(mounted)))
        assert here is not None
        assert shown_to_itself(lending_context(here), reading_context(here), fleet)[0] == node
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "certs")
    assert (mount["mountPath"], mount["readOnly"]) == (values["settings"]["fleet_certs"], True)
