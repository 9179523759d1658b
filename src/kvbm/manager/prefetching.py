"""Prefetches: blocks that are brought up from below before an engine asks for them, below all that engines wait for.

They queue apart from the reads of lookups. A *piece* of a few blocks at a time is read, and only while nobody waits for
a read: so a lookup waits for one piece at most. Each piece is a lease of its own, which ends when it has arrived; from
then on nothing keeps the blocks but the eviction policy, which has heard what their client expects.

What hints bring up is bounded, until it is asked for: a share of host memory, and a part of that for each tenant.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, islice
from typing import NamedTuple, Protocol

from kvbm.block import BlockKey
from kvbm.clock import Clock
from kvbm.manager.below import Below
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.leases import PREFETCHES, HoldTable, Lease, Owner
from kvbm.manager.lookups import Lookups
from kvbm.manager.pool import SlotPool
from kvbm.manager.sessions import KnownSession
from kvbm.observe.metrics import Metrics

PREFETCHED_SHARE = 0.25
"""The part of host memory that prefetches may take: what is queued or on its way, and of hints also what nobody has
asked for yet."""
PIECE_BLOCKS = 64
LOOKED_AT_ONCE = 4096
"""Blocks that are looked up before others have their turn."""
QUEUED_S_MAX = 600.0
"""A prefetch for which there was no time by then is given up."""
UNASKED_S_MAX = 600.0
"""Blocks that nobody has asked for by then count as brought up in vain, and no more against a bound."""
_OLD_AT_ONCE = 256


class Cause(Enum):
    """Why blocks are brought up: an operator said so, a session's client said so, the session is expected back, or one
    that it is the parent of has ended."""

    OPERATOR = "operator"
    SESSION = "session"
    EXPECTED = "expected"
    PARENT = "parent"


class Tiers(Protocol):
    """The part of a space that prefetches need."""

    leases: HoldTable[Lease]

    @property
    def host_pool(self) -> SlotPool[BlockKey]:
        """The slots of host memory, as it is now."""

    @property
    def disk(self) -> DiskSide | None:
        """The disk, if there is one."""

    @property
    def below(self) -> Below:
        """The tiers below host memory."""

    @property
    def lookups(self) -> Lookups:
        """What finds and leases blocks."""

    def release(self, owner: Owner, number: int) -> Lease | None:
        """End a lease."""


class Needed(NamedTuple):
    """What a prompt needs: the blocks of its `run`, all of them held, stand for `blocks` of the prompt. `ready` of the
    run are in host memory, `below` only below; the others are on their way."""

    run: list[BlockKey]
    blocks: int = 0
    ready: int = 0
    below: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """A run that is brought up; `at` is the next block to be looked at. It may bring `left` blocks more."""

    run: list[BlockKey]
    cause: Cause
    session: KnownSession | None
    left: int
    until_s: float
    at: int = 0

    @property
    def payer(self) -> str | None:
        """Whose part it counts against; an operator has none."""
        return self.session.tenant if self.session is not None else None


@dataclass(slots=True, eq=False)
class _Piece:
    """Blocks of a job that are being read."""

    job: _Job
    keys: list[BlockKey]
    lease: Lease
    asked: set[BlockKey]


class _Unasked(NamedTuple):
    """A block that was brought up and that nobody has asked for since."""

    cause: Cause
    payer: str | None
    since_s: float


class Prefetching:
    """The prefetches of one space. Owned by the manager's thread."""

    def __init__(self, tiers: Tiers, metrics: Metrics, clock: Clock) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._clock = clock
        self._numbers = count(1)
        self._jobs: deque[_Job] = deque()
        self._planned: dict[KnownSession, Cause] = {}
        self._planning: Generator[None, None, None] | None = None
        self._piece: _Piece | None = None
        self._unasked: dict[BlockKey, _Unasked] = {}
        # Blocks that are queued or being read; and those of hints, with those that nobody has asked for.
        self._coming = 0
        self._taken: Counter[str] = Counter()

    @property
    def blocks_max(self) -> int:
        """How many blocks prefetches may have on their way, and hints unasked."""
        return int(self._tiers.host_pool.slot_count * PREFETCHED_SHARE)

    @property
    def coming(self) -> int:
        """Blocks that are queued or being read."""
        return self._coming

    def room(self, payer: str | None) -> int:
        """How many blocks more this tenant, or an operator (None), may have brought up now.

        A tenant's part is that of one more tenant than there are: somebody who comes finds room.
        """
        room = self.blocks_max - self._coming
        if payer is not None:
            part = self.blocks_max // (len({payer, *self._taken}) + 1)
            room = min(room, self.blocks_max - self._taken.total(), part - self._taken[payer])
        return max(0, room)

    def needed(self, keys: Sequence[BlockKey]) -> Generator[None, None, Needed]:
        """What of this prompt is held, and where; a long one is looked up in several turns."""
        tiers = self._tiers
        run, of_prompt = yield from tiers.lookups.prompt_run(keys)
        held = ready = below = 0
        for start in range(0, len(run), LOOKED_AT_ONCE):
            if start:
                yield
            part = run[start : start + LOOKED_AT_ONCE]
            above = tiers.host_pool.held(part)
            deeper = tiers.below.held(part)
            missing = next((n for n, there in enumerate(above) if not there and not deeper[n]), len(part))
            held += missing
            below += above.count(0, 0, missing)
            ready += sum(slot is not None for slot in tiers.host_pool.find_all(part[:missing]))
            if missing < len(part):
                break
        return Needed(run[:held], of_prompt if held == len(run) else min(held, of_prompt), ready, below)

    def begin(self, needed: Needed, cause: Cause, session: KnownSession | None = None) -> int:
        """Queue a prefetch, in place of an earlier one for this session; how many blocks it will bring up. Those that
        there is no room for are counted."""
        # Sessions may be dropped for want of room: then nothing bounds the keys that their prefetches hold.
        for job in [job for job in self._jobs if job.session is not None and not job.session.known]:
            self._end(job)
        if session is not None:
            self._end_of(session)
        payer = session.tenant if session is not None else None
        allowed = min(needed.below, self.room(payer))
        self._refused(needed.below - allowed, cause)
        if allowed:
            self._count(payer, allowed)
            self._coming += allowed
            until_s = self._clock() + QUEUED_S_MAX
            self._jobs.append(_Job(needed.run, cause, session, allowed, until_s))
        return allowed

    def later(self, session: KnownSession, cause: Cause) -> None:
        """Look up what a session needs, when there is time, and bring it up."""
        self._planned[session] = cause

    def cancel(self, session: KnownSession) -> None:
        """The session has come, or goes on no more: what is still queued for it is left."""
        self._planned.pop(session, None)
        self._end_of(session)

    def advance(self) -> bool:
        """Deal with a piece that has arrived, and begin the next one. Whether it is to be called again at once."""
        if self._piece is not None:
            if not self._arrived(self._piece):
                return False
            self._piece = None
        if self._unasked:
            self._forget_old()
        if self._planning is None and self._planned:
            session = next(iter(self._planned))
            self._planning = self._plan(session, self._planned.pop(session))
        if self._planning is not None:
            if next(self._planning, self._planning) is self._planning:
                self._planning = None
            return True
        if not self._jobs or self._tiers.below.rising_count:
            return False  # engines wait for what is being read
        return self._go_on(self._jobs[0])

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """An engine asks for these blocks."""
        if self._piece is not None:
            self._piece.asked.update(set(self._piece.keys).intersection(keys))
        self._leave(keys, "asked")

    def left(self, keys: Sequence[BlockKey]) -> None:
        """These blocks left host memory."""
        self._leave(keys, "evicted")

    # ---- inside

    def _plan(self, session: KnownSession, cause: Cause) -> Generator[None, None, None]:
        needed = yield from self.needed(session.keys())
        if session.known and not session.running:
            self.begin(needed, cause, session)

    def _go_on(self, job: _Job) -> bool:
        """Read the job's next piece. Whether there is something left to be done at once."""
        host = self._tiers.host_pool
        part = job.run[job.at : job.at + LOOKED_AT_ONCE]
        here = host.held(part)
        first = here.find(0)
        if not part or job.left <= 0 or job.until_s <= self._clock():
            self._refused(job.left if job.until_s <= self._clock() else 0, job.cause)
            self._end(job)
            return True
        if first < 0:
            job.at += len(part)
            return True
        end = here.find(1, first)
        wanted = part[first : end if end >= 0 else len(part)][: min(PIECE_BLOCKS, job.left)]
        wanted = wanted[: len(self._tiers.below.leading(wanted))]
        job.at += first
        before = job.run[job.at - 1] if job.at else None
        lease = self._tiers.lookups.bring_piece(PREFETCHES, next(self._numbers), wanted, before)
        if lease is None:  # a hole, behind which nothing is of use; or no slot can be had
            self._refused(min(len(wanted), job.left), job.cause)
            self._end(job)
            return True
        keys = wanted[: len(lease.slots)]
        job.at += len(keys)
        job.left -= len(keys)
        self._piece = _Piece(job, keys, lease, set())
        return lease.final  # it was refused at once

    def _arrived(self, piece: _Piece) -> bool:
        """Whether the piece has ended; its blocks are counted then."""
        lease, job, now_s = piece.lease, piece.job, self._clock()
        held = self._tiers.leases.get(lease.owner, lease.number) is lease
        if held and not lease.final and lease.deadline_s > now_s:
            return False
        arrived = lease.keys[: lease.ready]
        if held:
            self._tiers.release(lease.owner, lease.number)
        self._coming -= len(piece.keys)
        self._metrics.add("kvbm_prefetched_blocks_total", len(arrived), cause=job.cause.value)
        fresh = [
            key for key, there in zip(arrived, self._tiers.host_pool.held(arrived), strict=True) if there
        ]
        unasked = [key for key in fresh if key not in piece.asked and key not in self._unasked]
        self._fate(len(arrived) - len(fresh), job.cause, "evicted")
        self._fate(sum(key in piece.asked for key in fresh), job.cause, "asked")
        self._unasked.update(dict.fromkeys(unasked, _Unasked(job.cause, job.payer, now_s)))
        self._count(job.payer, len(unasked) - len(piece.keys))
        if len(arrived) < len(piece.keys):  # one failed: nothing behind it is of use
            self._end(job)
        return True

    def _end(self, job: _Job) -> None:
        """The job brings up nothing more; a piece that is being read goes on."""
        self._coming -= job.left
        self._count(job.payer, -job.left)
        job.left = 0
        if job in self._jobs:
            self._jobs.remove(job)

    def _end_of(self, session: KnownSession) -> None:
        for job in [each for each in self._jobs if each.session is session]:
            self._end(job)

    def _leave(self, keys: Sequence[BlockKey], fate: str) -> None:
        if not self._unasked or self._unasked.keys().isdisjoint(keys):
            return
        for key in keys:
            entry = self._unasked.pop(key, None)
            if entry is not None:
                self._fate(1, entry.cause, fate)
                self._count(entry.payer, -1)

    def _forget_old(self) -> None:
        before_s = self._clock() - UNASKED_S_MAX
        old = []
        for key, entry in islice(self._unasked.items(), _OLD_AT_ONCE):
            if entry.since_s > before_s:
                break
            old.append(key)
        self._leave(old, "unasked")

    def _count(self, payer: str | None, more: int) -> None:
        if payer is None or not more:
            return
        self._taken[payer] += more
        if not self._taken[payer]:
            del self._taken[payer]

    def _fate(self, blocks: int, cause: Cause, fate: str) -> None:
        self._metrics.add("kvbm_prefetched_blocks_ended_total", blocks, cause=cause.value, fate=fate)

    def _refused(self, blocks: int, cause: Cause) -> None:
        self._metrics.add("kvbm_prefetch_refused_blocks_total", blocks, cause=cause.value)
