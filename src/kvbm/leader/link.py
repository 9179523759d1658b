"""The leader's session with the manager: polled by the engine's thread, reconnecting by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from kvbm.block import NO_COUNT
from kvbm.client.channel import Channel
from kvbm.client.finder import Finder
from kvbm.client.mirror import Mirror
from kvbm.clock import Clock
from kvbm.errors import ManagerUnavailable, MessageTooLong
from kvbm.present.numbers import name_ranks
from kvbm.protocol import Announce, FromManager, HeldBlocks, Hello, Message, Ready, Refused, Welcome
from kvbm.settings import variable
from kvbm.step_plan import NodeSlots

log = logging.getLogger("kvbm.leader")

_COLLECTED_BYTES_MAX = 1 << 18
_OWN = frozenset((Ready, HeldBlocks, Refused, Welcome))


class Link(Protocol):
    """What the leader's parts see of the engine's manager, or of the managers of its nodes (`nodes`): the members are
    those of `ManagerLink`."""

    @property
    def ready(self) -> Ready | None:
        """What is said when all ranks are attached; None before, and without a session."""

    @property
    def life(self) -> int:
        """Grows whenever a session begins or ends."""

    @property
    def readied(self) -> int:
        """Grows whenever `ready` comes."""

    @property
    def received_s(self) -> float:
        """When the latest message arrived."""

    @property
    def wants_facts(self) -> bool:
        """Whether what the tiers hold is announced."""

    @property
    def staging(self) -> bool:
        """Whether host memory is only the staging area of the disk."""

    def poll(self) -> list[FromManager]:
        """The messages that arrived."""

    def send(self, message: Message) -> bool:
        """False when there is no session, or the message is too long."""

    def in_one_write(self, later: bool = False) -> AbstractContextManager[None]:
        """What is sent inside leaves together; `later`, with what is sent or received next."""

    def wait(self, timeout_s: float) -> float:
        """Wait for a message; how many seconds it took."""

    def close(self) -> None:
        """End the sessions."""

    def nodes_of_lookup(self, lookup: int, first: int, end: int) -> tuple[NodeSlots, ...]:
        """The slots of some blocks of a lookup at each node's manager."""

    def nodes_of_store(self, store: int) -> tuple[NodeSlots, ...]:
        """The slots of a store at each node's manager."""


