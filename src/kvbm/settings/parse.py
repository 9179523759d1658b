"""Parses texts: switches, sizes, counts, ports, paths and the log filter.

Every function takes the name of the field as the user wrote it (an environment variable, a flag, a key of the settings
file), for its error. Numbers are plain ASCII decimals; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from decimal import Decimal

from kvbm.errors import SettingsError
from kvbm.settings.store_urls import HIDDEN, without_credentials

GB = 1_000_000_000
"""Bytes in one GB; the `…_GB` variables and `GB` on the command line both mean this."""

BYTES_MAX = 2**63 - 1
USER_ID_MAX = 2**32 - 2
USER_IDS_MAX = 64
TEXT_CHARACTERS_MAX = 64
SOCKET_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket on Linux: `sun_path` is 108 bytes with its closing zero."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine that no name server is asked for, as they stand in an address of the web."""

TRUE_WORDS = ("1", "true", "on", "yes")
FALSE_WORDS = ("0", "false", "off", "no")
LOG_LEVELS = ("trace", "debug", "info", "warn", "error", "off")

UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

_DECIMAL = re.compile(r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SIZE = re.compile(r"(\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*([A-Za-z]*)")
_WHOLE = re.compile(r"\+?[0-9]+")
_TCP = re.compile(r"(?:([A-Za-z0-9_.-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})")
_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(?:\.|$))+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGITS = re.compile(r"[0-9]+")

_SIZE_FORMS = "a size such as 4GB, 512MB, 1.5GiB or 4096 (bytes)"


def reject(field: str, value: object, accepted: str) -> SettingsError:
    """The error for a value that cannot be used. A very long value is cut, so that the line stays readable."""
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        value = value[: TEXT_CHARACTERS_MAX - 1] + "…"
    return SettingsError(field, value, accepted)


def parse_bool(field: str, text: str) -> bool:
    """`1 true on yes` or `0 false off no`, trimmed, any case. Anything else is a `SettingsError`."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise reject(field, text, f"write one of {' '.join(TRUE_WORDS)} or one of {' '.join(FALSE_WORDS)}")


def is_truthy(text: str | None) -> bool:
    """Whether this is one of the words for on. Anything else is off, as in the original's function of this name."""
    return (text or "").strip().lower() in TRUE_WORDS


def parse_gb(field: str, text: str) -> int:
    """Bytes from a decimal number of GB (1e9 bytes), as the `…_GB` variables hold it. 0 switches off."""
    accepted = "a number of GB, 0 or more, such as 4 or 0.5"
    number = text.strip()
    if len(number) > TEXT_CHARACTERS_MAX or not _DECIMAL.fullmatch(number):
        raise reject(field, text, accepted)
    return _whole_bytes(field, text, Decimal(number) * GB, accepted)


def parse_size(field: str, text: str) -> int:
    """Bytes from a size with a unit (`4GB`, `512MB`, `1GiB`) or without one (`4096`). 0 switches off."""
    size = text.strip()
    match = _SIZE.fullmatch(size) if len(size) <= TEXT_CHARACTERS_MAX else None
    if match is None or match[2].lower() not in UNITS:
        raise reject(field, text, _SIZE_FORMS)
    scale = UNITS[match[2].lower()]
    count = Decimal(match[1])
    if scale == 1 and count != count.to_integral_value():
        raise reject(field, text, "a whole number of bytes")
    return _whole_bytes(field, text, count * scale, _SIZE_FORMS)


def _whole_bytes(field: str, text: str, count: Decimal, accepted: str) -> int:
    # The bound comes before int(): a few characters of exponent must not become gigabytes of digits.
    if count > BYTES_MAX:
        raise reject(field, text, f"at most {BYTES_MAX} bytes")
    whole = int(count)
    if whole == 0 and count > 0:
        raise reject(field, text, f"{accepted}; this is less than one byte")
    return whole


def parse_count(field: str, text: str, minimum: int, maximum: int, what: str = "a whole number") -> int:
    """A whole number from `minimum` to `maximum`."""
    accepted = f"{what} from {minimum} to {maximum}"
    digits = text.strip()
    if len(digits) > TEXT_CHARACTERS_MAX or not _WHOLE.fullmatch(digits):
        raise reject(field, text, accepted)
    count = int(digits)
    if not minimum <= count <= maximum:
        raise reject(field, text, accepted)
    return count


def parse_part(field: str, text: str) -> float:
    """A part of something: a decimal number from 0 to 1."""
    number = text.strip()
    if len(number) > TEXT_CHARACTERS_MAX or not _DECIMAL.fullmatch(number) or Decimal(number) > 1:
        raise reject(field, text, "a number from 0 to 1, such as 0.5")
    return float(number)


def parse_choice(field: str, text: str, choices: Sequence[str]) -> str:
    """One of `choices`, trimmed, any case."""
    word = text.strip().lower()
    if word not in choices:
        raise reject(field, text, f"write one of {' '.join(choices)}")
    return word


def parse_text(field: str, text: str) -> str:
    """A name or address: trimmed, one line, no zero byte."""
    word = text.strip()
    if not word or not word.isprintable():
        raise reject(field, text, "a printable text on one line")
    return word


def parse_path(field: str, text: str) -> str:
    """A path of the file system, kept as written."""
    if "\0" in text or not text.strip():
        raise reject(field, text, "a path")
    return text


