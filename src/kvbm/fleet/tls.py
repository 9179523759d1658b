"""TLS between the nodes of a fleet: both ends show a certificate of the fleet's own authority, TLS 1.3 only.

Addresses say nothing about who is there, so no host name is compared. A certificate names fleet and node instead, in a
URI of its own kind: `kvbm://FLEET/NODE`.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.errors import KvbmError, SettingsError
from kvbm.settings import variable

SCHEME = "kvbm"
CERTIFICATES_PAGE = "docs/operating/fleet.md#certificates"
"""The commands that make an authority and the certificates of nodes."""
WARN_S = 30 * 86400.0
"""A certificate that ends sooner has a line at each start."""
AUTHORITY = "ca"
"""The stem of the authority's files: no node has this name."""


class TlsFiles(NamedTuple):
    """The authority's certificate, a node's, and its key: files in PEM."""

    authority: Path
    certificate: Path
    key: Path


def node_files(directory: Path, node: str) -> TlsFiles:
    """The files of a node in the directory that `fleet_certs` names."""
    return TlsFiles(directory / f"{AUTHORITY}.pem", directory / f"{node}.pem", directory / f"{node}.key")


class Identity(NamedTuple):
    """The fleet and the node that a certificate names."""

    fleet: str
    node: str


class UnknownCertificate(KvbmError):
    """A certificate of the right authority that is of another fleet, or of no node."""


def lending_context(files: TlsFiles) -> ssl.SSLContext:
    """For the end that listens: who connects must show a certificate. Raises SettingsError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # each connection is verified anew
    return context


def reading_context(files: TlsFiles) -> ssl.SSLContext:
    """For the end that connects. Raises SettingsError."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    context.check_hostname = False  # see `certified`
    assert context.verify_mode is ssl.CERT_REQUIRED
    return context


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    field = variable("fleet_certs")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cafile=files.authority)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(field, str(files.authority), _accepted(error)) from None
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(field, f"{files.certificate}, {files.key}", _accepted(error)) from None
    return context


def ending(files: TlsFiles, now_s: float) -> str:
    """A line where the node's certificate or the authority's ends within 30 days of `now_s` (seconds since 1970), or
    has; else nothing.

    Nothing too without `cryptography`, or with a file that a context refuses.
    """
    try:
        from cryptography import x509
    except ImportError:
        return ""
    try:
        # The first certificate in a node's file is its own; those of intermediate authorities may follow.
        own = x509.load_pem_x509_certificate(files.certificate.read_bytes()).not_valid_after_utc
        authorities = x509.load_pem_x509_certificates(files.authority.read_bytes())
    except (OSError, ValueError):
        return ""
    # Of several authorities the last one to end counts: one takes over from another.
    last = max(each.not_valid_after_utc for each in authorities)
    for path, ends in ((files.certificate, own), (files.authority, last)):
        left_s = ends.timestamp() - now_s
        if left_s <= WARN_S:
            when = f"ended on {ends:%Y-%m-%d}" if left_s <= 0 else f"ends on {ends:%Y-%m-%d}"
            return f"the certificate {path} {when}: renew it ({CERTIFICATES_PAGE}), and start this again"
    return ""


def _accepted(error: Exception) -> str:
    return f"the PEM files of {CERTIFICATES_PAGE} are expected ({error})"


def certified(connection: socket.socket, fleet: str) -> Identity:
    """Who is at the other end of a TLS connection, by its certificate. Raises UnknownCertificate."""
    assert isinstance(connection, ssl.SSLSocket)
    certificate = connection.getpeercert() or {}
    alternatives: Any = certificate.get("subjectAltName", ())
    names = [str(value) for kind, value in alternatives if kind == "URI"]
    for name in names:
        scheme, _, rest = name.partition("://")
        named_fleet, slash, node = rest.partition("/")
        if scheme == SCHEME and slash and node:
            if named_fleet != fleet:
                raise UnknownCertificate(
                    f"its certificate is of the fleet {named_fleet!r}; ours is {fleet!r}"
                )
            return Identity(named_fleet, node)
    raise UnknownCertificate(
        f"its certificate names no node of a fleet by a URI {SCHEME}://FLEET/NODE ({CERTIFICATES_PAGE})"
    )
