"""A client's session with a shared manager: what goes over its two channels, and the memory that came with them."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TypeVar

from kvbm.block import Tier
from kvbm.client.arena import MappedArena
from kvbm.client.channel import Channel
from kvbm.client.mirror import Mirror
from kvbm.errors import ManagerUnavailable
from kvbm.protocol import (
    Announce,
    CopiesHang,
    Fence,
    FenceDone,
    HeldBlocks,
    LookupReply,
    Message,
    Progress,
    Ready,
    Refused,
    ReserveReply,
    ResetReply,
    Status,
)

log = logging.getLogger("kvbm.library")

_REPLIES = (LookupReply, ReserveReply, ResetReply, Status)
ReplyT = TypeVar("ReplyT", LookupReply, ReserveReply, ResetReply, Status)


class Session:
    """The two sessions of one life of the manager, and the memory that came with them. `lost` when either broke.

    At most one question is open. While it is `unanswered` no other one is asked, so that a manager that has stopped
    delays one call and not each of them.
    """

    def __init__(
        self, leader: Channel, worker: Channel, arena: MappedArena, mirror: Mirror | None = None
    ) -> None:
        self.arena = arena
        self._mirror = mirror
        self.lost = False
        self.ready = False
        self.staging = False
        self.runs: dict[int, SharedRun] = {}
        self.fenced: set[int] = set()
        self.unanswered = False
        self.hangs = False
        """A store does not end (`give_up`)."""
        self._leader = leader
        self._worker = worker
        self._reply: object = None

    def poll(self) -> None:
        """Take the messages that have arrived. Called while nothing is copied: an answered fence promises just that."""
        try:
            for message in self._worker.receive():
                if isinstance(message, Fence):
                    self.fenced.update(message.stores)
                    self._worker.send(FenceDone(fence=message.fence))
            for message in self._leader.receive():
                self._take(message)
        except ManagerUnavailable as error:
            self.lose(str(error))

    def send(self, message: Message) -> None:
        """Send a message that needs no answer."""
        if self.lost:
            return
        try:
            self._leader.send(message)
        except ManagerUnavailable as error:
            self.lose(str(error))

    def ask(
        self, message: Message, kind: type[ReplyT], timeout_s: float, undo: Message | None = None
    ) -> ReplyT | None:
        """The answer; None when the session is lost or there is no answer in time.

        In that case, and when the wait is interrupted, `undo` follows: it gives back what a late answer would grant.
        """
        assert not self.unanswered, "one question at a time"
        self.unanswered, self._reply = True, None
        try:
            self.send(message)
            deadline_s = time.monotonic() + timeout_s
            while self.unanswered and self.wait(deadline_s - time.monotonic()):
                pass
        finally:
            if self.unanswered and undo is not None:
                self.send(undo)
        if self.unanswered:
            if not self.lost:
                log.warning(
                    "no answer of the manager within %g s: it is not asked until it answers", timeout_s
                )
            return None
        reply = self._reply
        assert isinstance(reply, kind), reply
        return reply

    def wait(self, timeout_s: float) -> bool:
        """Take the messages that arrive within `timeout_s`; False when none did, or the session is lost."""
        if self.lost or timeout_s < 0.0:
            return False
        try:
            if not self._leader.wait(timeout_s):
                return False
        except ManagerUnavailable as error:
            self.lose(str(error))
            return False
        self.poll()
        return not self.lost

    def give_up(self) -> None:
        """A store hangs: the manager ends the session. The worker's end stays open, and the memory stays mapped, until
        this process ends: the manager gives the slots of the store to nothing else before that."""
        self.hangs = self.lost = True
        with contextlib.suppress(ManagerUnavailable):
            self._worker.send(CopiesHang())
        self._leader.close()
        if self._mirror is not None:
            self._mirror.forget()
        log.error(
            "KVBM is off in this process from now on: a store hangs, and with it the device or its driver"
        )

    def lose(self, reason: str) -> None:
        """Close both sessions. The memory stays: a manager that is dead overwrites nothing."""
        if not self.lost:
            self.lost = True
            self._leader.close()
            self._worker.close()
            if self._mirror is not None:
                self._mirror.forget()
            log.warning("manager lost: %s; blocks are neither found nor kept until it is back", reason)

    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when there is something to take in."""
        return () if self.lost else (self._leader.fileno(), self._worker.fileno())

    def close(self) -> None:
        """End the session and drop the memory. No copier over it may be left."""
        self.lost = True
        self._leader.close()
        if not self.hangs:
            self._worker.close()
            self.arena.close()

    def _take(self, message: object) -> None:
        if isinstance(message, Progress):
            if (run := self.runs.get(message.lookup)) is not None:
                run.ready, run.final = message.ready, message.final
        elif isinstance(message, Ready):
            if self.ready and not message.ready:
                raise ManagerUnavailable("it has ended our worker's session")
            if message.ready and not self.ready and self._mirror is not None:
                self.send(Announce(keys=True))
            self.ready = message.ready
            self.staging = bool(message.tiers) and Tier.HOST.name.lower() not in message.tiers
        elif isinstance(message, HeldBlocks):
            if self._mirror is not None:
                self._mirror.take_in(message)
        elif isinstance(message, Refused):
            raise ManagerUnavailable(f"it refuses us: {message.reason}")
        elif isinstance(message, _REPLIES):
            self.unanswered, self._reply = False, message


@dataclass(eq=False)
class SharedRun:
    """A lease at the manager: `ready` leading slots hold their bytes, and with `final` no more will.

    From the slot `first` on `loaded` were copied, and `failed` were wanted and were not.
    """

    session: Session
    number: int
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    sources: bytes = b""
    boundary: int = 0
    ready: int = 0
    final: bool = False
    first: int = 0
    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0
    answer_s: float = 0.0
    wait_s: float = 0.0
    left_because: str = "unused"

    def note_load(self, first: int, loaded: int, failed: int) -> None:
        """Blocks from the position `first` on were copied, and some were not."""
        if not self.loaded + self.failed:
            self.first = first
        self.loaded += loaded
        self.failed += failed