def parse_socket_path(field: str, text: str) -> str:
    """The path of a Unix socket, short enough for the kernel."""
    path = parse_path(field, text)
    if len(path.encode("utf-8", "surrogateescape")) > SOCKET_PATH_BYTES_MAX:
        raise reject(field, text, f"a socket path of at most {SOCKET_PATH_BYTES_MAX} bytes")
    return path


def parse_listen_address(field: str, text: str) -> str:
    """`HOST:PORT` on the loopback interface (`127.0.0.1:6881`, `localhost:6881`, `[::1]:6881`, or the port alone), or
    `unix:PATH`. Port 0 is any free one. Other interfaces are refused: a token would cross the network in the clear."""
    word = text.strip()
    if word.startswith("unix:"):
        return "unix:" + parse_socket_path(field, word.removeprefix("unix:"))
    host, colon, port = word.rpartition(":")
    host = host if colon else LOOPBACK[0]
    if host not in LOOPBACK or not (
        port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    ):
        raise reject(
            field, text, "127.0.0.1:PORT, [::1]:PORT or unix:PATH; other machines come by a tunnel (ssh -L)"
        )
    return f"{host}:{int(port)}"


def parse_endpoint(field: str, text: str) -> str:
    """An address of ZMQ at which to listen: `tcp://*:PORT` (all interfaces), `tcp://ADDRESS:PORT` or `ipc://PATH`. Port
    0 is any free one."""
    word = text.strip()
    kind, _, place = word.partition("://")
    if kind == "ipc" and place:
        return "ipc://" + parse_socket_path(field, place)
    everywhere = place.startswith("*:")
    if kind != "tcp" or not _is_address("0.0.0.0" + place[1:] if everywhere else place):
        raise reject(field, text, "tcp://127.0.0.1:PORT, tcp://*:PORT (all interfaces) or ipc://PATH")
    return word


def parse_store(field: str, text: str) -> str:
    """The URL of a store, as far as its form goes: a scheme and a place."""
    word = text.strip()
    scheme, slashes, place = word.partition("://")
    if (
        not (slashes and place and scheme.isascii() and scheme.isalnum() and word.isprintable())
        or " " in word
    ):
        raise reject(
            field,
            without_credentials(text),
            "a URL such as s3://bucket/prefix, redis://host:6379/0 or file:///path",
        )
    return word


def parse_name(field: str, text: str) -> str:
    """The name of a node or a fleet."""
    word = text.strip()
    if not _NAME.fullmatch(word):
        raise reject(
            field, text, "1 to 64 of a-z, A-Z, 0-9, '-', '_' and '.', beginning with a letter or a digit"
        )
    return word


def _is_address(text: str) -> bool:
    """Whether a text is `host:port` or `[host]:port`, with a host that a name or an IP address can be."""
    match = _TCP.fullmatch(text)
    if match is None or int(match[3]) >= 1 << 16:
        return False
    host, in_brackets = match[1], match[2]
    if host is not None and not set(host) <= set("0123456789."):
        return _HOST.fullmatch(host) is not None
    try:
        ipaddress.ip_address(host or in_brackets)
    except ValueError:
        return False
    return True


def parse_address(field: str, text: str) -> str:
    """`host:port`, or `[host]:port` for IPv6."""
    word = text.strip()
    if not _is_address(word):
        raise reject(field, text, "host:port, such as 10.0.0.7:7400 or [fd00::7]:7400")
    return word


def parse_addresses(field: str, text: str) -> str:
    """Several of them, separated by commas."""
    return ",".join(parse_address(field, part) for part in text.split(","))


def parse_urls(field: str, text: str) -> str:
    """`http://host:port` or `https://host:port`, several separated by commas."""
    words = [part.strip() for part in text.split(",")]
    for word in words:
        scheme, _, place = word.partition("://")
        if scheme not in ("http", "https") or not _is_address(place.rstrip("/")):
            shown = ",".join(without_credentials(word) for word in words)
            raise reject(field, shown, "http://host:port, separated by commas")
    return ",".join(words)


def parse_secret(field: str, text: str) -> str:
    """A secret: one line; it is never printed."""
    word = text.strip()
    if not word or not word.isprintable():
        raise reject(field, HIDDEN, "a printable text on one line")
    return word


def parse_user_ids(field: str, text: str) -> tuple[int, ...]:
    """User ids as numbers, separated by commas. Names are refused: one name can be two users in two containers."""
    words = [word.strip() for word in text.split(",")]
    ids = [int(word) for word in words if len(word) <= len(str(USER_ID_MAX)) and _DIGITS.fullmatch(word)]
    if len(ids) < len(words) or len(ids) > USER_IDS_MAX or max(ids) > USER_ID_MAX:
        raise reject(
            field,
            text,
            f"at most {USER_IDS_MAX} user ids from 0 to {USER_ID_MAX}, as numbers, separated by commas",
        )
    return tuple(dict.fromkeys(ids))


def parse_log_filter(field: str, text: str) -> str:
    """The level for KVBM in Dynamo's log filter (`debug`, or `info,kvbm=debug`): one of `LOG_LEVELS`.

    A directive for `kvbm` wins over a level without target; directives for other targets are left out.
    """
    general, ours = "", ""
    for directive in filter(None, (part.strip().lower() for part in text.split(","))):
        target, equals, level = (part.strip() for part in directive.rpartition("="))
        if equals and target != "kvbm":
            continue
        level = "warn" if level == "warning" else level
        if level not in LOG_LEVELS:
            raise reject(field, text, f"a level ({' '.join(LOG_LEVELS)}), or a list such as info,kvbm=debug")
        if equals:
            ours = level
        else:
            general = level
    return ours or general or "info"
