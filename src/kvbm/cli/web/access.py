"""Who may ask: the token, and the requests that a page of another site makes in its reader's name.

A page in the same browser can send requests to this machine. It cannot read the answers, unless a name server makes its
own name point here (DNS rebinding): the `Host` would be that name. It does not know the token, and no browser adds it
by itself: there is no cookie. At a Unix socket nobody needs a token: there, a tunnel may bring such a page, and
`Origin` names it.
"""

from __future__ import annotations

import hmac

from kvbm.cli.web.troubles import Denied
from kvbm.settings.parse import LOOPBACK

BEARER = "Bearer "


def check_host(host: str | None) -> None:
    """Raises Denied (403) unless the caller calls this machine by a name of its own. Any port: a tunnel has another."""
    name = (host or "").strip()
    if not name.endswith("]"):
        bare, colon, port = name.rpartition(":")
        if colon and port.isascii() and port.isdigit():
            name = bare
    if name.lower() not in LOOPBACK:
        raise Denied(403, f"Host must be one of {', '.join(LOOPBACK)}, with any port")


def check_origin(origin: str | None, host: str | None) -> None:
    """Raises Denied (403) for a change that a page of another origin asks for. A browser names the origin of each."""
    if origin is not None and (host is None or origin.lower() != f"http://{host.strip().lower()}"):
        raise Denied(403, "Origin must be this page's own")


class Token:
    """What a caller must know; or nobody must know anything, where the kernel lets only ourselves connect."""

    def __init__(self, secret: str) -> None:
        """An empty secret: every caller is let in."""
        self._secret = secret.encode()

    def in_header(self, authorization: str | None) -> bool:
        """Whether the `Authorization` header has it. The time that this takes does not tell how much of it is right."""
        if not self._secret:
            return True
        text = authorization or ""
        shown = text[len(BEARER) :].strip().encode("utf-8", "replace")
        return text[: len(BEARER)].lower() == BEARER.lower() and hmac.compare_digest(shown, self._secret)
