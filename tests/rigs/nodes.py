"""A leader over two nodes, each with a manager that answers from a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvbm.block import Tier
from kvbm.clock import ManualClock
from kvbm.leader.leader import Leader
from kvbm.leader.tracked import Answer, Scheduled
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Ready,
    Reserve,
    ReserveReply,
)
from kvbm.step_plan import LoadPlan, StepPlan, StepReport
from rigs.leader import FINGERPRINT, HASHES, LEASE_S, TABLE, ScriptedManager

MessageT = TypeVar("MessageT", bound=Message)


class NodesBench:
    """A leader whose ranks are on as many nodes as there are `managers`, and the words of its engine."""

    def __init__(self, nodes: int = 2, **modes: Any) -> None:
        self.managers = [ScriptedManager() for _ in range(nodes)]
        for number, manager in enumerate(self.managers):
            manager.epoch = 70 + number
        self.clock = ManualClock(10.0)
        hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e", rank_count=nodes)
        first, *others = self.managers
        self.leader = Leader(
            first,  # type: ignore[arg-type]
            hello,
            4,
            True,
            self.clock,
            nodes=others,  # type: ignore[arg-type]
            **modes,
        )
        assert [manager.said() for manager in self.managers] == [[hello]] * nodes

    def all_ready(self) -> None:
        """All managers have all of their ranks."""
        for part in range(len(self.managers)):
            self.ready(part)
        self.step()
        assert self.leader.ready

    def ready(self, node: int, part: int | None = None, **said: Any) -> None:
        """That manager has the ranks of its node."""
        manager = self.managers[node]
        fields = {
            "ready": True,
            "epoch": manager.epoch,
            "fingerprint": FINGERPRINT,
            "lease_s": LEASE_S,
            "tiers": {"host": 100 - node},
            "block_bytes": 4096,
            "part": node if part is None else part,
            "part_count": len(self.managers),
            **said,
        }
        manager.send(Ready(**fields))

    def step(self, complete: dict[str, int] | None = None, idle: bool = False) -> StepPlan:
        scheduled = [Scheduled(name, blocks, lambda: TABLE) for name, blocks in (complete or {}).items()]
        return self.leader.step(scheduled, (), 0, idle)

    def said(self, node: int, kind: type[MessageT]) -> list[MessageT]:
        """What that manager was told of this kind; the rest is passed over."""
        return [message for message in self.managers[node].said() if isinstance(message, kind)]

    def ask(self, request: str = "r", blocks: int = 8) -> int:
        """A request arrives; the number of the lookup that goes to all."""
        self.leader.request_added(request, HASHES[:blocks], b"", 0)
        numbers = [lookup.lookup for node in range(len(self.managers)) for lookup in self.said(node, Lookup)]
        assert len(numbers) == len(self.managers)
        (number,) = set(numbers)
        return number

    def answer(self, node: int, lookup: int, blocks: int, ready: int | None = None, **said: Any) -> None:
        """That manager holds so many blocks, in slots from 100 times its number on."""
        fields = {
            "slots": tuple(range(100 * node, 100 * node + blocks)),
            "generations": tuple(range(1000 * node, 1000 * node + blocks)),
            "ready": blocks if ready is None else ready,
            "sources": bytes([Tier.HOST] * blocks),
            **said,
        }
        self.managers[node].send(LookupReply(lookup=lookup, **fields))

    def matched(self, request: str = "r") -> Answer:
        return self.leader.matched(request, 0)

    def load(self, request: str = "r", *blocks: int) -> LoadPlan:
        """The plan of a load of what all of them hold, each that many."""
        number = self.ask(request)
        for node, count in enumerate(blocks):
            self.answer(node, number, count)
        assert self.matched(request).blocks == min(blocks)
        self.leader.allocated(request, min(blocks), TABLE)
        (plan,) = self.step().loads
        return plan

    def reserved(self, complete: int = 4, request: str = "r") -> int:
        """A step completes blocks; the number of the store that is asked of all."""
        self.step({request: complete})
        numbers = [asked.store for node in range(len(self.managers)) for asked in self.said(node, Reserve)]
        assert len(numbers) == len(self.managers)
        (number,) = set(numbers)
        return number

    def grant(self, node: int, store: int, slots: Sequence[int]) -> None:
        generations = tuple(7000 + slot for slot in slots if slot >= 0)
        self.managers[node].send(ReserveReply(store=store, slots=tuple(slots), generations=generations))

    def report(self, store: int, failed: tuple[int, ...] = ()) -> None:
        """All ranks have ended this store."""
        ranks = len(self.managers)
        self.leader.updated(StepReport(stored={store: (ranks, failed, 0.1)}), (), set())

    def close(self) -> None:
        self.leader.close()
        for manager in self.managers:
            manager.close()
