"""What became of each request that was looked up, as spans: request → lookup, promotion, load → copy.

Nothing is decided by them. All times are the leader's, but those of a copy, which the ranks report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbm.block import Tier, counted_as_disk
from kvbm.clock import Clock, nanoseconds, wall_offset_ns
from kvbm.leader.link import ManagerLink
from kvbm.leader.search import Search, Stage
from kvbm.leader.tracked import readable
from kvbm.observe.spans import Span, SpanSink

LOOKUPS_MAX = 8
"""A request's latest lookups that its span has as parts; those before are counted."""


@dataclass(slots=True)
class _Told:
    """A request that the engine has, and what happened since it began to ask."""

    headers: Mapping[str, str]
    since_s: float
    lookups: int = 0
    parts: list[tuple[Span, ...]] = field(default_factory=list)
    asked: int = 0
    found: bytes = b""
    loaded: int = 0
    failed: int = 0
    unloaded: dict[str, int] = field(default_factory=dict)


class RequestTraces:
    """The open spans of one engine's requests. Owned by the engine's thread; bounded by the requests it has.

    `wall_offset_ns()` is what makes a time of `clock` one of the system's clock. It is asked for once in each span of a
    request, so that its parts lie in it as they were measured.
    """

    def __init__(self, sink: SpanSink, link: ManagerLink, clock: Clock, block_tokens: int) -> None:
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
        now_s = self._clock()
        told.lookups += 1
        told.asked = max(0, search.wanted - search.skip)
        told.found = counted_as_disk(search.sources) if self._link.staging else search.sources
        told.unloaded = search.unloaded
        if search.plan is not None:
            planned = len(search.plan.slots)
            told.loaded = planned if search.arrived is None else search.arrived
            told.failed = planned - told.loaded
        told.parts.append(self._parts(search, told.found, now_s))
        del told.parts[:-LOOKUPS_MAX]

    def over(self, request: str, outcome: str = "", last: bool = False) -> None:
        """The engine goes on with the request: send its span, if it was looked up.

        `outcome` is empty where the lookups say it themselves. With `last` the request has gone.
        """
        told = self._requests.get(request)
        if told is None:
            return
        if last:
            del self._requests[request]
        if not told.lookups:
            return
        now_s, offset_ns = self._clock(), self.wall_offset_ns()
        tokens = self._block_tokens
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.request.id": readable(request),
            "kvbm.outcome": outcome or _outcome(told),
            "kvbm.lookups": told.lookups,
            "kvbm.asked_tokens": told.asked * tokens,
            "kvbm.found_host_tokens": told.found.count(Tier.HOST) * tokens,
            "kvbm.found_disk_tokens": told.found.count(Tier.DISK) * tokens,
            "kvbm.loaded_tokens": told.loaded * tokens,
        }
        for reason, blocks in told.unloaded.items():
            attributes[f"kvbm.computed_tokens.{reason}"] = blocks * tokens
        parts = tuple(_on_wall(part, offset_ns) for lookup in told.parts for part in lookup)
        fault = f"{told.failed} of {told.failed + told.loaded} blocks did not arrive" if told.failed else ""
        start_ns, end_ns = nanoseconds(told.since_s) + offset_ns, nanoseconds(now_s) + offset_ns
        self._sink.put(Span("kvbm.request", start_ns, end_ns, attributes, parts, fault), told.headers)
        if not last:  # it may be preempted and ask again: that is a span of its own
            self._requests[request] = _Told(told.headers, now_s)

    def _parts(self, search: Search, found: bytes, now_s: float) -> tuple[Span, ...]:
        """The parts of a lookup that has ended, in ns of the leader's clock; those of a copy are on the system's."""
        asked_ns, now_ns = nanoseconds(search.asked_s), nanoseconds(now_s)
        facts = {"kvbm.blocks": max(0, search.wanted - search.skip), "kvbm.found_blocks": len(found)}
        answered_ns = nanoseconds(search.asked_s + search.answer_s) if search.answered else now_ns
        late = search.stage is Stage.OVER and not search.answered
        parts: list[Span] = []
        if search.wanted:
            parts.append(
                Span("kvbm.lookup", asked_ns, answered_ns, facts, fault="no answer in time" if late else "")
            )
        if search.answered and search.ready_at_answer < len(search.slots):
            parts.append(
                Span(
                    "kvbm.promotion",
                    answered_ns,
                    nanoseconds(search.final_s) if search.final_s else now_ns,
                    {
                        "kvbm.blocks": len(search.slots) - search.ready_at_answer,
                        "kvbm.expected_seconds": search.expected_s,
                        "kvbm.arrived_blocks": search.ready - search.ready_at_answer,
                    },
                )
            )
        if search.plan is not None:
            blocks = len(search.plan.slots)
            arrived = blocks if search.arrived is None else search.arrived
            load = {"kvbm.blocks": blocks, "kvbm.layerwise": search.plan.layerwise}
            parts.append(
                Span(
                    "kvbm.load",
                    nanoseconds(search.begun_s),
                    now_ns,
                    load,
                    self._copy(search, arrived),
                    f"{blocks - arrived} of {blocks} blocks did not arrive" if arrived < blocks else "",
                )
            )
        return tuple(parts)

    def _copy(self, search: Search, arrived: int) -> tuple[Span, ...]:
        if search.copied is None:
            return ()
        ready = self._link.ready
        facts = {"kvbm.blocks": arrived, "kvbm.bytes": arrived * (ready.block_bytes if ready else 0)}
        return (Span("kvbm.copy", *search.copied, facts),)


def _outcome(told: _Told) -> str:
    if told.loaded:
        return "loaded" if not told.failed else "loaded_in_part"
    if told.failed:
        return "load_failed"
    return "computed" if told.found else "nothing_found"


def _on_wall(span: Span, offset_ns: int) -> Span:
    """The same on the system's clock. What the ranks told is on it already."""
    return span._replace(start_ns=span.start_ns + offset_ns, end_ns=span.end_ns + offset_ns)
