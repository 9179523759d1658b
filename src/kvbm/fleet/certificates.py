"""A fleet's own authority, and the certificates of its nodes, as files in one directory.

`ca.pem` and `ca.key` are the authority; every node needs `ca.pem`, its own certificate and its own key, and nobody but
the operator needs `ca.key`. Needs `cryptography`, which is imported when a certificate is made.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.errors import SettingsError
from kvbm.fleet.directory import refuse_name
from kvbm.fleet.tls import SCHEME, Identity, TlsFiles

if TYPE_CHECKING:
    from cryptography import x509

AUTHORITY_DAYS = 3650
DAYS_MAX = 3650
_EARLIER = datetime.timedelta(minutes=10)
"""Clocks differ: a certificate is good from a little before it was made."""


def node_files(directory: Path, node: str) -> TlsFiles:
    """Where the files of a node are."""
    return TlsFiles(directory / "ca.pem", directory / f"{node}.pem", directory / f"{node}.key")


def make_node(
    directory: Path,
    node: str,
    days: int,
    fleet: str | None = None,
    renew: bool = False,
    now_s: float | None = None,
) -> tuple[TlsFiles, Identity, bool]:
    """Write a certificate and a key for a node, and before that the authority where there is none.

    Whether the authority is new is the last of the result. `fleet` names a new authority, "kvbm" if None; one that
    is there has its name. With `renew` a node's certificate is replaced, else one that is there is refused. Raises
    SettingsError.
    """
    _need_cryptography()
    refuse_name("--node", node)
    if node == "ca":
        raise SettingsError("--node", node, "another name: these files are the authority's")
    if fleet is not None:
        refuse_name("--fleet", fleet)
    if not 0 < days <= DAYS_MAX:
        raise SettingsError("--days", days, f"1 to {DAYS_MAX}")
    now = _now(now_s)
    files = node_files(directory, node)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = [path for path in (files.certificate, files.key) if path.exists()]
        if present and not renew:
            raise SettingsError("--node", node, f"{present[0]} exists; --renew replaces it")
        authority, key, is_new = _authority(directory, fleet, now)
        identity = Identity(_fleet_of(authority), node)
        if fleet is not None and identity.fleet != fleet:
            raise SettingsError(
                "--fleet", fleet, f"the authority in {directory} is that of {identity.fleet!r}"
            )
        _write_node(files, identity, authority, key, days, now)
    except OSError as error:
        raise SettingsError("DIR", str(directory), f"a directory that can be written to ({error})") from None
    return files, identity, is_new


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        accepted = "the package cryptography is needed: pip install 'openkvbm[fleet]'"
        raise SettingsError("fleet cert", "", accepted) from None


def _now(now_s: float | None) -> datetime.datetime:
    utc = datetime.timezone.utc
    now = datetime.datetime.now(utc) if now_s is None else datetime.datetime.fromtimestamp(now_s, utc)
    return now.replace(microsecond=0)


def _authority(
    directory: Path, fleet: str | None, now: datetime.datetime
) -> tuple[x509.Certificate, Any, bool]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
    there = [path for path in (certificate_path, key_path) if path.exists()]
    if not there:
        return *_new_authority(certificate_path, key_path, fleet or "kvbm", now), True
    if len(there) == 1:
        accepted = f"{there[0].name} is there without the other half of the authority; it is not overwritten"
        raise SettingsError("DIR", str(directory), accepted)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (ValueError, TypeError):  # whatever the library says may quote the key
        raise SettingsError("DIR", str(directory), "its ca.pem or ca.key cannot be read as PEM") from None
    if key.public_key() != certificate.public_key():
        raise SettingsError("DIR", str(directory), "its ca.key is not the key of its ca.pem")
    if certificate.not_valid_after_utc <= now:
        raise SettingsError(
            "DIR", str(directory), f"its authority has expired ({certificate.not_valid_after_utc})"
        )
    return certificate, key, False


def _new_authority(
    certificate_path: Path, key_path: Path, fleet: str, now: datetime.datetime
) -> tuple[x509.Certificate, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"KVBM fleet {fleet}", fleet)
    public = key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.SubjectAlternativeName([_uri(f"{SCHEME}://{fleet}/")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_path, _pem_of_key(key), 0o600, replace=False)
    _write(certificate_path, _pem_of(certificate), 0o644, replace=False)
    return certificate, key


def _write_node(
    files: TlsFiles,
    identity: Identity,
    authority: x509.Certificate,
    authority_key: Any,
    days: int,
    now: datetime.datetime,
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    until = min(now + datetime.timedelta(days=days), authority.not_valid_after_utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_named(identity.node, identity.fleet))
        .issuer_name(authority.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(x509.SubjectAlternativeName([_uri(identity.uri)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    _write(files.key, _pem_of_key(key), 0o600, replace=True)
    _write(files.certificate, _pem_of(certificate), 0o644, replace=True)


def _fleet_of(authority: x509.Certificate) -> str:
    from cryptography import x509

    try:
        names = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    for uri in uris:
        scheme, _, rest = uri.partition("://")
        if scheme == SCHEME:
            return rest.rstrip("/")
    raise SettingsError("DIR", "ca.pem", "an authority that `kvbm fleet cert` made; this one names no fleet")


def _named(common: str, organization: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    pairs = ((NameOID.ORGANIZATION_NAME, organization), (NameOID.COMMON_NAME, common[:64]))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in pairs])


def _uri(text: str) -> x509.UniformResourceIdentifier:
    from cryptography import x509

    return x509.UniformResourceIdentifier(text)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _pem_of_key(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _write(path: Path, data: bytes, mode: int, replace: bool) -> None:
    """A file with this mode from its first byte on; never half of one. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
        if replace:
            os.replace(beside, path)
        else:
            os.link(beside, path)  # fails where there is one
    finally:
        beside.unlink(missing_ok=True)
