"""A leader, a manager that answers from a script, and the words of the engine between them."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from typing import Any

from kvbm.block import BlockKey, Tier
from kvbm.client.channel import Channel
from kvbm.clock import ManualClock
from kvbm.framing import FrameBuffer, encode
from kvbm.hashing import keys_in_space, space_mask, split_keys
from kvbm.leader.leader import Leader
from kvbm.leader.tracked import Answer, Scheduled
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Finished,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Ready,
    Reserve,
    ReserveReply,
)
from kvbm.protocol_decoding import decode_to_manager
from kvbm.step_plan import LoadPlan, StepPlan, StepReport, StorePlan

FINGERPRINT = bytes(range(32))
HASHES = [bytes([i]) * 32 for i in range(40)]
TABLE = list(range(100, 140))
LEASE_S = 120.0


class ScriptedManager:
    """The other end. Also the finder: `attempt` connects while `up`."""

    def __init__(self) -> None:
        self.up = True
        self.attempts = 0
        self.epoch = 7
        self.ended: list[Finished] = []
        self._connection: socket.socket | None = None
        self._frames = FrameBuffer()

    def attempt(self) -> Channel | None:
        self.attempts += 1
        if not self.up:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection, self._frames = ours, FrameBuffer()
        ours.setblocking(False)
        return Channel(theirs)

    def said(self) -> list[Any]:
        """What the leader has sent since the last call; that requests ended goes to `ended` instead."""
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 22)
        except BlockingIOError:
            return []
        messages = [decode_to_manager(frame) for frame in self._frames.feed(data)]
        self.ended += [message for message in messages if isinstance(message, Finished)]
        return [message for message in messages if not isinstance(message, Finished)]

    def send(self, *messages: Message) -> None:
        assert self._connection is not None
        for message in messages:
            self._connection.sendall(encode(message))

    def send_raw(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(data)

    def ready(self, ready: bool = True, lease_blocks: int = 0) -> None:
        self.send(
            Ready(
                ready=ready,
                epoch=self.epoch,
                fingerprint=FINGERPRINT,
                lease_s=LEASE_S,
                tiers={"host": 100},
                lease_blocks=lease_blocks,
            )
        )

    def die(self) -> None:
        self.up = False
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ScriptedDevice:
    """Device blocks as an engine has them: what each holds, and which are pinned."""

    block_count = 800

    def __init__(self) -> None:
        self.holds: dict[int, Hashable] = {block: f"hash {block}" for block in TABLE}
        self.pinned: list[int] = []

    def pin(self, blocks: Sequence[int]) -> bool:
        self.pinned += blocks
        return True

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pinned.remove(block)

    def forget_all(self) -> None:
        self.holds.clear()


class Bench:
    """A leader, and the words of the engine that drives it."""

    def __init__(
        self, promise_early: bool = True, rank_count: int = 1, block_tokens: int = 4, **modes: Any
    ) -> None:
        self.manager = ScriptedManager()
        self.clock = ManualClock(10.0)
        hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e", rank_count=rank_count)
        self.leader = Leader(self.manager, hello, block_tokens, promise_early, self.clock, **modes)  # type: ignore[arg-type]
        assert self.manager.said() == [hello]
        self.manager.ready()
        self.step()
        assert self.leader.ready

    def step(
        self, complete: dict[str, int] | None = None, preempted: Sequence[str] = (), idle: bool = False
    ) -> StepPlan:
        scheduled = [
            Scheduled(request, blocks, lambda: TABLE) for request, blocks in (complete or {}).items()
        ]
        return self.leader.step(scheduled, preempted, 0, idle)

    def add(self, request: str = "r", blocks: int = 8, on_device: int = 0) -> Lookup:
        """A request arrives; the lookup that goes out at once."""
        self.leader.request_added(request, HASHES[:blocks], b"", on_device)
        (lookup,) = self.manager.said()
        assert isinstance(lookup, Lookup)
        return lookup

    def answer(
        self, lookup: Lookup, blocks: int, ready: int | None = None, disk: int = 0, arrival_s: float = 0.0
    ) -> None:
        sources = bytes([Tier.HOST] * (blocks - disk) + [Tier.DISK] * disk)
        self.manager.send(
            LookupReply(
                lookup=lookup.lookup,
                slots=tuple(range(blocks)),
                generations=tuple(range(50, 50 + blocks)),
                ready=blocks if ready is None else ready,
                sources=sources,
                arrival_s=arrival_s,
            )
        )

    def promise(self, blocks: int = 5, computed: int = 0, request: str = "r", **reply: Any) -> Lookup:
        """A request that has been told how much it may load."""
        lookup = self.add(request, on_device=computed)
        self.answer(lookup, blocks, **reply)
        assert self.leader.matched(request, computed) == Answer(blocks=blocks)
        return lookup

    def load(self, blocks: int = 5, computed: int = 0, request: str = "r", **reply: Any) -> LoadPlan:
        """A request whose load is in a plan."""
        self.promise(blocks, computed, request, **reply)
        self.leader.allocated(request, blocks, TABLE)
        (plan,) = self.step().loads
        return plan

    def arrive(self, plan: LoadPlan, invalid: set[int] | None = None) -> None:
        report = StepReport(loaded={plan.request: 0.5})
        self.leader.updated(report, [plan.request], invalid or set())

    def store(
        self, request: str = "r", complete: int = 4, answer: tuple[int, ...] | None = None
    ) -> StorePlan:
        """A store that is in a plan."""
        assert self.step({request: complete}).stores == ()
        reserve = self.manager.said()[-1]
        assert isinstance(reserve, Reserve)
        self.grant(reserve, answer)
        (plan,) = self.step().stores
        return plan

    def grant(self, reserve: Reserve, answer: tuple[int, ...] | None = None) -> None:
        count = len(split_keys(reserve.keys))
        slots = tuple(range(count)) if answer is None else answer
        generations = tuple(70 + slot for slot in slots if slot >= 0)
        self.manager.send(ReserveReply(store=reserve.store, slots=slots, generations=generations))

    def report(self, plan: StorePlan, ranks: int = 1, failed: tuple[int, ...] = ()) -> None:
        self.leader.updated(StepReport(stored={plan.store: (ranks, failed, 0.1)}), (), set())

    def reconnect(self) -> None:
        self.manager.up = True
        self.manager.epoch += 1
        self.step()
        assert [type(message) for message in self.manager.said()] == [Hello]
        self.manager.ready()
        self.step()
        assert self.leader.ready


def keys(count: int, extras: bytes = b"") -> list[BlockKey]:
    if not extras:
        return [BlockKey(block_hash) for block_hash in HASHES[:count]]
    mask = space_mask(FINGERPRINT, len(extras).to_bytes(4, "little") + extras)
    return [BlockKey(keys_in_space(block_hash, mask)) for block_hash in HASHES[:count]]
