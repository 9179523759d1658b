"""`kvbm fleet cert`: one authority, certificates that name fleet and node, and nothing overwritten by accident."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbm.cli.fleet import app
from kvbm.errors import SettingsError
from kvbm.fleet.certificates import make_node
from kvbm.fleet.named import certificates
from kvbm.fleet.tls import TlsFiles, ending, lending_context, reading_context
from kvbm.settings import Settings

x509 = pytest.importorskip("cryptography.x509", reason="certificates are made with the package cryptography")


def test_the_command_makes_an_authority_once(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "certificates"
    runner = CliRunner()
    first = runner.invoke(app, ["cert", str(directory), "--node", "node-1", "--fleet", "lab", "--days", "7"])
    assert first.exit_code == 0, first.output
    assert "a new authority" in first.output
    authority = (directory / "ca.pem").read_bytes()
    second = runner.invoke(app, ["cert", str(directory), "--node", "node-2"])
    assert second.exit_code == 0, second.output
    assert "Node node-2 of the fleet lab, signed by the authority that is there" in second.output
    assert (directory / "ca.pem").read_bytes() == authority
    for key in directory.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in directory.iterdir()) == [
        *("ca.key", "ca.pem", "node-1.key", "node-1.pem", "node-2.key", "node-2.pem")
    ]
    certificate = x509.load_pem_x509_certificate((directory / "node-2.pem").read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["kvbm://lab/node-2"]


def test_nothing_is_overwritten_by_accident(tmp_path: Path) -> None:
    make_node(tmp_path, "a", 30, "lab")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SettingsError, match="--renew replaces it"):
        make_node(tmp_path, "a", 30)
    with pytest.raises(SettingsError, match="is that of 'lab'"):
        make_node(tmp_path, "b", 30, "other")
    with pytest.raises(SettingsError, match="another name"):
        make_node(tmp_path, "ca", 30)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    make_node(tmp_path, "a", 30, renew=True)
    after = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in after if after[path] != before[path]} == {"a.pem", "a.key"}


@pytest.mark.parametrize("half", ["ca.pem", "ca.key"])
def test_half_an_authority_is_left_alone(tmp_path: Path, half: str) -> None:
    (tmp_path / half).write_text("mine")
    with pytest.raises(SettingsError, match="is not overwritten"):
        make_node(tmp_path, "a", 30)
    assert [path.name for path in tmp_path.iterdir()] == [half]
    assert (tmp_path / half).read_text() == "mine"


def test_an_authority_that_cannot_be_read_is_named_without_its_key(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("none")
    (tmp_path / "ca.key").write_text("SECRET")
    with pytest.raises(SettingsError, match="cannot be read as PEM") as caught:
        make_node(tmp_path, "a", 30)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("node", "days", "fleet"),
    [("a/b", 1, None), ("", 1, None), ("a", 0, None), ("a", 1, "b c"), ("a" * 65, 1, None)],
)
def test_names_and_days_are_bounded(tmp_path: Path, node: str, days: int, fleet: str | None) -> None:
    with pytest.raises(SettingsError, match="--"):
        make_node(tmp_path / "x", node, days, fleet)
    assert not (tmp_path / "x").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SettingsError, match=r"pip install 'openkvbm\[fleet\]'"):
        make_node(tmp_path, "a", 30)


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
    make_node(tmp_path, "a", 365, now_s=MADE_S)
    settings = Settings(fleet_certs=str(tmp_path), fleet_node="a")
    files = certificates(settings, lambda: MADE_S + days_later * DAY_S)
    assert files is not None
    lines = [
        f"the certificate {files.certificate} {said}: renew it (kvbm fleet cert --renew), and start this again"
    ]
    assert [record.getMessage() for record in caplog.records] == (lines if said else [])


def test_renewing_ends_the_line(tmp_path: Path) -> None:
    late_s = MADE_S + 364 * DAY_S
    files = make_node(tmp_path, "a", 365, now_s=MADE_S)[0]
    assert ending(files, late_s)
    make_node(tmp_path, "a", 365, renew=True, now_s=late_s)
    assert ending(files, late_s) == ""


@pytest.mark.parametrize("content", [b"", b"none", b"-----BEGIN CERTIFICATE-----\n"])
def test_who_cannot_tell_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    files = make_node(tmp_path, "a", 365, now_s=MADE_S)[0]
    late_s = MADE_S + 400 * DAY_S
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert ending(files, late_s) == ""
    monkeypatch.undo()
    assert ending(files, late_s) != ""
    files.certificate.write_bytes(content)
    assert ending(files, late_s) == ""


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    files = make_node(tmp_path, "a", 30)[0]
    missing = TlsFiles(tmp_path / "no.pem", files.certificate, files.key)
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_FLEET_CERTS=.*no\.pem"):
        reading_context(missing)
    with pytest.raises(SettingsError, match=r"^DYN_KVBM_FLEET_CERTS=.*ca\.key"):
        lending_context(files._replace(key=tmp_path / "ca.key"))  # another key
