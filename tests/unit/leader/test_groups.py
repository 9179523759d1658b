"""A hybrid model at the leader: which blocks are offered, promised, loaded and given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvbm.block import KEY_BYTES, Tier
from kvbm.grouping import Grouping, Place
from kvbm.groups import Group, GroupKind
from kvbm.leader.stores import PINNED_UNANSWERED_S_MAX
from kvbm.leader.tracked import Answer, Scheduled, StateOffer
from kvbm.protocol import REFUSED, Commit, Lookup, LookupReply, Release, Reserve
from kvbm.step_plan import StepPlan, StepReport
from rigs.leader import HASHES, Bench, ScriptedDevice

GROUPS = (Group(), Group(kind=GroupKind.WINDOW, reach=3), Group(kind=GroupKind.STATE))
GROUPING = Grouping(GROUPS)
TABLES = [list(range(100, 140)), list(range(200, 240)), list(range(300, 340))]
"""Of all tokens, of the window, of recurrent states."""


class GroupsBench(Bench):
    """A leader of an engine with these groups; `tables` are those of every request."""

    def __init__(self, groups: tuple[Group, ...] = GROUPS, **modes: Any) -> None:
        self.device = ScriptedDevice()
        self.tables = [list(table) for table in TABLES]
        super().__init__(groups=groups, device=self.device, **modes)

    def arrives(self, request: str = "r", blocks: int = 8, before_tail: int = 8) -> Lookup:
        self.leader.request_added(request, HASHES[:blocks], b"", 0, before_tail=before_tail)
        (lookup,) = self.manager.said()
        assert isinstance(lookup, Lookup)
        return lookup

    def found(self, lookup: Lookup, boundary: int, full: int = 0, ready: int | None = None) -> None:
        run = GROUPING.run(boundary, lookup.skip) if boundary else []
        slots = tuple(range(len(run)))
        self.manager.send(
            LookupReply(
                lookup=lookup.lookup,
                slots=slots,
                generations=tuple(50 + slot for slot in slots),
                ready=len(slots) if ready is None else ready,
                sources=bytes((Tier.HOST,)) * len(slots),
                boundary=boundary,
                full=full or boundary,
            )
        )

    def computes(self, complete: int, *states: StateOffer, request: str = "r") -> StepPlan:
        entry = Scheduled(request, complete, lambda: TABLES[0], lambda: self.tables, states)
        return self.leader.step([entry], (), 0, False)

    def refuse(self, reserve: Reserve) -> None:
        self.grant(reserve, (REFUSED,) * (len(reserve.keys) // KEY_BYTES))

    def reserved(self) -> list[tuple[list[Place], Reserve]]:
        """What the leader asked slots for, told by its keys."""
        names = {
            key: place
            for place in GROUPING.chain(0, 40) + [Place(g, b) for g in (1, 2) for b in range(40)]
            for key in GROUPING.keys(HASHES, [place])
        }
        asked = [message for message in self.manager.said() if isinstance(message, Reserve)]
        return [
            ([names[message.keys[i : i + 32]] for i in range(0, len(message.keys), 32)], message)  # type: ignore[index]
            for message in asked
        ]


@pytest.fixture
def bench() -> Iterator[GroupsBench]:
    bench = GroupsBench()
    yield bench
    bench.leader.close()
    bench.manager.close()


def test_all_tokens_are_offered_as_they_come_and_the_window_where_the_prompt_ends(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    assert bench.leader.matched("r", 0, 8) == Answer()
    bench.computes(4)
    assert [places for places, _ in bench.reserved()] == [[Place(0, b) for b in range(4)]]
    bench.computes(8)
    (chain, _), (tail, message) = bench.reserved()
    assert chain == [Place(0, b) for b in range(4, 8)]
    assert tail == [Place(1, b) for b in (7, 6, 5)], "what lies before is worth nothing"
    assert message.parent == HASHES[7], "it is of no use without all tokens"
    assert message.groups == bytes((1, 1, 1))
    assert message.hashes == b"".join((HASHES[7], HASHES[6], HASHES[5]))
    bench.computes(9)
    assert [places for places, _ in bench.reserved()] == [], "the hash of a ninth block is not known"


def test_where_the_request_leaves_what_is_stored_others_may_leave_too(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 2, full=5)
    assert bench.leader.matched("r", 0, 8) == Answer(blocks=2)
    bench.leader.allocated("r", 0, ())
    bench.computes(6)
    assert [places for places, _ in bench.reserved()] == [
        [Place(0, b) for b in range(6)],
        [Place(1, b) for b in (4, 3, 2)],
    ]


def test_the_end_of_a_turn_is_where_the_next_one_begins(bench: GroupsBench) -> None:
    bench.found(bench.arrives(before_tail=7), 0)
    bench.computes(8)
    assert [places for places, _ in bench.reserved()][1] == [Place(1, b) for b in (6, 5, 4)]
    bench.leader.finished("r", 5, bench.tables, 8)
    ((tail, _),) = bench.reserved()
    assert tail == [Place(1, b) for b in (7, 6, 5)]


def test_blocks_that_the_engine_has_dropped_are_not_offered(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.tables[1][5] = 0
    bench.computes(8)
    assert [places for places, _ in bench.reserved()] == [[Place(0, b) for b in range(8)]]


def test_a_state_is_pinned_until_it_is_copied(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.computes(4, StateOffer(2, 399, 4))
    (_, _), (places, message) = bench.reserved()
    assert places == [Place(2, 3)]
    assert message.parent == HASHES[3]
    assert bench.device.pinned == [399]
    assert bench.computes(4).stores == (), "the manager has not answered"
    bench.grant(message)
    (plan,) = bench.computes(4).stores
    assert plan.device_blocks == (399,)
    assert bench.device.pinned == [399]
    bench.report(plan)
    assert bench.device.pinned == []
    assert any(isinstance(said, Commit) and said.store == message.store for said in bench.manager.said())


@pytest.mark.parametrize("boundary", [3, 7])
def test_a_state_inside_of_a_block_is_nobodys(boundary: int) -> None:
    """vLLM keeps such states where its hits may end inside of a block: the key of no block names their tokens."""
    wide = GroupsBench(groups=(Group(span=4), Group(kind=GroupKind.STATE, span=4)))
    wide.found(wide.arrives(), 0)
    wide.computes(8, StateOffer(1, 399, boundary))
    wide.computes(8, StateOffer(1, 398, 8))
    assert wide.device.pinned == [398]
    states = [said.keys for said in wide.manager.said() if isinstance(said, Reserve) and 1 in said.groups]
    assert states == [
        Grouping((Group(span=4), Group(kind=GroupKind.STATE, span=4))).keys(HASHES, [Place(1, 1)])[0]
    ]
    wide.leader.close()
    wide.manager.close()


def test_a_hit_that_ends_inside_of_a_block_is_the_engines_alone() -> None:
    wide = GroupsBench(groups=(Group(span=4), Group(kind=GroupKind.STATE, span=4)))
    wide.arrives()
    assert wide.leader.matched("r", 3, 8) == Answer()
    assert wide.leader.matched("r", 0, 8) == Answer(later=True)
    wide.leader.close()
    wide.manager.close()


def test_what_the_manager_answers_after_a_request_has_ended_is_copied(bench: GroupsBench) -> None:
    """Its blocks are pinned till then, and given up after a while: an idle engine steps on until that."""
    bench.found(bench.arrives(), 0)
    bench.computes(8, StateOffer(2, 399, 8))
    reserves = [message for _, message in bench.reserved()]
    assert bench.device.pinned == [207, 206, 205, 399]
    bench.leader.finished("r", 1, bench.tables, 8)
    assert len(bench.device.pinned) == 12
    bench.clock.advance(PINNED_UNANSWERED_S_MAX - 0.1)
    bench.grant(reserves[2])
    plan = bench.step()
    (store,) = plan.stores
    assert plan.released == (), "nobody overwrites what is pinned"
    assert len(bench.device.pinned) == 12
    bench.report(store)
    assert bench.device.pinned.count(399) == 0
    assert bench.leader.stores.pending
    bench.clock.advance(0.2)
    assert bench.step().stores == ()
    assert bench.device.pinned == []
    assert not bench.leader.stores.pending
    commits = [said for said in bench.manager.said() if isinstance(said, Commit)]
    assert {said.store for said in commits if not said.failed} == {reserves[2].store}
    assert {reserves[0].store, reserves[1].store} == {said.store for said in commits if said.failed}


def test_a_request_that_ends_with_slots_is_copied_in_the_next_step(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.computes(8, StateOffer(2, 399, 8))
    for _, reserve in bench.reserved():
        bench.grant(reserve)
    bench.leader.receive()
    bench.leader.finished("r", 1, bench.tables, 8)
    assert len(bench.device.pinned) == 12
    plan = bench.step()
    assert (len(plan.stores), plan.released) == (3, ())
    for store in plan.stores:
        bench.report(store)
    assert bench.device.pinned == []


@pytest.mark.parametrize("zeroes", [False, True])
def test_an_engine_that_empties_its_cache_gets_all_blocks_back(zeroes: bool) -> None:
    """What has no slots yet is given up, and the next step waits for what ranks copy at this moment. Where the engine
    zeroes blocks, such copies are not committed."""
    bench = GroupsBench(zeroes=zeroes)
    bench.found(bench.arrives(), 0)
    bench.computes(8, StateOffer(2, 399, 8))
    chain, tail, state = (message for _, message in bench.reserved())
    bench.grant(tail)
    (plan,) = bench.computes(8).stores
    assert len(bench.device.pinned) == (12 if zeroes else 4)
    assert bench.leader.stores.give_up_pins()
    assert bench.device.pinned == []
    assert not bench.leader.stores.give_up_pins()
    assert bench.step().released == (plan.store,)
    bench.report(plan)
    failed = {said.store: said.failed for said in bench.manager.said() if isinstance(said, Commit)}
    given_up = [state.store, *([chain.store] if zeroes else [])]
    assert set(failed) == {tail.store, *given_up}
    assert failed[tail.store] == ((0, 1, 2) if zeroes else ())
    bench.leader.close()
    bench.manager.close()


def test_a_silent_manager_keeps_no_block_from_the_engine_for_long() -> None:
    bench = GroupsBench(zeroes=True)
    bench.found(bench.arrives(), 0)
    bench.computes(8)
    bench.leader.finished("r", 1, bench.tables, 8)
    bench.clock.advance(1.0)
    bench.step()
    assert len(bench.device.pinned) == 11
    bench.clock.advance(1.5)
    bench.step()
    assert bench.device.pinned == []
    bench.leader.close()
    bench.manager.close()


def test_without_pins_a_store_is_made_in_the_next_step_or_never() -> None:
    bench = GroupsBench()
    bench.device.pin = lambda blocks: False  # type: ignore[method-assign]
    bench.found(bench.arrives(), 0)
    bench.computes(4, StateOffer(2, 399, 4))
    chain, state = (message for _, message in bench.reserved())
    bench.grant(state)
    plan = bench.computes(4, StateOffer(2, 398, 4))
    assert [store.device_blocks for store in plan.stores] == [(399,)]
    assert plan.released == (plan.stores[0].store,)
    ((_, second),) = [(p, m) for p, m in bench.reserved() if m.store != chain.store]
    assert bench.computes(4).stores == ()
    assert [said.store for said in bench.manager.said() if isinstance(said, Commit)] == [second.store]
    bench.leader.close()
    bench.manager.close()


def test_an_engine_that_zeroes_blocks_hands_out_none_that_is_not_copied() -> None:
    """It may zero them before we read them, also those of a request that has ended."""
    bench = GroupsBench(zeroes=True)
    bench.found(bench.arrives(), 0)
    bench.computes(8)
    chain, tail = (message for _, message in bench.reserved())
    bench.leader.finished("r", 1, bench.tables, 8)
    everything = [*range(100, 108), 207, 206, 205]
    assert bench.device.pinned == everything
    assert bench.step().stores == (), "the manager has not answered"
    bench.grant(chain)
    bench.grant(tail)
    plan = bench.step()
    assert plan.released == (), "no step need wait for copies"
    assert [block for store in plan.stores for block in store.device_blocks] == everything
    for store in plan.stores:
        bench.report(store)
    assert bench.device.pinned == []
    bench.device.pin = lambda blocks: False  # type: ignore[method-assign]
    bench.manager.said()
    bench.arrives("s")
    bench.computes(8, request="s")
    assert bench.reserved() == [], "what cannot be pinned is not stored"
    bench.leader.close()
    bench.manager.close()


def test_a_boundary_is_loaded_as_a_whole(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 6)
    assert bench.leader.matched("r", 0, 8) == Answer(blocks=6)
    assert bench.leader.promised_sources("r", 6) == bytes((Tier.HOST,)) * 6
    bench.leader.allocated("r", 6, TABLES[0], bench.tables)
    (plan,) = bench.step().loads
    assert plan.device_blocks == (*range(100, 106), 205, 305, 204, 203)
    assert plan.slots == tuple(range(10))
    bench.leader.updated(StepReport(loaded={"r": 0.5}), ["r"], set())
    (release,) = [said for said in bench.manager.said() if isinstance(said, Release)]
    assert (release.loaded, release.failed) == (10, 0)
    assert bench.leader.lookups.loaded_blocks[Tier.HOST] == 6
    bench.computes(8)
    (chain, _), (tail, _) = bench.reserved()
    assert chain == [Place(0, 6), Place(0, 7)], "what was loaded is held"
    assert tail == [Place(1, 7), Place(1, 6), Place(1, 5)]


def test_a_load_that_fails_is_no_load(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 6)
    bench.leader.matched("r", 0, 8)
    bench.leader.allocated("r", 6, TABLES[0], bench.tables)
    bench.step()
    bench.leader.updated(StepReport(loaded={"r": 0.5}), ["r"], set(), {"r"})
    (release,) = [said for said in bench.manager.said() if isinstance(said, Release)]
    assert (release.loaded, release.failed, release.unloaded) == (0, 10, {"failed": 6})
    assert bench.leader.lookups.failed_blocks == 6


def test_half_a_boundary_is_nothing(bench: GroupsBench) -> None:
    """Blocks that do not come from disk leave the whole boundary without use."""
    bench.leader.close()
    bench = GroupsBench(promise_early=False)
    lookup = bench.arrives()
    bench.found(lookup, 6, ready=9)
    assert bench.leader.matched("r", 0, 8) == Answer(later=True)
    bench.clock.advance(100.0)
    assert bench.leader.matched("r", 0, 8).blocks == 0
    bench.leader.close()
    bench.manager.close()


def test_another_beginning_is_asked_for_anew(bench: GroupsBench) -> None:
    """What the groups lack at a boundary is known for one beginning only."""
    bench.found(bench.arrives(), 6)
    assert bench.leader.matched("r", 3, 8) == Answer(later=True)
    lookup = next(said for said in bench.manager.said() if isinstance(said, Lookup))
    assert lookup.skip == 3
    bench.found(lookup, 6)
    assert bench.leader.matched("r", 3, 8) == Answer(blocks=3)
    bench.leader.allocated("r", 3, TABLES[0], bench.tables)
    (plan,) = bench.step().loads
    assert plan.device_blocks == (103, 104, 105, 205, 305, 204, 203)


def test_what_must_be_computed_is_not_asked_for(bench: GroupsBench) -> None:
    """A window taken up one token too late would lack its first one."""
    assert len(bench.arrives(blocks=8, before_tail=7).keys) == 7 * 32


def test_an_engine_that_made_no_room_is_not_believed(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 6)
    bench.leader.matched("r", 0, 8)
    bench.tables[1][4] = 0
    with pytest.raises(AssertionError, match="made no room"):
        bench.leader.allocated("r", 6, TABLES[0], bench.tables)


def test_refused_blocks_of_all_tokens_are_offered_again(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.computes(4)
    ((_, message),) = bench.reserved()
    bench.grant(message, (0, 1, -2, -2))
    bench.computes(4)
    bench.clock.advance(60.0)
    bench.computes(4)
    ((places, _),) = bench.reserved()
    assert places == [Place(0, 2), Place(0, 3)]


def test_a_refused_tail_is_offered_again_as_long_as_the_engine_has_it(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.computes(8)
    (_, chain), (tail, first) = bench.reserved()
    bench.grant(chain)
    bench.refuse(first)
    bench.computes(8)
    assert bench.reserved() == [], "not at once"
    bench.clock.advance(100.0)
    bench.computes(8)
    ((again, second),) = bench.reserved()
    assert again == tail
    bench.refuse(second)
    bench.clock.advance(100.0)
    bench.tables[1][5] = 0
    bench.computes(8)
    bench.computes(8)
    assert bench.reserved() == []


def test_a_tail_waits_for_what_lies_before_it(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.computes(4)
    ((_, chain),) = bench.reserved()
    bench.refuse(chain)
    bench.computes(8)
    assert bench.reserved() == [], "the chain waits"
    bench.clock.advance(100.0)
    bench.computes(8)
    assert [places[0] for places, _ in bench.reserved()] == [Place(0, 0), Place(1, 7)]


def test_after_a_new_session_everything_is_offered_anew(bench: GroupsBench) -> None:
    bench.found(bench.arrives(), 0)
    bench.computes(8)
    bench.reserved()
    bench.manager.die()
    bench.step()
    bench.reconnect()
    assert bench.device.pinned == []
    bench.computes(8)
    assert [places for places, _ in bench.reserved()] == [
        [Place(0, b) for b in range(8)],
        [Place(1, b) for b in (7, 6, 5)],
    ]
