"""The sessions of one namespace that clients have named: the blocks that each would ask for next, and since when.

A session here is a client's conversation, not a connection (`session`). It is known by its client's name *and* its
tenant: no tenant reaches another's. Time comes as an argument, there is no I/O, and all of it is bounded: the number of
sessions and of their keys. A tenant that has more than an equal part loses its own first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.hashing import join_keys, split_keys
from kvbm.hints import Hint
from kvbm.protocol import KEYS_PER_MESSAGE_MAX

SESSIONS_MAX = 4096
SESSION_KEYS_MAX = 1 << 20
"""Of all sessions of a namespace together: 32 MB."""
GROWS_S = 30.0
"""So long after a request's end its last blocks may still be stored."""


@dataclass(slots=True, eq=False)
class KnownSession:
    """One session. `chain` has the keys, joined, of the latest request and of what was generated since; where that
    request asked only for the beginning of what was known, also the rest of it.

    The first `grown` blocks are those of the latest request; blocks before `own_from` are known to be wanted by others
    too. `running`: the request has not ended. `look_s` is when blocks are to be brought up, at the `due_s` that was
    expected.
    """

    tenant: str
    name: str
    chain: bytearray = field(default_factory=bytearray)
    grown: int = 0
    own_from: int = 0
    hint: Hint = field(default_factory=Hint)
    running: bool = False
    ended_s: float = 0.0
    due_s: float = 0.0
    look_s: float | None = None
    known: bool = True
    """False once it was dropped."""

    def __len__(self) -> int:
        return len(self.chain) // KEY_BYTES

    def key(self, place: int) -> BlockKey:
        """The key of the block at this place."""
        return BlockKey(bytes(self.chain[place * KEY_BYTES : (place + 1) * KEY_BYTES]))

    def keys(self, start: int = 0) -> list[BlockKey]:
        """The keys from this place on."""
        return split_keys(bytes(self.chain[start * KEY_BYTES :]))

    def common(self, keys: bytes) -> int:
        """How many leading blocks it shares with a chain. Keys are chained: where one agrees, all before it do."""
        low, high = 0, min(len(self.chain), len(keys)) // KEY_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            place = slice((middle - 1) * KEY_BYTES, middle * KEY_BYTES)
            low, high = (middle, high) if self.chain[place] == keys[place] else (low, middle - 1)
        return low


class _Places:
    """Sessions by the key of one of their blocks."""

    def __init__(self) -> None:
        self.by_key: dict[BlockKey, dict[KnownSession, None]] = {}
        self._key_of: dict[KnownSession, BlockKey] = {}

    def put(self, session: KnownSession, place: int) -> None:
        """It is found by the block at this place from now on; by none where it has none there."""
        self.remove(session)
        if 0 <= place < len(session):
            key = session.key(place)
            self._key_of[session] = key
            self.by_key.setdefault(key, {})[session] = None

    def remove(self, session: KnownSession) -> None:
        key = self._key_of.pop(session, None)
        if key is not None:
            same = self.by_key[key]
            del same[session]
            if not same:
                del self.by_key[key]


