"""Certificates of a fleet: the page's commands make them, they name fleet and node, and one that ends soon is named."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbm.cli.doctor_fleet import shown_to_itself
from kvbm.errors import SettingsError
from kvbm.fleet.named import certificates
from kvbm.fleet.tls import (
    CERTIFICATES_PAGE,
    TlsFiles,
    UnknownCertificate,
    ending,
    lending_context,
    node_files,
    reading_context,
)
from kvbm.settings import Settings
from rigs.certificates import make_node
from rigs.checkout import ROOT
from rigs.system_packages import require

PAGE = ROOT / CERTIFICATES_PAGE.partition("#")[0]


def section() -> str:
    """What the page says of certificates."""
    heading = CERTIFICATES_PAGE.partition("#")[2].capitalize()
    return PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no docs")
def test_the_pages_commands_make_certificates_and_renew_one(tmp_path: Path) -> None:
    require("openssl")
    first, each = re.findall(r"```bash\n(.*?)```", section(), flags=re.DOTALL)
    directory = tmp_path / "certificates"
    for commands, where in ((first, tmp_path), (each, directory)):
        subprocess.run(["bash", "-euc", commands], cwd=where, check=True, capture_output=True, timeout=60)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(key.stat().st_mode) for key in directory.glob("*.key")} == {0o600}
    for node in ("node-1", "node-2"):
        files = certificates(Settings(fleet="llama", fleet_node=node, fleet_certs=str(directory)))
        assert files is not None
        assert shown_to_itself(lending_context(files), reading_context(files), "llama")[0] == node
        pytest.importorskip("cryptography")
        assert ending(files, time.time() + 334 * DAY_S) == "" != ending(files, time.time() + 336 * DAY_S)
    old = node_files(directory, "node-1")
    lends = lending_context(old)
    subprocess.run(
        ["bash", "-euc", each.replace("node-1 node-2", "node-2")],
        cwd=directory,
        check=True,
        capture_output=True,
        timeout=60,
    )
    renewed = reading_context(node_files(directory, "node-2"))
    assert shown_to_itself(lends, renewed, "llama")[0] == "node-1", "old and renewed ones accept each other"


@pytest.mark.parametrize(
    "uris",
    [(), ("https://lab/a",), ("kvbm://lab",), ("kvbm://lab/",)],
    ids=["none", "another", "no node", "empty"],
)
def test_a_certificate_that_names_no_node_is_refused(tmp_path: Path, uris: tuple[str, ...]) -> None:
    files = make_node(tmp_path, "a", 30, "lab", uris=uris)
    with pytest.raises(UnknownCertificate, match=r"names no node of a fleet by a URI kvbm://FLEET/NODE"):
        shown_to_itself(lending_context(files), reading_context(files), "lab")


DAY_S = 86400.0
MADE_S = 1_800_000_000.0  # 2027-01-15


@pytest.mark.parametrize(
    ("days_later", "said"),
    [
        (0, ""),
        (334.9, ""),
        (335.1, "ends on 2028-01-15"),
        (364.9, "ends on 2028-01-15"),
        (365.1, "ended on 2028-01-15"),
    ],
)
def test_a_certificate_that_ends_soon_has_a_line_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days_later: float, said: str
) -> None:
    make_node(tmp_path, "a", 365, "lab", now_s=MADE_S)
    settings = Settings(fleet_certs=str(tmp_path), fleet_node="a")
    files = certificates(settings, lambda: MADE_S + days_later * DAY_S)
    assert files is not None
    lines = [
        f"the certificate {files.certificate} {said}: renew it ({CERTIFICATES_PAGE}), and start this again"
    ]
    assert [record.getMessage() for record in caplog.records] == (lines if said else [])


def test_an_authority_that_ends_first_has_the_line(tmp_path: Path) -> None:
    files = make_node(tmp_path, "a", 365, "lab", now_s=MADE_S, authority_days=60)
    assert ending(files, MADE_S + 29 * DAY_S) == ""
    assert ending(files, MADE_S + 31 * DAY_S).startswith(
        f"the certificate {files.authority} ends on 2027-03-16: "
    )


def test_of_a_chain_the_nodes_own_certificate_counts(tmp_path: Path) -> None:
    """cert-manager puts those of intermediate authorities behind it."""
    files = make_node(tmp_path, "a", 20, "lab", now_s=MADE_S)
    files.certificate.write_bytes(files.certificate.read_bytes() + files.authority.read_bytes())
    assert ending(files, MADE_S).startswith(f"the certificate {files.certificate} ends on 2027-02-04: ")


def test_no_node_has_the_name_of_the_authoritys_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"DYN_KVBM_FLEET_NODE='ca'.*the authority's"):
        certificates(Settings(fleet_certs=str(tmp_path), fleet_node="ca"))


def test_renewing_ends_the_line(tmp_path: Path) -> None:
    late_s = MADE_S + 364 * DAY_S
    files = make_node(tmp_path, "a", 365, "lab", now_s=MADE_S)
    assert ending(files, late_s)
    make_node(tmp_path, "a", 365, "lab", now_s=late_s)
    assert ending(files, late_s) == ""


@pytest.mark.parametrize("content", [b"", b"none", b"-----BEGIN CERTIFICATE-----\n"])
def test_who_cannot_tell_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    files = make_node(tmp_path, "a", 365, "lab", now_s=MADE_S)
    late_s = MADE_S + 400 * DAY_S
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert ending(files, late_s) == ""
    monkeypatch.undo()
    assert ending(files, late_s) != ""
    files.certificate.write_bytes(content)
    assert ending(files, late_s) == ""


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    files = make_node(tmp_path, "a", 30, "lab")
    missing = TlsFiles(tmp_path / "no.pem", files.certificate, files.key)
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_FLEET_CERTS=.*no\.pem"):
        reading_context(missing)
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_FLEET_CERTS=.*ca\.key"):
        lending_context(files._replace(key=tmp_path / "ca.key"))  # another key
