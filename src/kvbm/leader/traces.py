"""What became of each request that was looked up, as spans: request → lookup, promotion, load → copy.

Nothing is decided by them. All times are the leader's, but those of a copy, which the ranks report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvbm.block import Tier, counted_as_disk
from kvbm.clock import Clock, nanoseconds, wall_offset_ns
from kvbm.leader.link import Link
from kvbm.leader.search import Search, Stage
from kvbm.leader.tracked import readable
from kvbm.observe.spans import Span, SpanSink

LOOKUPS_MAX = 8
"""A request's latest lookups that its span has as parts; those before are counted."""


class _Lookup(NamedTuple):
    """A lookup that has ended, and its load where there was one (`planned` blocks, or 0); the fields are `Search`'s."""

    asked_s: float
    answer_s: float
    answered: bool
    late: bool
    ended_s: float
    wanted: int
    found: bytes
    unloaded: dict[str, int]
    ready_at_answer: int
    expected_s: float
    ready: int
    final_s: float
    begun_s: float
    planned: int
    layerwise: bool
    arrived: int
    copied: tuple[int, int] | None
    block_bytes: int


@dataclass(slots=True)
class _Told:
    """A request that the engine has, and what happened since it began to ask."""

    headers: Mapping[str, str]
    since_s: float
    lookups: int = 0
    latest: list[_Lookup] = field(default_factory=list)


class RequestTraces:
    """The open spans of one engine's requests. Owned by the engine's thread; bounded by the requests it has.

    It only notes what happened; the sink makes spans of that, in a thread of its own. `wall_offset_ns()` is what makes
    a time of `clock` one of the system's clock: asked for once a span, so that its parts lie in it as was measured.
    """

    def __init__(self, sink: SpanSink, link: Link, clock: Clock, block_tokens: int) -> None:
        self._sink = sink
        self._link = link
        self._clock = clock
        self._block_tokens = block_tokens
        self.wall_offset_ns: Callable[[], int] = wall_offset_ns
        self._requests: dict[str, _Told] = {}

    def __len__(self) -> int:
        """Requests that are known here."""
        return len(self._requests)

    def arrived(self, request: str, headers: Mapping[str, str] | None) -> None:
        """The engine has a request, which belongs to the trace that these headers name."""
        self._requests[request] = _Told(headers or {}, self._clock())

    def looked_up(self, search: Search) -> None:
        """A lookup has ended, and its load with it where there was one."""
        told = self._requests.get(search.request)
        if told is None:
            return
        planned = len(search.plan.slots) if search.plan is not None else 0
        told.lookups += 1
        told.latest.append(
            _Lookup(
                search.asked_s,
                search.answer_s,
                search.answered,
                search.stage is Stage.OVER and not search.answered,
                self._clock(),
                max(0, search.wanted - search.skip),
                counted_as_disk(search.sources) if self._link.staging else search.sources,
                dict(search.unloaded),
                search.ready_at_answer,
                search.expected_s,
                search.ready,
                search.final_s,
                search.begun_s,
                planned,
                search.plan is not None and search.plan.layerwise,
                planned if search.arrived is None else search.arrived,
                search.copied,
                self._link.ready.block_bytes if self._link.ready is not None else 0,
            )
        )
        del told.latest[:-LOOKUPS_MAX]

    def over(self, request: str, outcome: str = "", last: bool = False) -> None:
        """The engine goes on with the request: send its span, if it was looked up.

        `outcome` is empty where the lookups say it themselves. With `last` the request has gone.
        """
        told = self._requests.get(request)
        if told is None:
            return
        now_s = self._clock()
        if last:
            del self._requests[request]
        elif told.lookups:  # it may be preempted and ask again: that is a span of its own
            self._requests[request] = _Told(told.headers, now_s)
        if told.lookups:
            make = partial(_span, request, told, outcome, now_s, self.wall_offset_ns(), self._block_tokens)
            self._sink.put(make, told.headers)


def _span(request: str, told: _Told, outcome: str, over_s: float, offset_ns: int, block_tokens: int) -> Span:
    """The span of a request that the engine has gone on with. Called by the sink's thread."""
    last = told.latest[-1]
    failed = last.planned - last.arrived
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.id": readable(request),
        "kvbm.outcome": outcome or _outcome(last),
        "kvbm.lookups": told.lookups,
        "kvbm.asked_tokens": last.wanted * block_tokens,
        "kvbm.found_host_tokens": last.found.count(Tier.HOST) * block_tokens,
        "kvbm.found_disk_tokens": last.found.count(Tier.DISK) * block_tokens,
        "kvbm.found_remote_tokens": last.found.count(Tier.REMOTE) * block_tokens,
        "kvbm.loaded_tokens": last.arrived * block_tokens,
    }
    for reason, blocks in last.unloaded.items():
        attributes[f"kvbm.computed_tokens.{reason}"] = blocks * block_tokens
    start_ns, end_ns = nanoseconds(told.since_s) + offset_ns, nanoseconds(over_s) + offset_ns
    parts = tuple(part for lookup in told.latest for part in _parts(lookup, offset_ns))
    return Span("kvbm.request", start_ns, end_ns, attributes, parts, _fault(failed, last.planned))


def _outcome(last: _Lookup) -> str:
    if last.planned:
        return (
            "loaded" if last.arrived == last.planned else "loaded_in_part" if last.arrived else "load_failed"
        )
    return "computed" if last.found else "nothing_found"


def _fault(failed: int, planned: int) -> str:
    return f"{failed} of {planned} blocks did not arrive" if failed else ""


def _parts(lookup: _Lookup, offset_ns: int) -> list[Span]:
    """The parts of a request's span that are of one lookup."""

    def at(seconds: float) -> int:
        return nanoseconds(seconds) + offset_ns

    parts: list[Span] = []
    answered_s = lookup.asked_s + lookup.answer_s if lookup.answered else lookup.ended_s
    facts: dict[str, str | int | float | bool]
    if lookup.wanted:
        facts = {"kvbm.blocks": lookup.wanted, "kvbm.found_blocks": len(lookup.found)}
        fault = "no answer in time" if lookup.late else ""
        parts.append(Span("kvbm.lookup", at(lookup.asked_s), at(answered_s), facts, fault=fault))
    behind = len(lookup.found) - lookup.ready_at_answer
    if lookup.answered and behind > 0:
        facts = {
            "kvbm.blocks": behind,
            "kvbm.expected_seconds": lookup.expected_s,
            "kvbm.arrived_blocks": lookup.ready - lookup.ready_at_answer,
        }
        end_s = lookup.final_s or lookup.ended_s
        parts.append(Span("kvbm.promotion", at(answered_s), at(end_s), facts))
    if lookup.planned:
        copies: tuple[Span, ...] = ()
        if lookup.copied is not None:
            facts = {"kvbm.blocks": lookup.arrived, "kvbm.bytes": lookup.arrived * lookup.block_bytes}
            copies = (Span("kvbm.copy", *lookup.copied, facts),)
        facts = {"kvbm.blocks": lookup.planned, "kvbm.layerwise": lookup.layerwise}
        fault = _fault(lookup.planned - lookup.arrived, lookup.planned)
        parts.append(Span("kvbm.load", at(lookup.begun_s), at(lookup.ended_s), facts, copies, fault))
    return parts
