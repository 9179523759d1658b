"""Blocks that a shared manager keeps: the caller's thread speaks the protocol, as an engine of one rank.

There are two sessions, as an engine has: the *leader's* asks for leases and slots, the *worker's* maps the host tier's
memory and answers fences. Copies go between the KV cache and that memory, and a slot's generation is compared before
and after each: bytes of a slot that changed hands are never taken for the block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, cast

from kvbm.block import BlockKey, counted_as_disk
from kvbm.client.arena import MappedArena
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerFinder
from kvbm.client.mirror import Mirror
from kvbm.clock import Clock
from kvbm.errors import CopyHung, KvbmError, ManagerUnavailable
from kvbm.hashing import EngineKeys, join_keys
from kvbm.hints import UNHINTED, ClientHint, as_mapping, as_tuples, from_tuples
from kvbm.layout import BlockLayout, Namespace
from kvbm.library.attachment import Attachment
from kvbm.library.backend import Looked, Run, Stored
from kvbm.library.copiers import Copiers
from kvbm.library.layer_load import LayerLoad
from kvbm.library.session import Session, SharedRun
from kvbm.protocol import (
    HELD,
    KEYS_PER_MESSAGE_MAX,
    PROTOCOL_VERSION,
    STORED_KEYS_MAX,
    Commit,
    Finished,
    Hello,
    Lookup,
    LookupReply,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    Welcome,
)

if TYPE_CHECKING:
    import torch

    from kvbm.transfer import Copier, DeviceCache

log = logging.getLogger("kvbm.library")

ARRIVAL_S_MAX = 30.0
FLUSH_POLL_S = 0.01


class SharedSpace:
    """A `Backend` at the manager that `attachment` finds. Its failures are misses; the next call joins it again.

    Raises ManagerUnavailable, ManagerRefused or ManagerUntrusted when it cannot be joined at first.
    """

    def __init__(
        self,
        attachment: Attachment,
        layout: BlockLayout,
        namespace: Namespace,
        join_timeout_s: float,
        reply_timeout_s: float,
        clock: Clock,
        mirror: Mirror | None = None,
    ) -> None:
        self._attachment = attachment
        self._mirror = mirror
        self._layout = layout
        self._namespace = namespace
        self.reply_timeout_s = reply_timeout_s
        self.stays = 0
        self._clock = clock
        self._numbers = count(1)
        self._copiers = Copiers(layout, self._new_copier)
        engine = attachment.engine
        self._leader_hello = Hello(version=PROTOCOL_VERSION, role="leader", engine=engine)
        self._worker_hello = Hello(
            version=PROTOCOL_VERSION,
            role="worker",
            engine=engine,
            namespace=namespace,
            layout=layout,
            data_parallel_rank=attachment.data_parallel_rank,
            kind=attachment.kind,
        )
        self._finder = ManagerFinder(
            attachment.address, attachment.settings, attachment.environment, clock, attachment.namespaces
        )
        patience_s = max(join_timeout_s, reply_timeout_s)
        joined = self._finder.establish(self._worker_hello, join_timeout_s, time.sleep, patience_s)
        self._session = self._join(*joined, patience_s)

    def lookup(
        self, keys: list[BlockKey], skip: int, told: EngineKeys | None = None, asker: ClientHint = UNHINTED
    ) -> Looked:
        session = self._present()
        asked = join_keys(keys[:KEYS_PER_MESSAGE_MAX])
        if session is None or not asked:
            return Looked()
        number = next(self._numbers)
        run = session.runs[number] = SharedRun(session, number)  # before its progress can come
        question = Lookup(
            lookup=number,
            keys=asked,
            skip=min(skip, len(keys), KEYS_PER_MESSAGE_MAX),
            request=told.request if told is not None else "",
            prompt=told.prompt if told is not None else b"",
            extras=dict(told.extras) if told is not None else {},
            tenant=asker.tenant,
            hint=as_mapping(asker.hint),
            verdicts=as_tuples(asker.verdicts),
        )
        asked_s = self._clock()
        found = session.ask(question, LookupReply, self.reply_timeout_s, undo=Release(lookup=number))
        verdicts = from_tuples(found.verdicts) if found is not None else ()
        if found is None or not found.slots:
            del session.runs[number]
            return Looked(verdicts=verdicts)
        run.answer_s = self._clock() - asked_s
        run.slots, run.generations = found.slots, found.generations
        run.sources = counted_as_disk(found.sources) if session.staging else found.sources
        run.ready, run.boundary = max(run.ready, found.ready), found.boundary
        return Looked(run, verdicts)

    def descriptors(self) -> tuple[int, ...]:
        return self._session.descriptors()

    def refresh(self) -> None:
        self._present()

    def ready(self, run: Run) -> tuple[int, bool]:
        assert isinstance(run, SharedRun)
        if run.session is not self._session:
            return 0, False
        if not run.final:
            run.session.poll()
        return min(run.ready, len(run.slots)), not (run.final or run.session.lost)

    def load(
        self, run: Run, kv_cache: Mapping[str, torch.Tensor], device_blocks: Sequence[int], first: int = 0
    ) -> int:
        assert isinstance(run, SharedRun)
        session, started_s = run.session, self._clock()
        if session is not self._session:
            return 0  # promised out of the memory of another life
        end = min(len(run.slots), first + len(device_blocks))
        deadline_s = time.monotonic() + ARRIVAL_S_MAX
        while run.ready < end and not run.final and session.wait(deadline_s - time.monotonic()):
            pass
        slots, generations = run.slots[first : min(run.ready, end)], run.generations[first:]
        arrived = session.arena.intact(slots, generations[: len(slots)])
        if arrived:
            pairs = list(zip(device_blocks[:arrived], slots[:arrived], strict=True))
            self._copiers.of(kv_cache).load(pairs)
            # A slot that changed hands while we copied may have given us anything.
            arrived = session.arena.intact(slots[:arrived], generations[:arrived])
        run.note_load(first, arrived, end - first - arrived)
        run.seconds += self._clock() - started_s
        run.wait_s = run.answer_s + run.seconds  # what the program did in between is its own
        return arrived

    def load_by_layer(
        self, wanted: Sequence[tuple[Run, Sequence[int]]], kv_cache: Mapping[str, torch.Tensor]
    ) -> LayerLoad | None:
        session, started_s = self._session, self._clock()
        runs = [(cast(SharedRun, run), blocks) for run, blocks in wanted]
        if any(run.session is not session or run.ready < len(blocks) for run, blocks in runs):
            return None
        pairs = [pair for run, blocks in runs for pair in zip(blocks, run.slots, strict=False)]
        slots = [slot for _, slot in pairs]
        generations = [each for run, blocks in runs for each in run.generations[: len(blocks)]]

        def intact() -> bool:
            return session.arena.intact(slots, generations) == len(slots)

        def ended(right: bool) -> None:
            for run, blocks in runs:
                run.note_load(0, len(blocks) if right else 0, 0 if right else len(blocks))
                run.seconds += self._clock() - started_s
                run.wait_s = run.answer_s + run.seconds

        return LayerLoad(self._copiers.of(kv_cache), pairs, intact, ended) if intact() else None

    def release(self, run: Run) -> None:
        assert isinstance(run, SharedRun)
        run.session.runs.pop(run.number, None)
        unused = max(0, len(run.slots) - run.loaded - run.failed)
        run.session.send(
            Release(
                lookup=run.number,
                first=run.first,
                loaded=run.loaded,
                failed=run.failed,
                seconds=run.seconds,
                answer_s=run.answer_s,
                wait_s=run.wait_s,
                unloaded={run.left_because: unused} if unused else {},
            )
        )

    def finished(self, key: BlockKey) -> None:
        self._session.send(Finished(key=key))

    def store(
        self,
        keys: list[BlockKey],
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        parent: BlockKey | None = None,
        groups: bytes = b"",
        tenant: str = "",
    ) -> list[Stored]:
        outcomes: list[Stored] = []
        for start in range(0, len(keys), STORED_KEYS_MAX):
            end = start + STORED_KEYS_MAX
            before = keys[start - 1] if start else parent or b""
            outcomes += self._store(
                before, keys[start:end], kv_cache, device_blocks[start:end], groups[start:end], tenant
            )
        return outcomes

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
            raise ManagerUnavailable(
                f"no manager answers at {self._attachment.address.socket_path}: nothing was cleared"
            )
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
        tenant: str,
    ) -> list[Stored]:
        """One reservation, all of which is committed or given back before this returns."""
        session, refused = self._present(), [Stored.REFUSED] * len(keys)
        if session is None:
            return refused
        number, started_s = next(self._numbers), self._clock()
        session.fenced.clear()
        question = Reserve(store=number, parent=parent, keys=join_keys(keys), groups=groups, tenant=tenant)
        none_copied = Commit(store=number, failed=tuple(range(len(keys))))
        reply = session.ask(question, ReserveReply, self.reply_timeout_s, undo=none_copied)
        if reply is None:
            return refused
        answer_s = self._clock() - started_s
        pairs = [(device_blocks[i], slot) for i, slot in enumerate(reply.slots) if slot >= 0]
        outcomes = [Stored.HELD if slot == HELD else Stored.REFUSED for slot in reply.slots]
        if not pairs:
            return outcomes
        failed: Sequence[int] = range(len(pairs))
        try:
            # A process that was stopped for minutes comes back when its reservation has ended.
            if number not in session.fenced and not session.lost:
                intact = session.arena.intact([slot for _, slot in pairs], reply.generations)
                if intact == len(pairs):
                    self._copiers.store(kv_cache, pairs)
                    failed = ()
        except CopyHung:
            session.give_up()  # nothing is committed or given back
            raise
        finally:
            copied_s = self._clock() - started_s
            session.send(Commit(store=number, failed=tuple(failed), seconds=copied_s, answer_s=answer_s))
        if not failed:
            outcomes = [Stored.COPIED if slot >= 0 else outcomes[i] for i, slot in enumerate(reply.slots)]
        return outcomes

    def _present(self) -> Session | None:
        """The session to ask in; joins a manager that came back. None without one, while an answer is overdue, and once
        a store hangs."""
        if self._session.hangs:
            return None
        if not self._session.lost:
            self._session.poll()
        if self._session.lost and not self.stays and (channel := self._finder.attempt()) is not None:
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

    def _join(self, worker: Channel, welcome: Welcome, timeout_s: float) -> Session:
        """The leader's session beside the worker's. Raises KvbmError and OSError; `worker` is closed then."""
        opened: list[Channel | MappedArena] = [worker]
        try:
            path, settings = self._attachment.address.socket_path, self._attachment.settings
            arena = MappedArena(welcome, worker.take_fds(), huge_pages=settings.huge_pages)
            opened.append(arena)
            leader = Channel.connect(path, settings.trusted_peer_uids)
            opened.append(leader)
            leader.introduce(self._leader_hello, timeout_s)
            session = Session(leader, worker, arena, self._mirror)
            deadline_s = time.monotonic() + timeout_s
            while not session.ready:
                if not session.wait(deadline_s - time.monotonic()):
                    raise ManagerUnavailable(f"the manager at {path} did not take us in")
        except BaseException:
            for each in opened:
                each.close()
            raise
        self._finder.welcomed()
        arena.start_populating()
        return session

    def _new_copier(self, cache: DeviceCache) -> Copier:
        from kvbm.transfer import arena_tensor, make_copier

        arena, runtime_dir = self._session.arena, self._attachment.settings.runtime_dir
        slots = arena_tensor(arena.region, arena.slot_count, arena.slot_bytes)
        return make_copier(cache, slots, by_engine=True, runtime_dir=runtime_dir)
