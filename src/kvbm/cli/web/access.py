"""Who may ask: the token, and the requests that a page of another site makes in its reader's name.

A page in the same browser can send requests to this machine. It cannot read the answers, unless a name server makes its
own name point here (DNS rebinding): the `Host` would be that name. And it cannot send the cookie from another site, but
could from another port of this machine: `Origin` names it.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qsl

from kvbm.settings.parse import LOOPBACK

BEARER = "Bearer "


class Denied(Exception):
    """A request that is answered with an error: its status, and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_host(host: str | None) -> None:
    """Raises Denied (403) unless the caller calls this machine by a name of its own. Any port: a tunnel has another."""
    name = (host or "").strip()
    if not name.endswith("]"):
        bare, colon, port = name.rpartition(":")
        if colon and port.isascii() and port.isdigit():
            name = bare
    if name.lower() not in LOOPBACK:
        raise Denied(403, f"Host must be one of {', '.join(LOOPBACK)}, with any port")


def check_origin(origin: str | None, host: str | None, needed: bool) -> None:
    """Raises Denied (403) for a change that a page of another origin asks for. A browser always names the origin, so
    a request with a cookie needs it."""
    if origin is None and not needed:
        return
    if origin is None or host is None or origin.lower() != f"http://{host.strip().lower()}":
        raise Denied(403, "Origin must be this page's own")


class Token:
    """What a caller must know; or nobody must know anything, where the kernel lets only ourselves connect."""

    def __init__(self, secret: str, cookie_name: str) -> None:
        """An empty secret: every caller is let in."""
        self._secret = secret.encode()
        self.cookie_name = cookie_name
        # A browser sends cookies to every port of a machine: this one must not be the token, which opens every manager
        # of this user, and opens the page at this port alone. It outlives a restart, as the page's reader does.
        self._session = hmac.new(self._secret, cookie_name.encode(), "sha256").hexdigest()

    def in_header(self, authorization: str | None) -> bool:
        """Whether the `Authorization` header has it."""
        if not self._secret:
            return True
        text = authorization or ""
        return text[: len(BEARER)].lower() == BEARER.lower() and self._is(text[len(BEARER) :].strip())

    def in_cookie(self, cookies: str | None) -> bool:
        """Whether the page's cookie is there. Those of other programs may be of any form."""
        for pair in (cookies or "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.cookie_name and self._secret:
                return _same(value, self._session.encode())
        return False

    def in_query(self, query: str) -> bool:
        """Whether `?token=` has it."""
        try:
            found = dict(parse_qsl(query, max_num_fields=8))
        except ValueError:
            return False
        return "token" in found and self._is(found["token"])

    def cookie(self) -> str:
        """The cookie of a browser that has shown the token, out of reach of scripts and of other sites."""
        return f"{self.cookie_name}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def _is(self, text: str) -> bool:
        return bool(self._secret) and _same(text, self._secret)


def _same(text: str, secret: bytes) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(text.encode("utf-8", "replace"), secret)
