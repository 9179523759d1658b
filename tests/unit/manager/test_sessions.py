"""The table of named sessions: which chain, who grows, whose blocks are shared; its bounds against a dict oracle."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbm.block import BlockKey
from kvbm.hashing import chain_keys
from kvbm.hints import Hint
from kvbm.manager.sessions import GROWS_S, KnownSession, KnownSessions

KEYS = chain_keys(bytes(32), range(400), 4)
FORK = chain_keys(bytes(32), [*range(8), *range(900, 1000)], 4)
"""Its first two blocks are those of `KEYS`."""


def asked(
    sessions: KnownSessions,
    name: str,
    keys: list[BlockKey],
    reached: int = 0,
    tenant: str = "",
    **said: object,
) -> KnownSession:
    session = sessions.asked(tenant, Hint(session=name, **said), keys, reached)  # type: ignore[arg-type]  # a hint's
    assert session is not None
    return session


def test_what_is_generated_belongs_to_the_session() -> None:
    sessions = KnownSessions()
    session = asked(sessions, "a", KEYS[:3])
    sessions.continued(KEYS[2], KEYS[3:5], 0.0)
    assert session.keys() == KEYS[:5]
    sessions.continued(KEYS[4], KEYS[5:6], 0.0)
    assert session.keys() == KEYS[:6]
    assert sessions.finished(KEYS[2], 1.0) is session
    sessions.continued(KEYS[5], KEYS[6:7], 2.0)
    assert session.keys() == KEYS[:7], "the last blocks are stored after the end"
    sessions.continued(KEYS[6], KEYS[7:8], 2.0 + GROWS_S)
    assert session.keys() == KEYS[:7], "later ones are another request's"


def test_blocks_of_the_prompt_and_behind_it_may_come_in_one_store() -> None:
    sessions = KnownSessions()
    session = asked(sessions, "a", KEYS[:3])
    sessions.continued(KEYS[0], KEYS[1:6], 0.0)
    assert session.keys() == KEYS[:6]
    sessions.continued(None, FORK[:5], 0.0)
    assert session.keys() == KEYS[:6]


def test_where_two_sessions_end_with_one_block_nobody_knows_whose_goes_on() -> None:
    sessions = KnownSessions()
    one, other = asked(sessions, "a", KEYS[:3]), asked(sessions, "b", KEYS[:3])
    sessions.continued(KEYS[2], KEYS[3:5], 0.0)
    assert one.keys() == other.keys() == KEYS[:3]
    longer = asked(sessions, "c", KEYS[:5])
    sessions.continued(KEYS[2], KEYS[3:7], 0.0)
    assert (longer.keys(), one.keys()) == (KEYS[:7], KEYS[:3]), "the one that ends latest goes on"


def test_each_end_of_a_request_is_of_one_session() -> None:
    sessions = KnownSessions()
    one, other = asked(sessions, "a", KEYS[:3]), asked(sessions, "b", KEYS[:3])
    assert [sessions.finished(KEYS[2], 0.0) for _ in range(3)] == [one, other, None]
    assert sessions.finished(KEYS[1], 0.0) is None


def test_a_request_for_the_beginning_does_not_shorten_what_is_known() -> None:
    sessions = KnownSessions()
    session = asked(sessions, "a", KEYS[:6])
    asked(sessions, "a", KEYS[:2])
    assert session.keys() == KEYS[:6]
    sessions.continued(KEYS[1], FORK[2:4], 0.0)
    assert session.keys() == FORK[:4], "it goes on in another way"
    asked(sessions, "a", KEYS[:3])
    assert session.keys() == KEYS[:3], "another prompt takes its place"
    assert sessions.key_count == 3


def test_blocks_that_others_ask_for_are_not_its_own() -> None:
    sessions = KnownSessions()
    session = asked(sessions, "a", KEYS[:6], reached=1)
    assert session.own_from == 1
    sessions.asked("", Hint(), FORK[:5], 2)
    assert session.own_from == 2
    sessions.asked("", Hint(), FORK[:5], 2)
    child = asked(sessions, "child", [*KEYS[:4], *FORK[4:6]], reached=4)
    assert (session.own_from, child.own_from) == (4, 4)
    asked(sessions, "a", KEYS[:8], reached=6)
    asked(sessions, "a", KEYS[:2], reached=2)
    assert session.own_from == 4
    asked(sessions, "a", KEYS[:12], reached=10)
    assert session.own_from == 10, "somebody else has stored two blocks that it did not know of"


def test_no_tenant_reaches_another_ones_session() -> None:
    sessions = KnownSessions()
    mine = asked(sessions, "a", KEYS[:3], tenant="one")
    theirs = asked(sessions, "a", FORK[:4], tenant="two")
    assert mine is not theirs
    assert sessions.get("one", "a") is mine
    assert sessions.get("two", "a") is theirs
    assert sessions.get("", "a") is None
    sessions.drop(mine)
    assert sessions.get("two", "a") is theirs
    assert (sessions.count, sessions.key_count) == (1, 4)


def test_a_tenant_that_floods_the_table_loses_its_own() -> None:
    sessions = KnownSessions(sessions_max=8)
    for name in ("a", "b"):
        asked(sessions, name, KEYS[:2], tenant="quiet")
    for number in range(100):
        asked(sessions, str(number), KEYS[:2], tenant="loud")
    assert sessions.count == 8
    assert all(sessions.get("quiet", name) for name in ("a", "b"))
    asked(sessions, "c", KEYS[:2], tenant="quiet")
    assert [bool(sessions.get("loud", str(number))) for number in (94, 95)] == [False, True]


def test_a_session_with_more_keys_than_all_may_have_is_not_kept() -> None:
    sessions = KnownSessions(keys_max=10)
    asked(sessions, "a", KEYS[:6])
    assert sessions.asked("", Hint(session="b"), KEYS[:20], 0) is None
    assert (sessions.count, sessions.key_count) == (0, 0)


def test_looks_are_given_once_at_their_time_and_do_not_pile_up() -> None:
    sessions = KnownSessions(sessions_max=4)
    session = asked(sessions, "a", KEYS[:3])
    for at_s in range(1000):
        sessions.look(session, 1000.0 + at_s)
    assert len(sessions._looks) < 100
    assert sessions.next_look(1998.0) is None
    assert sessions.next_look(2000.0) is session
    assert sessions.next_look(9000.0) is None
    sessions.look(session, 1.0)
    sessions.drop(session)
    assert sessions.next_look(9000.0) is None


TENANTS, NAMES = ("", "one", "two"), ("a", "b", "c", "d")
SESSIONS_MAX, KEYS_MAX = 5, 24


class SessionsMachine(RuleBasedStateMachine):
    """Against dicts of lists, by the rules in words: the latest chain, and who loses what where there is no room."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = KnownSessions(SESSIONS_MAX, KEYS_MAX)
        # Tenants in the order in which they came, and of each its chains in the order in which they were used.
        self.model: dict[str, dict[str, list[BlockKey]]] = {}

    @rule(
        tenant=st.sampled_from(TENANTS),
        name=st.sampled_from(NAMES),
        fork=st.booleans(),
        length=st.integers(1, 12),
        reached=st.integers(0, 12),
    )
    def ask(self, tenant: str, name: str, fork: bool, length: int, reached: int) -> None:
        keys = (FORK if fork else KEYS)[:length]
        self.sessions.asked(tenant, Hint(session=name), keys, min(reached, length))
        chains = self.model.setdefault(tenant, {})
        before = chains.pop(name, [])
        chains[name] = before if before[:length] == keys else keys
        while sum(map(len, self.model.values())) > SESSIONS_MAX:
            self.lose(tenant, {each: len(chains) for each, chains in self.model.items()})
        while sum(map(len, self.chains())) > KEYS_MAX:
            self.lose(tenant, {each: sum(map(len, chains.values())) for each, chains in self.model.items()})

    @rule(tenant=st.sampled_from(TENANTS), name=st.sampled_from(NAMES))
    def look_up(self, tenant: str, name: str) -> None:
        found, chains = self.sessions.get(tenant, name), self.model.get(tenant, {})
        assert (found is not None) == (name in chains)
        if found is not None:
            chains[name] = chains.pop(name)

    @rule(tenant=st.sampled_from(TENANTS), name=st.sampled_from(NAMES))
    def drop(self, tenant: str, name: str) -> None:
        found = self.sessions._tenants.get(tenant, {}).get(name)
        if found is not None:
            self.sessions.drop(found)
            self.sessions.drop(found)
            self.forget(tenant, name)

    @rule(fork=st.booleans(), length=st.integers(1, 12))
    def end(self, fork: bool, length: int) -> None:
        self.sessions.finished((FORK if fork else KEYS)[length - 1], 0.0)

    def lose(self, tenant: str, parts: dict[str, int]) -> None:
        most = max(parts.values())
        over = parts.get(tenant, 0) > sum(parts.values()) / len(parts)
        loser = tenant if over else next(each for each, part in parts.items() if part == most)
        self.forget(loser, next(iter(self.model[loser])))

    def forget(self, tenant: str, name: str) -> None:
        del self.model[tenant][name]
        if not self.model[tenant]:
            del self.model[tenant]

    def chains(self) -> list[list[BlockKey]]:
        return [chain for chains in self.model.values() for chain in chains.values()]

    @invariant()
    def the_same_sessions(self) -> None:
        tenants = self.sessions._tenants
        assert {tenant: list(found) for tenant, found in tenants.items()} == {
            tenant: list(chains) for tenant, chains in self.model.items()
        }
        for tenant, chains in self.model.items():
            for name, chain in chains.items():
                session = tenants[tenant][name]
                assert session.keys() == chain
                assert 0 <= session.own_from <= len(chain)
                assert 0 < session.grown <= len(chain)

    @invariant()
    def within_bounds(self) -> None:
        assert self.sessions.count == len(self.chains()) <= SESSIONS_MAX
        assert self.sessions.key_count == sum(map(len, self.chains())) <= KEYS_MAX

    @invariant()
    def the_indices_name_known_sessions_only(self) -> None:
        for places in (self.sessions._running, self.sessions._growing, self.sessions._own):
            for key, found in places.by_key.items():
                assert found
                assert all(session.known and session.keys().count(key) == 1 for session in found)


TestSessionsMachine = SessionsMachine.TestCase
