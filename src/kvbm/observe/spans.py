"""Spans as they are handed over: plain values, which cost their maker little and need no other package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

Attributes = Mapping[str, str | int | float | bool]


class Span(NamedTuple):
    """Something that took from `start_ns` to `end_ns` on the system's clock, and its parts.

    `fault` says in one line what went wrong; empty where nothing did.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    parts: tuple[Span, ...] = ()
    fault: str = ""


class SpanSink(Protocol):
    """Takes spans away."""

    def put(self, make: Callable[[], Span], parent: Mapping[str, str]) -> None:
        """Take a span with its parts; `parent` is the trace context of what it belongs to, as HTTP headers have it.

        `make` is called later, in another thread. Returns at once and never fails: where spans come faster than they
        leave, some are lost, and counted.
        """
