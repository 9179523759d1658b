"""URLs of stores as they may be printed, whatever was written there: also where it is no URL of a store at all.

Only what is known to hold no secret is shown: scheme, host and path, and the values of known options. Where a secret
may have spoiled the form, as with an `@` where none belongs, little more than the scheme is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote, unquote_plus, urlsplit

HIDDEN = "***"

STORE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "s3": ("region", "endpoint", "profile", "virtual-host", "bulk-delete", "ca"),
    "gs": ("endpoint", "ca"),
    "az": ("account", "endpoint", "ca"),
    "file": ("fsync",),
    "redis": ("prefix",),
    "rediss": ("prefix", "ca"),
    "valkey": ("prefix",),
    "valkeys": ("prefix", "ca"),
    "mooncake": ("index", "prefix", "metadata", "protocol", "device", "segment", "host", "replicas"),
}
"""The schemes of stores, and the options of each. None of them is a secret; `index` and `endpoint` are URLs."""

_URLS = ("index", "endpoint")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PLAIN = re.compile(r"[A-Za-z0-9._/-]*(?::[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def without_credentials(url: str) -> str:
    """A URL, or what was meant to be one, with `***` in place of a user, a password, and whatever may be a secret."""
    return _shown(url, inside=False)


def _shown(url: str, inside: bool) -> str:
    scheme, slashes, _ = url.partition("://")
    if not slashes:
        return url if _PLAIN.fullmatch(url) else HIDDEN
    if not _SCHEME.fullmatch(scheme):
        return HIDDEN
    spoiled = f"{scheme}://{HIDDEN}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return spoiled
    user, _, host = parts.netloc.rpartition("@")
    # A password with a slash, a question mark or an ampersand of its own ends the host too soon.
    path = unquote(parts.path)
    if not _HOST.fullmatch(host) or "@" in parts.fragment or ("@" in path and parts.scheme != "file"):
        return spoiled
    known = STORE_OPTIONS.get(parts.scheme, ())
    options = [_option(part, known, inside) for part in parts.query.split("&") if part]
    if None in options:
        return spoiled
    where = f"{scheme}://{HIDDEN + '@' if user else ''}{host}{quote(path)}"
    return where + (f"?{'&'.join(word for word in options if word)}" if options else "")


def _option(part: str, known: tuple[str, ...], inside: bool) -> str | None:
    """One `name=value` as it may be printed; None where its form says that it may be a piece of something else."""
    name, equals, raw = part.partition("=")
    value = unquote_plus(raw)
    if not equals or name not in known:
        if "@" in unquote(part):
            return None
        return f"{name}={HIDDEN}" if equals and _NAME.fullmatch(name) else HIDDEN
    if name in _URLS:
        # A store of names has no store of names of its own.
        value = HIDDEN if inside else _shown(value, inside=True)
    elif "@" in value:
        return None
    return f"{name}={quote(value, safe='/:*@[]')}"
