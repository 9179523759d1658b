"""Certificates of a fleet's nodes, made at any time of day; the page's own commands (openssl) are tested elsewhere."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest

from kvbm.fleet.tls import SCHEME, TlsFiles, node_files

AUTHORITY_DAYS = 3650
_EARLIER = datetime.timedelta(minutes=10)
"""Certificates begin so long before they are made, as clocks differ."""


def make_node(
    directory: Path,
    node: str,
    days: float,
    fleet: str,
    now_s: float | None = None,
    uris: tuple[str, ...] | None = None,
    authority_days: float = AUTHORITY_DAYS,
) -> TlsFiles:
    """Write the certificate and the key of a node, and before that the authority where there is none.

    `now_s` is the time of day at which they are made, s; `uris` are the names in the certificate, if not the node's.
    Files that are there are replaced. Skips the test without `cryptography`.
    """
    pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    now = datetime.datetime.fromtimestamp(time.time() if now_s is None else now_s, datetime.timezone.utc)
    files = node_files(directory, node)
    authority_key = directory / "ca.key"
    directory.mkdir(parents=True, exist_ok=True)
    if not files.authority.exists():
        key = _new_key(authority_key)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"fleet {fleet}")])
        authority = _builder(name, name, key, key, now, authority_days).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        _sign(authority, key, files.authority)
    signer: Any = serialization.load_pem_private_key(authority_key.read_bytes(), None)
    issuer = x509.load_pem_x509_certificate(files.authority.read_bytes()).subject
    names = (f"{SCHEME}://{fleet}/{node}",) if uris is None else uris
    certificate = _builder(x509.Name([]), issuer, _new_key(files.key), signer, now, days).add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in names]), critical=True
    )
    _sign(certificate, signer, files.certificate)
    return files


def _new_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def _builder(subject: Any, issuer: Any, key: Any, signer: Any, now: datetime.datetime, days: float) -> Any:
    from cryptography import x509

    public, signers = key.public_key(), signer.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signers), critical=False)
    )


def _sign(certificate: Any, key: Any, path: Path) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    path.write_bytes(certificate.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