class KnownSessions:
    """The sessions of one space. Owned by the manager's thread."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, keys_max: int = SESSION_KEYS_MAX) -> None:
        self._sessions_max = sessions_max
        self._keys_max = keys_max
        # The least recently named first.
        self._tenants: dict[str, OrderedDict[str, KnownSession]] = {}
        self._keys_of: dict[str, int] = {}
        self._count_of: dict[str, int] = {}
        self.count = 0
        """Known sessions."""
        self.key_count = 0
        """Keys of all of them."""
        # By the last key of the prompt of a running request, by the block behind which the session grows, and by the
        # first block that only this session is known to want.
        self._running, self._growing, self._own = _Places(), _Places(), _Places()
        self._looks: list[tuple[float, int, KnownSession]] = []
        self._numbers = count()

    def get(self, tenant: str, name: str) -> KnownSession | None:
        """The session that this tenant calls so; it counts as used."""
        of_tenant = self._tenants.get(tenant)
        session = of_tenant.get(name) if of_tenant is not None else None
        if of_tenant is not None and session is not None:
            of_tenant.move_to_end(name)
        return session

    # ---- requests

    def asked(self, tenant: str, hint: Hint, keys: Sequence[BlockKey], reached: int) -> KnownSession | None:
        """A request came for this chain, of which the first `reached` blocks were held before it. Returns its session,
        None where it has none, or where there is no room for it.

        A request for the beginning of what is known does not shorten the chain: a client that asks for a little to
        have the rest brought up does not lose it by that.
        """
        if not self.count and hint.session is None:
            return None
        joined = b""
        mine = None
        if hint.session is not None and keys:
            joined = join_keys(keys)
            mine = self._named(tenant, hint.session)
            shared = mine.common(joined)
            if shared < len(keys):
                # What is held and was not known of it was stored by others.
                mine.own_from = reached if reached > shared else min(mine.own_from, shared)
                self._write(mine, shared, joined[shared * KEY_BYTES :])
            mine.grown, mine.hint = min(len(keys), len(mine)), hint
            mine.running, mine.look_s = True, None
        self._wanted_by_others(keys, joined, mine)
        if mine is not None:
            self._own.put(mine, mine.own_from)
            self._running.put(mine, mine.grown - 1)
            self._growing.put(mine, mine.grown - 1)
            self._make_room(tenant)
        return mine if mine is not None and mine.known else None

    def continued(self, parent: BlockKey | None, keys: Sequence[BlockKey], now_s: float) -> None:
        """These consecutive blocks, behind `parent`, are being stored: a session that ends among them goes on by them.

        Where several sessions end with the same block nobody can say whose they are. The one that ends latest counts:
        what lies before its end is of its prompt.
        """
        growing = self._growing.by_key
        if not growing or not keys or (parent not in growing and growing.keys().isdisjoint(keys)):
            return
        for place in range(len(keys) - 1, -2, -1):
            sessions = growing.get(keys[place]) if place >= 0 else growing.get(parent) if parent else None
            if sessions is None:
                continue
            session, more = next(iter(sessions)), keys[place + 1 :]
            if len(sessions) == 1 and more and (session.running or now_s - session.ended_s <= GROWS_S):
                self._grow(session, join_keys(more))
            return

    def finished(self, key: BlockKey, now_s: float) -> KnownSession | None:
        """The request whose prompt ended with this key has ended; of several, the one that came first. Its session,
        where it has one."""
        session = next(iter(self._running.by_key.get(key, ())), None)
        if session is not None:
            self._running.remove(session)
            session.running, session.ended_s = False, now_s
        return session

    def drop(self, session: KnownSession) -> None:
        """Forget a session."""
        if not session.known:
            return
        session.known, session.look_s = False, None
        of_tenant = self._tenants[session.tenant]
        del of_tenant[session.name]
        self._count_keys(session.tenant, -len(session))
        self._count_of[session.tenant] -= 1
        self.count -= 1
        if not of_tenant:
            del self._tenants[session.tenant], self._keys_of[session.tenant], self._count_of[session.tenant]
        for places in (self._running, self._growing, self._own):
            places.remove(session)
        session.chain = bytearray()  # it may be waited for still

    # ---- time

    def look(self, session: KnownSession, at_s: float) -> None:
        """Its blocks are to be brought up at that time, unless it comes before, or is told another one."""
        session.look_s = at_s
        heapq.heappush(self._looks, (at_s, next(self._numbers), session))
        if len(self._looks) > 2 * self._sessions_max + 64:  # what was said before counts no more
            self._looks = [each for each in self._looks if each[2].look_s == each[0]]
            heapq.heapify(self._looks)

    def next_look(self, now_s: float) -> KnownSession | None:
        """A session whose time has come; each is given once."""
        while self._looks and self._looks[0][0] <= now_s:
            at_s, _, session = heapq.heappop(self._looks)
            if session.look_s == at_s:
                session.look_s = None
                return session
        return None

    # ---- inside

    def _named(self, tenant: str, name: str) -> KnownSession:
        session = self.get(tenant, name)
        if session is None:
            session = KnownSession(tenant, name)
            self._tenants.setdefault(tenant, OrderedDict())[name] = session
            self._keys_of.setdefault(tenant, 0)
            self._count_of[tenant] = self._count_of.get(tenant, 0) + 1
            self.count += 1
        return session

    def _write(self, session: KnownSession, place: int, keys: bytes) -> None:
        """The chain goes on with these keys from `place` on, as far as a request can be long."""
        before = len(session)
        session.chain[place * KEY_BYTES :] = keys[: (KEYS_PER_MESSAGE_MAX - place) * KEY_BYTES]
        self._count_keys(session.tenant, len(session) - before)

    def _grow(self, session: KnownSession, more: bytes) -> None:
        place, count = session.grown, len(more) // KEY_BYTES
        if session.chain[place * KEY_BYTES : (place + count) * KEY_BYTES] != more:
            self._write(session, place, more)
            session.own_from = min(session.own_from, len(session))
        session.grown = min(place + count, len(session))
        self._growing.put(session, session.grown - 1)
        self._own.put(session, session.own_from)
        self._make_room(session.tenant)

    def _wanted_by_others(self, keys: Sequence[BlockKey], joined: bytes, mine: KnownSession | None) -> None:
        """Sessions that are asked for with blocks of their own by others have fewer of these."""
        own = self._own.by_key
        if not own or own.keys().isdisjoint(keys):
            return
        joined = joined or join_keys(keys)
        for key in own.keys() & keys:
            for session in [each for each in own.get(key, ()) if each is not mine]:
                common = session.common(joined)
                session.own_from = max(session.own_from, common)
                self._own.put(session, session.own_from)
                if mine is not None:
                    mine.own_from = max(mine.own_from, common)

    def _make_room(self, tenant: str) -> None:
        while self.count > self._sessions_max:
            self._drop_oldest(self._count_of, self.count, tenant)
        while self.key_count > self._keys_max:
            self._drop_oldest(self._keys_of, self.key_count, tenant)

    def _drop_oldest(self, parts: dict[str, int], total: int, tenant: str) -> None:
        """Drop the session that was named least recently: of this tenant where it has more than an equal part of the
        total, else of the one that has the most."""
        mine = parts.get(tenant, 0)
        largest = tenant if mine * len(parts) > total else max(parts, key=parts.__getitem__)
        self.drop(next(iter(self._tenants[largest].values())))

    def _count_keys(self, tenant: str, more: int) -> None:
        self._keys_of[tenant] += more
        self.key_count += more
