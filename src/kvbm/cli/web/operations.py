"""The operations of the admin API: what each takes, answers, and asks of the manager.

Each asks in a session of its own, one at a time (`ManagerGate`), so that the page and the API never put more than one
question at once to a manager.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import msgspec

from kvbm.admin_protocol import (
    BlockPage,
    Describe,
    Description,
    LeasePage,
    ListBlocks,
    ListLeases,
    Moment,
    Pin,
    Pinned,
    Prefetch,
    Prefetched,
    Snapshot,
    SnapshotReply,
    SpaceReport,
    Unpin,
    Unpinned,
    WhyQuery,
    WhyReply,
)
from kvbm.cli import why
from kvbm.cli.inspect import queue_row
from kvbm.cli.managers import SLOT_TIERS, choose_space, parse_tier
from kvbm.cli.prompts import candidates, held_chain
from kvbm.cli.status import ManagerStatus, faults_of
from kvbm.cli.web import documents as doc
from kvbm.cli.web.troubles import Denied
from kvbm.cli.why_prompt import about_prompt
from kvbm.client.admin import Admin
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, SettingsError
from kvbm.hashing import join_keys
from kvbm.hints import tenant_digest
from kvbm.observe.view import look, start_of
from kvbm.protocol import Reset, ResetReply
from kvbm.settings import Settings

ANSWER_S = 5.0
RECENT_S = 5.0
"""Flows and evictions of a live screen are the mean over about so many seconds."""
STATE_S = 0.5
"""A snapshot serves all who ask within so many seconds."""


class ManagerGate:
    """The way to the manager that the settings name."""

    def __init__(self, settings: Settings, clock: Clock, answer_s: float = ANSWER_S) -> None:
        self._settings = settings
        self._clock = clock
        self._answer_s = answer_s
        self._turn = Lock()
        self._state: SnapshotReply | None = None
        self._state_at_s = 0.0
        self._recent: deque[Moment] = deque()
        self.socket_path = settings.manager or ""

    @contextmanager
    def session(self) -> Iterator[Admin]:
        """A session of role admin, when it is our turn. Raises ManagerUnavailable, ManagerRefused."""
        with self._in_turn(), self._connected() as admin:
            yield admin

    def state(self) -> tuple[SnapshotReply, Moment]:
        """The manager's state, of now or of half a second ago, and the moment from which its flows are counted."""
        with self._in_turn():
            now_s = self._clock()
            if self._state is None or now_s - self._state_at_s >= STATE_S:
                try:
                    with self._connected() as admin:
                        self._see(admin.ask(Snapshot(), SnapshotReply))
                except KvbmError:
                    self._state = None
                    raise
                self._state_at_s = now_s
            assert self._state is not None
            return self._state, self._recent[0]

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._answer_s):
            raise ManagerUnavailable(f"other questions to the manager took longer than {self._answer_s:g} s")
        try:
            yield
        finally:
            self._turn.release()

    def _connected(self) -> Admin:
        return Admin(self.socket_path, self._settings, self._answer_s)

    def _see(self, state: SnapshotReply) -> None:
        if self._state is None or self._state.manager.epoch != state.manager.epoch:
            self._recent.clear()
        self._state = state
        self._recent.append(state.now)
        while len(self._recent) > 2 and state.now.at_s - self._recent[1].at_s >= RECENT_S:
            self._recent.popleft()


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `given` is the type of its query (GET) or its body (POST); `heavy` ones are paced,
    and one may take `seconds` where that is long. It can be had at the path `also`, too."""

    method: str
    path: str
    also: str = ""
    summary: str
    given: type[doc.Given]
    answer: type[msgspec.Struct]
    run: Callable[[ManagerGate, Any], msgspec.Struct]
    heavy: bool = False
    seconds: float = 0.0


def _status(gate: ManagerGate, _: doc.Nothing) -> doc.Status:
    try:
        with gate.session() as admin:
            description = admin.ask(Describe(), Description)
    except KvbmError as error:
        return doc.Status(managers=(ManagerStatus(socket=gate.socket_path, faults=[str(error)]),))
    status = ManagerStatus(socket=gate.socket_path, faults=faults_of(description), description=description)
    return doc.Status(managers=(status,))


def _top(gate: ManagerGate, given: doc.TopParameters) -> doc.Top:
    state, recent = gate.state()
    view = look(state, start_of(state) if given.since_start else None, recent if given.live else None)
    return doc.Top(socket=gate.socket_path, **msgspec.structs.asdict(view))


def _why(gate: ManagerGate, given: doc.WhyParameters) -> doc.Why:
    with gate.session() as admin:
        reply = admin.ask(WhyQuery(request=given.request, limit=given.limit), WhyReply)
    if given.request and reply.matching != 1:
        raise SettingsError("REQUEST_ID", given.request, why.not_one(reply))
    return msgspec.convert(why.document(reply), doc.Why)


def _why_prompt(gate: ManagerGate, given: doc.PromptBody) -> doc.RequestFound:
    with gate.session() as admin:
        space = _space(admin, given.namespace, given.model)
        reply = about_prompt(admin, space, given.tokens, "")
    return msgspec.convert(why.document(reply)["requests"][0], doc.RequestFound)


def _blocks(gate: ManagerGate, given: doc.BlocksParameters) -> doc.Blocks:
    wanted = parse_tier(given.tier)
    with gate.session() as admin:
        space = _space(admin, given.namespace)
        request = ListBlocks(fingerprint=space.fingerprint, tier=wanted, start=given.start, limit=given.limit)
        page = admin.ask(request, BlockPage)
    if not page.found:
        raise SettingsError(
            "--tier", given.tier, f"a tier of namespace {space.namespace}: it has no {wanted} tier"
        )
    return doc.Blocks(namespace=space.namespace, tier=wanted, blocks=page.rows, next=page.next)


def _leases(gate: ManagerGate, given: doc.PageParameters) -> doc.Leases:
    with gate.session() as admin:
        page = admin.ask(ListLeases(start=given.start, limit=given.limit), LeasePage)
    after = given.start + len(page.rows)
    following = after if page.rows and after < page.total else -1
    return doc.Leases(leases=page.rows, total=page.total, next=following)


def _namespaces(gate: ManagerGate, _: doc.Nothing) -> doc.Namespaces:
    with gate.session() as admin:
        return doc.Namespaces(namespaces=admin.ask(Describe(), Description).spaces)


def _queues(gate: ManagerGate, _: doc.Nothing) -> doc.Queues:
    with gate.session() as admin:
        described = admin.ask(Describe(), Description)
    rows = [queue_row(space) for space in described.spaces]
    return msgspec.convert({"queues": rows, "fences": described.fences}, doc.Queues)


def _reset(gate: ManagerGate, given: doc.ResetBody) -> doc.ResetDone:
    wanted = parse_tier(given.tier, ("G2", "G3", "all"))
    with gate.session() as admin:
        spaces = admin.ask(Describe(), Description).spaces
        there = sorted(
            {each.tier for space in spaces for each in space.tiers} & set(SLOT_TIERS), reverse=True
        )
        if wanted and spaces and wanted not in there:
            raise SettingsError("--tier", given.tier, f"a tier of this manager: it has no {wanted} tier")
        results = {each: admin.ask(Reset(tier=each), ResetReply) for each in there if wanted in ("", each)}
        return doc.ResetDone(manager=admin.socket_path, tiers=results)


def _pin(gate: ManagerGate, given: doc.PinBody) -> doc.PinDone:
    seconds = given.hours * 3600
    reply, asked = _hold(gate, given, seconds)
    return doc.PinDone(pinned=reply.blocks, ready=reply.ready, blocks=asked, seconds=seconds)


def _prefetch(gate: ManagerGate, given: doc.PrefetchBody) -> doc.PrefetchDone:
    if (given.tokens is msgspec.UNSET) is not bool(given.session):
        raise Denied(409, "nothing can be brought up: either tokens or a session are named")
    if given.salt and not given.session:
        raise Denied(409, "nothing can be brought up: a salt is a session's, and none is named")
    if given.tokens is not msgspec.UNSET:
        prompt = doc.PromptBody(tokens=given.tokens, namespace=given.namespace, model=given.model)
        reply, asked = _hold(gate, prompt, 0.0)
        return doc.PrefetchDone(coming=reply.blocks - reply.ready, ready=reply.ready, blocks=asked)
    with gate.session() as admin:
        space = _space(admin, given.namespace, given.model)
        tenant = tenant_digest(given.salt) if given.salt else ""
        request = Prefetch(fingerprint=space.fingerprint, session=given.session, tenant=tenant)
        found = admin.ask(request, Prefetched)
    if found.refusal:
        raise ManagerRefused(found.refusal)
    return doc.PrefetchDone(coming=found.blocks - found.ready, ready=found.ready, blocks=found.asked)


def _unpin(gate: ManagerGate, given: doc.PromptBody) -> doc.UnpinDone:
    with gate.session() as admin:
        space = _space(admin, given.namespace, given.model)
        last = join_keys(keys[-1] for keys in candidates(space, given.tokens, ""))
        ended = admin.ask(Unpin(fingerprint=space.fingerprint, last_keys=last), Unpinned)
    return doc.UnpinDone(pins=ended.pins, blocks=ended.blocks)


def _unpin_all(gate: ManagerGate, given: doc.UnpinAllBody) -> doc.UnpinDone:
    with gate.session() as admin:
        space = _space(admin, given.namespace, given.model)
        ended = admin.ask(Unpin(fingerprint=space.fingerprint), Unpinned)
    return doc.UnpinDone(pins=ended.pins, blocks=ended.blocks)


def _hold(gate: ManagerGate, given: doc.PromptBody, seconds: float) -> tuple[Pinned, int]:
    """The manager's answer to a pin, or with 0 seconds a prefetch, and the number of the prompt's blocks."""
    with gate.session() as admin:
        space = _space(admin, given.namespace, given.model)
        keys, _ = held_chain(admin, space, given.tokens, "")
        request = Pin(fingerprint=space.fingerprint, keys=join_keys(keys), seconds=seconds)
        reply = admin.ask(request, Pinned)
    if reply.refusal:
        raise ManagerRefused(reply.refusal)
    return reply, len(keys)


def _space(admin: Admin, namespace: str, model: str = "") -> SpaceReport:
    return choose_space(admin.ask(Describe(), Description).spaces, namespace, model)


def _get(path: str, summary: str, given: Any, answer: Any, run: Any, heavy: bool = False) -> Operation:
    return Operation(
        method="GET", path=path, summary=summary, given=given, answer=answer, run=run, heavy=heavy
    )


def _post(
    path: str, summary: str, given: Any, answer: Any, run: Any, seconds: float = 0.0, also: str = ""
) -> Operation:
    return Operation(
        method="POST",
        path=path,
        also=also,
        summary=summary,
        given=given,
        answer=answer,
        run=run,
        heavy=True,
        seconds=seconds,
    )


OPERATIONS: tuple[Operation, ...] = (
    _get("/api/status", "Whether the manager works, what it holds, and for whom", doc.Nothing, doc.Status, _status),
    _get("/api/top", "What kvbm top shows: findings, tiers, flows, prefixes", doc.TopParameters, doc.Top, _top),
    _get("/api/why", "Why requests computed blocks instead of loading them", doc.WhyParameters, doc.Why, _why),
    _get("/api/blocks", "The blocks in one tier", doc.BlocksParameters, doc.Blocks, _blocks, heavy=True),
    _get("/api/leases", "The leases", doc.PageParameters, doc.Leases, _leases),
    _get("/api/namespaces", "The namespaces", doc.Nothing, doc.Namespaces, _namespaces),
    _get("/api/queues", "What is under way", doc.Nothing, doc.Queues, _queues),
    _post("/api/why-prompt", "Why a prompt would match no further", doc.PromptBody, doc.RequestFound, _why_prompt),
    _post("/api/reset", "Drop the blocks of a tier that are not in use", doc.ResetBody, doc.ResetDone, _reset),
    _post("/api/pin", "Keep a prompt's blocks in host memory", doc.PinBody, doc.PinDone, _pin),
    _post("/api/prefetch", "Bring a prompt's or session's blocks to host memory; also at /prefetch", doc.PrefetchBody,
          doc.PrefetchDone, _prefetch, also="/prefetch"),
    _post("/api/unpin", "End the pin of a prompt", doc.PromptBody, doc.UnpinDone, _unpin),
    _post("/api/unpin-all", "End all pins of a namespace", doc.UnpinAllBody, doc.UnpinDone, _unpin_all),
)  # fmt: skip
"""Every operation; a new one is a row here."""
