"""Every status that an error is answered with, and what it means: the listener, the checks and OpenAPI share them."""

from __future__ import annotations

TROUBLES = {
    400: "The query, the body or a header cannot be used",
    401: "The token is missing or wrong",
    403: "The request came by another name of this machine, or from another site's page",
    404: "There is no such path, namespace, tier, model or request",
    405: "Another method is needed",
    408: "The body did not come in time",
    409: "The manager refused, the prompt is shorter than a block, or what is named does not go together",
    411: "The body's length is missing",
    413: "The body is too long",
    414: "The address is too long",
    415: "The body is no JSON",
    429: "Too many calls; wait a second",
    431: "The headers are too long, or too many",
    500: "A defect of KVBM; the log has it",
    503: "The manager does not answer",
    505: "Another version of HTTP is needed: 1.1 or 1.0",
}
"""What each status of an error means. No other is given."""


class Denied(Exception):
    """A request that is answered with an error: its status, one of `TROUBLES`, and one line."""

    def __init__(self, status: int, text: str) -> None:
        assert status in TROUBLES, status
        super().__init__(text)
        self.status = status
