"""Blocks that a shared manager keeps: the caller's thread speaks the protocol, as an engine of one rank.

There are two sessions, as an engine has: the *leader's* asks for leases and slots, the *worker's* maps the host tier's
memory and answers fences. Copies go between the KV cache and that memory, and a slot's generation is compared before
and after each: bytes of a slot that changed hands are never taken for the block.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from kvbm.block import BlockKey, Tier, counted_as_disk
from kvbm.client.arena import MappedArena
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ManagerUnavailable
from kvbm.hashing import join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.library.backend import Run
from kvbm.library.copiers import Copiers
from kvbm.protocol import (
    KEYS_PER_MESSAGE_MAX,
    PROTOCOL_VERSION,
    STORED_KEYS_MAX,
    Commit,
    Fence,
    FenceDone,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Progress,
    Ready,
    Refused,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    Welcome,
)
from kvbm.settings import Settings, parse_socket_path

if TYPE_CHECKING:
    import torch

    from kvbm.transfer import Copier, DeviceCache

log = logging.getLogger("kvbm.library")

ARRIVAL_S_MAX = 30.0
FLUSH_POLL_S = 0.01

_REPLIES = (LookupReply, ReserveReply, ResetReply, Status)
ReplyT = TypeVar("ReplyT", LookupReply, ReserveReply, ResetReply, Status)


class _Session:
    """The two sessions of one life of the manager, and the memory that came with them. `lost` when either broke.

    At most one question is open. While it is `unanswered` no other one is asked, so that a manager that has stopped
    delays one call and not each of them.
    """

    def __init__(self, leader: Channel, worker: Channel, arena: MappedArena) -> None:
        self.arena = arena
        self.lost = False
        self.ready = False
        self.staging = False
        self.runs: dict[int, _SharedRun] = {}
        self.fenced: set[int] = set()
        self.unanswered = False
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

    def lose(self, reason: str) -> None:
        """Close both sessions. The memory stays: a manager that is dead overwrites nothing."""
        if not self.lost:
            self.lost = True
            self._leader.close()
            self._worker.close()
            log.warning("manager lost: %s; blocks are neither found nor kept until it is back", reason)

    def close(self) -> None:
        """End the session and drop the memory. No copier over it may be left."""
        self.lost = True
        self._leader.close()
        self._worker.close()
        self.arena.close()

    def _take(self, message: object) -> None:
        if isinstance(message, Progress):
            if (run := self.runs.get(message.lookup)) is not None:
                run.ready, run.final = message.ready, message.final
        elif isinstance(message, Ready):
            if self.ready and not message.ready:
                raise ManagerUnavailable("it has ended our worker's session")
            self.ready = message.ready
            self.staging = bool(message.tiers) and Tier.HOST.name.lower() not in message.tiers
        elif isinstance(message, Refused):
            raise ManagerUnavailable(f"it refuses us: {message.reason}")
        elif isinstance(message, _REPLIES):
            self.unanswered, self._reply = False, message


@dataclass(eq=False)
class _SharedRun:
    """A lease at the manager: `ready` leading slots hold their bytes, and with `final` no more will."""

    session: _Session
    number: int
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    sources: bytes = b""
    boundary: int = 0
    ready: int = 0
    final: bool = False
    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0
    answer_s: float = 0.0
    wait_s: float = 0.0


class SharedSpace:
    """A `Backend` at the manager that listens at `socket`. Its failures are misses; the next call joins it again.

    Raises ManagerUnavailable, ManagerRefused or ManagerUntrusted when it cannot be joined at first.
    """

    def __init__(
        self,
        socket: str,
        layout: BlockLayout,
        namespace: Namespace,
        peer_uids: Iterable[int],
        join_timeout_s: float,
        reply_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._socket = parse_socket_path("socket", socket)
        self._layout = layout
        self._namespace = namespace
        self._peer_uids = tuple(peer_uids)
        self.reply_timeout_s = reply_timeout_s
        self._clock = clock
        self._numbers = count(1)
        self._copiers = Copiers(layout, self._new_copier)
        engine = f"library-{os.getpid()}-{os.urandom(4).hex()}"
        self._leader_hello = Hello(version=PROTOCOL_VERSION, role="leader", engine=engine)
        self._worker_hello = Hello(
            version=PROTOCOL_VERSION, role="worker", engine=engine, namespace=namespace, layout=layout
        )
        address = ManagerAddress(socket_path=socket, private=False)
        settings = Settings(manager=socket, peer_uids=self._peer_uids)
        self._finder = ManagerFinder(address, settings, {}, clock)
        patience_s = max(join_timeout_s, reply_timeout_s)
        joined = self._finder.establish(self._worker_hello, join_timeout_s, time.sleep, patience_s)
        self._session = self._join(*joined, patience_s)

    def lookup(self, keys: list[BlockKey], skip: int) -> _SharedRun | None:
        session = self._present()
        asked = join_keys(keys[:KEYS_PER_MESSAGE_MAX])
        if session is None or not asked:
            return None
        number = next(self._numbers)
        run = session.runs[number] = _SharedRun(session, number)  # before its progress can come
        question = Lookup(lookup=number, keys=asked, skip=min(skip, len(keys), KEYS_PER_MESSAGE_MAX))
        asked_s = self._clock()
        found = session.ask(question, LookupReply, self.reply_timeout_s, undo=Release(lookup=number))
        if found is None or not found.slots:
            del session.runs[number]
            return None
        run.answer_s = self._clock() - asked_s
        run.slots, run.generations = found.slots, found.generations
        run.sources = counted_as_disk(found.sources) if session.staging else found.sources
        run.ready, run.boundary = max(run.ready, found.ready), found.boundary
        return run

    def load(self, run: Run, kv_cache: Mapping[str, torch.Tensor], device_blocks: Sequence[int]) -> int:
        assert isinstance(run, _SharedRun)
        session, started_s = run.session, self._clock()
        if session is not self._session:
            return 0  # promised out of the memory of another life
        wanted = min(len(run.slots), len(device_blocks))
        deadline_s = time.monotonic() + ARRIVAL_S_MAX
        while run.ready < wanted and not run.final and session.wait(deadline_s - time.monotonic()):
            pass
        ready = min(run.ready, wanted)
        arrived = session.arena.intact(run.slots[:ready], run.generations[:ready])
        if arrived:
            pairs = list(zip(device_blocks[:arrived], run.slots[:arrived], strict=True))
            self._copiers.of(kv_cache).load(pairs)
            # A slot that changed hands while we copied may have given us anything.
            arrived = session.arena.intact(run.slots[:arrived], run.generations[:arrived])
        run.loaded, run.failed = arrived, wanted - arrived
        run.seconds = self._clock() - started_s
        run.wait_s = run.answer_s + run.seconds  # what the program did in between is its own
        return arrived

    def release(self, run: Run) -> None:
        assert isinstance(run, _SharedRun)
        run.session.runs.pop(run.number, None)
        unused = len(run.slots) - run.loaded - run.failed
        run.session.send(
            Release(
                lookup=run.number,
                loaded=run.loaded,
                failed=run.failed,
                seconds=run.seconds,
                answer_s=run.answer_s,
                wait_s=run.wait_s,
                unloaded={"unused": unused} if unused else {},
            )
        )

    def store(
        self,
        keys: list[BlockKey],
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        parent: BlockKey | None = None,
        groups: bytes = b"",
    ) -> int:
        copied = 0
        for start in range(0, len(keys), STORED_KEYS_MAX):
            end = start + STORED_KEYS_MAX
            before = keys[start - 1] if start else parent or b""
            copied += self._store(
                before, keys[start:end], kv_cache, device_blocks[start:end], groups[start:end]
            )
        return copied

    def flush(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while (status := self.status()).get("queued"):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(FLUSH_POLL_S)
        return bool(status)

    def clear(self, tier: str) -> int:
        session = self._present()
        reply = session.ask(Reset(tier=tier), ResetReply, self.reply_timeout_s) if session else None
        if reply is None:
            raise ManagerUnavailable(f"no manager answers at {self._socket}: nothing was cleared")
        return reply.dropped

    def status(self) -> dict[str, object]:
        session = self._present()
        reply = session.ask(StatusQuery(), Status, self.reply_timeout_s) if session else None
        spaces = reply.spaces if reply is not None else ()
        return next((space for space in spaces if space.get("namespace") == self._namespace.short), {})

    def close(self) -> None:
        self._copiers.close()
        self._session.close()

    def _store(
        self,
        parent: bytes,
        keys: list[BlockKey],
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        groups: bytes,
    ) -> int:
        """One reservation, all of which is committed or given back before this returns."""
        session = self._present()
        if session is None:
            return 0
        number, started_s = next(self._numbers), self._clock()
        session.fenced.clear()
        question = Reserve(store=number, parent=parent, keys=join_keys(keys), groups=groups)
        none_copied = Commit(store=number, failed=tuple(range(len(keys))))
        reply = session.ask(question, ReserveReply, self.reply_timeout_s, undo=none_copied)
        if reply is None:
            return 0
        answer_s = self._clock() - started_s
        pairs = [(device_blocks[i], slot) for i, slot in enumerate(reply.slots) if slot >= 0]
        if not pairs:
            return 0
        failed: Sequence[int] = range(len(pairs))
        try:
            # A process that was stopped for minutes comes back when its reservation has ended.
            if number not in session.fenced and not session.lost:
                intact = session.arena.intact([slot for _, slot in pairs], reply.generations)
                if intact == len(pairs):
                    self._copiers.store(kv_cache, pairs)
                    failed = ()
        finally:
            copied_s = self._clock() - started_s
            session.send(Commit(store=number, failed=tuple(failed), seconds=copied_s, answer_s=answer_s))
        return len(pairs) - len(failed)

    def _present(self) -> _Session | None:
        """The session to ask in; joins a manager that came back. None without one, and while an answer is overdue."""
        if not self._session.lost:
            self._session.poll()
        if self._session.lost and (channel := self._finder.attempt()) is not None:
            try:
                welcome = channel.introduce(self._worker_hello, self.reply_timeout_s)
                session = self._join(channel, welcome, self.reply_timeout_s)
            except (KvbmError, OSError) as error:
                channel.close()
                self._finder.log_trouble(str(error))
            else:
                self._copiers.close()
                self._session.close()
                self._session = session
                log.info("connected again to the manager (epoch %x)", session.arena.epoch)
        session = self._session
        return None if session.lost or session.unanswered else session

    def _join(self, worker: Channel, welcome: Welcome, timeout_s: float) -> _Session:
        """The leader's session beside the worker's. Raises KvbmError and OSError; `worker` is closed then."""
        opened: list[Channel | MappedArena] = [worker]
        try:
            arena = MappedArena(welcome, worker.take_fds())
            opened.append(arena)
            leader = Channel.connect(self._socket, self._peer_uids)
            opened.append(leader)
            leader.introduce(self._leader_hello, timeout_s)
            session = _Session(leader, worker, arena)
            deadline_s = time.monotonic() + timeout_s
            while not session.ready:
                if not session.wait(deadline_s - time.monotonic()):
                    raise ManagerUnavailable(f"the manager at {self._socket} did not take us in")
        except BaseException:
            for each in opened:
                each.close()
            raise
        self._finder.welcomed()
        arena.start_populating()
        return session

    def _new_copier(self, cache: DeviceCache) -> Copier:
        from kvbm.transfer import arena_tensor, make_copier

        arena = self._session.arena
        slots = arena_tensor(arena.region, arena.slot_count, arena.slot_bytes)
        return make_copier(cache, slots, by_engine=True, shared_fd=arena.fd)
