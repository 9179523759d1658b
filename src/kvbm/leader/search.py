"""One request's lookup: where it stands, and what the manager answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvbm.grouping import sources_of_prompt
from kvbm.hints import ClientHint, as_mapping, as_tuples
from kvbm.leader.tracked import Told, readable
from kvbm.protocol import Lookup, LookupReply
from kvbm.step_plan import LoadPlan


class Stage(Enum):
    """Where one request's lookup stands."""

    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"
    OVER = "over"


@dataclass(slots=True)
class Search:
    """The lookup of one request. Its first `skip` blocks were left out of the question; the run begins behind them.

    All its blocks are expected in host memory at `arrives_s`. `used` holds the tiers of the blocks being loaded.
    `arrived` is None until a rank reports a failure, then the number of blocks before the first failed one. `missing`
    blocks were found but did not come to host memory in time, for the reason `why_missing`; `why` is the reason for the
    others that are not promised. `unloaded` counts, by reason, blocks that were found and are computed all the same.

    With several groups the slots hold the run of all of them up to `boundary` (`LookupReply`), of which `blocks` of the
    prompt come; it is promised as a whole or not at all.

    For traces alone: `ready_at_answer` blocks were in host memory when the answer came, and the others were expected
    `expected_s` later; no more came after `final_s`; the load was planned at `begun_s`, and its ranks copied from
    `copied[0]` to `copied[1]`, in ns of the system's clock.
    """

    request: str
    number: int
    life: int
    skip: int
    asked_s: float
    stage: Stage = Stage.ASKED
    answered: bool = False
    answer_s: float = 0.0
    attempts: int = 1
    wanted: int = 0
    epoch: int = -1
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    sources: bytes = b""
    ready: int = 0
    final: bool = True
    arrives_s: float = 0.0
    plan: LoadPlan | None = None
    used: bytes = b""
    arrived: int | None = None
    no_room: int = 0
    refused: int = 0
    missing: int = 0
    why_missing: str = ""
    why: str = ""
    unloaded: dict[str, int] = field(default_factory=dict)
    ready_at_answer: int = 0
    expected_s: float = 0.0
    final_s: float = 0.0
    begun_s: float = 0.0
    copied: tuple[int, int] | None = None
    boundary: int = 0

    def question(self, keys: bytes, told: Told, asker: ClientHint) -> Lookup:
        """What is asked of the manager; `keys` are joined."""
        return Lookup(
            lookup=self.number,
            keys=keys,
            skip=self.skip,
            request=readable(self.request),
            prompt=told.prompt,
            extras=dict(told.extras),
            again=self.attempts > 1,
            tenant=asker.tenant,
            hint=as_mapping(asker.hint),
            verdicts=as_tuples(asker.verdicts),
        )

    def replied(self, reply: LookupReply, now_s: float) -> None:
        """The manager's answer."""
        self.stage, self.answered, self.answer_s = Stage.FOUND, True, now_s - self.asked_s
        self.boundary = reply.boundary
        self.slots, self.generations, self.sources = reply.slots, reply.generations, reply.sources
        self.ready = self.ready_at_answer = reply.ready
        self.final = reply.ready == len(reply.slots)
        self.no_room, self.refused = reply.no_room, reply.refused
        self.arrives_s, self.expected_s = now_s + reply.arrival_s, reply.arrival_s

    @property
    def blocks(self) -> int:
        """How many blocks of the prompt were found."""
        return self.boundary - self.skip if self.boundary else len(self.slots)

    def prompt_sources(self) -> bytes:
        """The tiers of these, a byte each."""
        return sources_of_prompt(self.sources, self.blocks) if self.boundary else self.sources