class ManagerLink:
    """`ready` is the manager's message that all ranks of the engine are attached; without it nothing is asked.

    `life` grows by one whenever the session begins or ends: questions of an earlier life get no answer. `readied` grows
    whenever `ready` comes: questions that arrived while a rank was missing were answered with "nothing found".
    """

    def __init__(
        self,
        finder: Finder,
        hello: Hello,
        clock: Clock,
        mirror: Mirror | None = None,
        alone: bool = True,
    ) -> None:
        """`mirror` is kept up to date with what the manager holds. `alone`: it is of no use to have only some of the
        engine's ranks there."""
        self._mirror, self._alone, self._elsewhere = mirror, alone, False
        self._finder = finder
        self._hello = hello
        self._clock = clock
        self._channel: Channel | None = None
        self._refused = ""
        self._missing: tuple[int, ...] = ()
        self.ready: Ready | None = None
        self.life = 0
        self.readied = 0
        self._collecting = False
        self.received_s = clock()
        """When the latest message arrived."""
        self.wants_facts = False
        """The manager announces what its tiers hold: it wants to be told what blocks are."""
        self.staging = False
        """The manager has no host tier: its host memory is only the staging area of the disk."""

    def poll(self) -> list[FromManager]:
        """The messages that arrived; tries to connect when there is no session. Takes microseconds when idle."""
        if self._channel is None and not self._connect():
            return []
        assert self._channel is not None
        try:
            messages = self._channel.receive()
        except ManagerUnavailable as error:
            self._lose(str(error))
            return []
        if messages:
            self.received_s = self._clock()
        return [message for message in messages if not self._is_own(message)]

    def send(self, message: Message) -> bool:
        """False when there is no session, or the message is too long."""
        if self._channel is None:
            return False
        try:
            waiting_bytes = self._channel.queue(message)
            if not self._collecting or waiting_bytes > _COLLECTED_BYTES_MAX:
                self._channel.flush()
        except MessageTooLong as error:
            log.warning("a request is computed without the KV cache: %s", error)
            return False
        except ManagerUnavailable as error:
            self._lose(str(error))
            return False
        return True

    @contextmanager
    def in_one_write(self, later: bool = False) -> Iterator[None]:
        """What is sent inside leaves with one system call at the end, or before somebody waits for an answer. `later`
        it leaves with what is sent or received next.

        Each call costs the engine's thread more than its message, and wakes the manager for that message alone.
        """
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            if self._channel is not None and not later:
                try:
                    self._channel.flush()
                except ManagerUnavailable as error:
                    self._lose(str(error))

    @property
    def channel(self) -> Channel | None:
        """The session's; None without one."""
        return self._channel

    def nodes_of_lookup(self, lookup: int, first: int, end: int) -> tuple[NodeSlots, ...]:
        """The slots of some blocks of a lookup at each node's manager; empty where there is one manager."""
        return ()

    def nodes_of_store(self, store: int) -> tuple[NodeSlots, ...]:
        """The slots of a store at each node's manager; empty where there is one manager."""
        return ()

    def wait(self, timeout_s: float) -> float:
        """Wait for a message, at most `timeout_s`; only where the engine has nothing else to do, or for the budget.
        How many seconds it took."""
        started_s = self._clock()
        try:
            if self._channel is not None:
                self._channel.wait(timeout_s)
        except (ManagerUnavailable, OSError, ValueError) as error:
            self._lose(str(error))
        return self._clock() - started_s

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._mirror is not None:
            self._mirror.forget()
        self.ready = None

    def _connect(self) -> bool:
        channel = self._finder.attempt()
        if channel is None:
            return False
        self._channel = channel
        self.life += 1
        return self.send(self._hello)

    def _is_own(self, message: FromManager) -> bool:
        """Take in a message about the session itself; False for any other message."""
        if type(message) not in _OWN:
            return False
        if isinstance(message, Ready):
            usable = message.ready and not (self._alone and self._lacks_nodes(message))
            if usable and self.ready is None:
                self.readied += 1
                if self._mirror is not None:
                    self._mirror.forget()  # all is told anew
                    self.send(Announce(keys=True))
                log.info("KV cache is on: %s", _named(message.tiers))
            self.ready = message if usable else None
            if message.tiers:
                self.staging = "host" not in message.tiers
            if message.missing and message.missing != self._missing:
                log.warning(
                    "serving without a KV cache: of %d ranks, %s did not attach to this node's manager (a rank on "
                    "another node finds another one); the cache is used once they do",
                    self._hello.rank_count,
                    name_ranks(message.missing),
                )
            self._missing = message.missing
        elif isinstance(message, HeldBlocks):
            if self._mirror is not None:
                self._mirror.take_in(message)
        elif isinstance(message, Refused):
            if message.reason != self._refused:
                log.warning("no KV cache for now: %s", message.reason)
            self._refused = message.reason
        elif isinstance(message, Welcome):
            self.wants_facts = message.events
            self._finder.welcomed()
        return True

    def _lacks_nodes(self, message: Ready) -> bool:
        """Whether ranks of the engine found other managers; said once."""
        if message.part_count > 1 and not self._elsewhere:
            self._elsewhere = True
            log.warning(
                "serving without a KV cache: the engine's %d ranks found %d managers; name those of its other nodes "
                "(%s)",
                self._hello.rank_count,
                message.part_count,
                variable("node_managers"),
            )
        return message.part_count > 1

    def _lose(self, reason: str) -> None:
        if self.ready is not None:
            log.warning("manager lost: %s; serving goes on without a KV cache until it is back", reason)
        self.life += 1
        self.close()


def _named(tiers: dict[str, int]) -> str:
    """The tiers for people: `host 1024, disk 2048 blocks, remote`."""
    counted = ", ".join(f"{tier} {blocks}" for tier, blocks in tiers.items() if blocks != NO_COUNT)
    others = [tier for tier, blocks in tiers.items() if blocks == NO_COUNT]
    return ", ".join([f"{counted} blocks", *others] if counted else others)
