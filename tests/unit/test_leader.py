"""The leader against a manager that answers from a script: every way in which it must go on without one."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvbm.block import BlockKey, Tier
from kvbm.channel import Channel
from kvbm.clock import ManualClock
from kvbm.hashing import derive_key, join_keys, split_keys
from kvbm.leader import leader as leader_module
from kvbm.leader.leader import Answer, Leader, Scheduled
from kvbm.leader.lookups import ARRIVAL_DEADLINE_S, ATTEMPTS_MAX, REPLY_DEADLINE_S
from kvbm.leader.stores import OPEN_STORES_MAX, PLAN_AGE_S_MAX
from kvbm.protocol import (
    HELD,
    PROTOCOL_VERSION,
    REFUSED,
    Commit,
    FrameBuffer,
    Hello,
    LoadPlan,
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
    StepPlan,
    StepReport,
    StorePlan,
    decode_to_manager,
    encode,
)

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
        """What the leader has sent since the last call."""
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 22)
        except BlockingIOError:
            return []
        return [decode_to_manager(frame) for frame in self._frames.feed(data)]

    def send(self, *messages: Message) -> None:
        assert self._connection is not None
        for message in messages:
            self._connection.sendall(encode(message))

    def send_raw(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(data)

    def ready(self, ready: bool = True) -> None:
        self.send(
            Ready(
                ready=ready, epoch=self.epoch, fingerprint=FINGERPRINT, lease_s=LEASE_S, tiers={"host": 100}
            )
        )

    def die(self) -> None:
        self.up = False
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Bench:
    """A leader, and the words of the engine that drives it."""

    def __init__(self, promise_early: bool = True, rank_count: int = 1) -> None:
        self.manager = ScriptedManager()
        self.clock = ManualClock(10.0)
        hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e", rank_count=rank_count)
        self.leader = Leader(self.manager, hello, 4, promise_early, self.clock)  # type: ignore[arg-type]
        assert self.manager.said() == [hello]
        self.manager.ready()
        self.step()
        assert self.leader.ready

    def step(
        self, complete: dict[str, int] | None = None, preempted: Sequence[str] = (), idle: bool = False
    ) -> StepPlan:
        scheduled = [Scheduled(request, blocks, lambda: TABLE) for request, blocks in (complete or {}).items()]
        return self.leader.step(scheduled, preempted, 0, idle)

    def add(self, request: str = "r", blocks: int = 8, on_device: int = 0) -> Lookup:
        """A request arrives; the lookup that goes out at once."""
        self.leader.request_added(request, HASHES[:blocks], b"", on_device)
        (lookup,) = self.manager.said()
        assert isinstance(lookup, Lookup)
        return lookup

    def answer(self, lookup: Lookup, blocks: int, ready: int | None = None, disk: int = 0) -> None:
        sources = bytes([Tier.HOST] * (blocks - disk) + [Tier.DISK] * disk)
        self.manager.send(
            LookupReply(
                lookup=lookup.lookup,
                slots=tuple(range(blocks)),
                generations=tuple(range(50, 50 + blocks)),
                ready=blocks if ready is None else ready,
                sources=sources,
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

    def store(self, request: str = "r", complete: int = 4, answer: tuple[int, ...] | None = None) -> StorePlan:
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


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.leader.close()
    bench.manager.close()


def keys(count: int, extras: bytes = b"") -> list[BlockKey]:
    return [derive_key(FINGERPRINT, block_hash, extras) for block_hash in HASHES[:count]]


# ---- without a manager


def test_without_a_manager_everything_is_a_miss() -> None:
    manager = ScriptedManager()
    manager.up = False
    hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e")
    leader = Leader(manager, hello, 4, True, ManualClock())  # type: ignore[arg-type]
    assert not leader.ready
    leader.request_added("r", HASHES, b"", 0)
    assert leader.matched("r", 0) == Answer()
    assert leader.planned_sources("r") == b""
    leader.allocated("r", 0, ())
    assert leader.step([Scheduled("r", 4, lambda: TABLE)], ["r"], 64, False) == StepPlan()
    assert leader.step([], [], 0, True) == StepPlan(idle=True)
    leader.updated(None, ["r"], set())
    leader.updated(StepReport(stored={1: (1, (), 0.0)}, loaded={"x": 1.0}), ["x"], {3})
    leader.finished("r")
    leader.finished("never seen")
    assert leader.reset()
    leader.close()
    assert manager.attempts > 1


def test_unready_means_nothing_is_asked(bench: Bench) -> None:
    bench.manager.ready(False)
    bench.step()
    bench.leader.request_added("r", HASHES[:4], b"", 0)
    assert bench.leader.matched("r", 0) == Answer()
    assert bench.step({"r": 4}).stores == ()
    assert bench.manager.said() == []
    bench.manager.ready()
    bench.step()
    assert bench.leader.matched("r", 0).later
    assert [type(m) for m in bench.manager.said()] == [Lookup], "it is asked as soon as somebody answers"


def test_a_refusal_is_said_once_and_survived(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        bench.manager.send(Refused(reason="user 5 cannot be served"))
        bench.manager.close()
        bench.step()
        bench.step()
        bench.step()
    assert sum("user 5 cannot be served" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", encode(Reset())])
def test_garbage_from_the_manager_ends_the_session(bench: Bench, garbage: bytes) -> None:
    bench.promise()
    bench.manager.send_raw(garbage)
    bench.manager.up = False
    bench.step()
    assert not bench.leader.ready
    assert bench.leader.matched("r", 0) == Answer()
    bench.reconnect()


def test_after_a_reconnect_it_hits_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.manager.die()
    bench.step()
    assert not bench.leader.ready
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    bench.reconnect()
    assert bench.leader.matched("r", 0).later
    (lookup,) = bench.manager.said()
    bench.answer(lookup, 3)
    assert bench.leader.matched("r", 0) == Answer(blocks=3)
    assert [r.getMessage() for r in caplog.records if "manager lost" in r.getMessage()]


# ---- a lookup


def test_a_lookup_goes_out_with_the_request(bench: Bench) -> None:
    lookup = bench.add(blocks=6, on_device=2)
    assert split_keys(lookup.keys) == keys(6)
    assert lookup.skip == 2
    assert bench.leader.matched("r", 2).later
    bench.answer(lookup, 3)
    assert bench.leader.matched("r", 2) == Answer(blocks=3)
    assert bench.leader.matched("r", 3) == Answer(blocks=2), "the device has more now"
    assert bench.leader.matched("r", 5) == Answer()
    assert bench.leader.matched("r", 9) == Answer()
    assert bench.manager.said() == []


def test_a_request_without_full_blocks_asks_nothing(bench: Bench) -> None:
    bench.leader.request_added("r", [], b"", 0)
    bench.leader.request_added("s", HASHES[:2], b"", 2)
    assert bench.leader.matched("r", 0) == bench.leader.matched("s", 2) == Answer()
    assert bench.manager.said() == []


def test_extras_change_every_key(bench: Bench) -> None:
    bench.leader.request_added("r", HASHES[:3], b"adapter", 0)
    (lookup,) = bench.manager.said()
    assert split_keys(lookup.keys) == keys(3, b"adapter")
    assert not set(keys(3)) & set(keys(3, b"adapter"))


def test_a_reply_that_does_not_come_is_not_waited_for(bench: Bench) -> None:
    lookup = bench.add()
    bench.clock.advance(REPLY_DEADLINE_S / 2)
    assert bench.leader.matched("r", 0).later
    bench.clock.advance(REPLY_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer()
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    bench.answer(lookup, 4)
    bench.step()
    assert bench.manager.said() == [Release(lookup=lookup.lookup)], "a late answer gives its lease back"


def test_a_reply_with_nothing_is_not_released(bench: Bench) -> None:
    lookup = bench.add()
    bench.answer(lookup, 0)
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    bench.leader.finished("r")
    assert bench.manager.said() == []


def test_a_lookup_that_left_out_what_the_device_lost_is_asked_again(bench: Bench) -> None:
    lookup = bench.promise(blocks=3, computed=4)
    assert bench.leader.matched("r", 2).later
    released, again = bench.manager.said()
    assert released == Release(lookup=lookup.lookup)
    assert again.skip == 2
    assert again.lookup != lookup.lookup
    bench.answer(again, 5)
    assert bench.leader.matched("r", 2) == Answer(blocks=5)


def test_asking_again_has_an_end(bench: Bench) -> None:
    lookup = bench.add(on_device=7)
    for attempt in range(ATTEMPTS_MAX - 1):
        bench.answer(lookup, 1)
        assert bench.leader.matched("r", 6 - attempt).later
        lookup = bench.manager.said()[-1]
    bench.answer(lookup, 1)
    assert bench.leader.matched("r", 0) == Answer()
    assert bench.manager.said() == []


def test_a_lease_that_is_about_to_end_is_renewed(bench: Bench) -> None:
    lookup = bench.promise()
    bench.clock.advance(LEASE_S - 10.0)
    assert bench.leader.matched("r", 0).later
    released, again = bench.manager.said()
    assert released == Release(lookup=lookup.lookup)
    bench.answer(again, 5)
    assert bench.leader.matched("r", 0) == Answer(blocks=5)


def test_an_engine_that_recomputes_is_promised_what_is_on_its_way(bench: Bench) -> None:
    bench.promise(blocks=5, ready=2, disk=3)


def test_what_is_known_to_have_failed_is_not_promised(bench: Bench) -> None:
    lookup = bench.add()
    bench.answer(lookup, 5, ready=1, disk=4)
    bench.manager.send(Progress(lookup=lookup.lookup, ready=2, final=True))
    assert bench.leader.matched("r", 0) == Answer(blocks=2)
    bench.leader.allocated("r", 2, TABLE)
    (plan,) = bench.step().loads
    assert (plan.slots, plan.ready) == ((0, 1), 2)


def test_an_engine_that_cannot_recompute_is_promised_only_what_is_there() -> None:
    bench = Bench(promise_early=False)
    lookup = bench.add()
    bench.answer(lookup, 5, ready=2, disk=3)
    assert bench.leader.matched("r", 0).later
    bench.manager.send(Progress(lookup=lookup.lookup, ready=4, final=False))
    assert bench.leader.matched("r", 0).later
    bench.clock.advance(ARRIVAL_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer(blocks=4), "it has waited long enough"
    second = bench.add("s")
    bench.answer(second, 5, ready=2, disk=3)
    bench.manager.send(Progress(lookup=second.lookup, ready=3, final=True))
    assert bench.leader.matched("s", 0) == Answer(blocks=3)
    bench.leader.close()


def test_loading_that_is_slower_than_computing_is_left_out(bench: Bench) -> None:
    bench.leader.cost.prefilled(1000, 0.001)
    bench.leader.cost.loaded(bytes([Tier.HOST]), 10.0)
    lookup = bench.add()
    bench.answer(lookup, 5)
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    assert bench.manager.said() == [Release(lookup=lookup.lookup)]


# ---- a load


def test_a_load_names_slots_generations_and_the_right_device_blocks(bench: Bench) -> None:
    lookup = bench.promise(blocks=5, computed=2)
    assert bench.leader.matched("r", 3) == Answer(blocks=4)
    bench.leader.allocated("r", 3, TABLE)
    (plan,) = bench.step().loads
    assert plan == LoadPlan(
        request="r",
        lookup=lookup.lookup,
        epoch=7,
        slots=(1, 2, 3),
        generations=(51, 52, 53),
        device_blocks=(103, 104, 105),
        offset=1,
        ready=3,
    )
    assert bench.leader.planned_sources("r") == bytes([Tier.HOST] * 3)
    assert bench.step().loads == (), "once"
    bench.arrive(plan)
    assert bench.manager.said() == [Release(lookup=lookup.lookup, first=1, loaded=3, seconds=0.5)]
    assert bench.leader.loaded_blocks == {Tier.HOST: 3, Tier.DISK: 0}


def test_blocks_that_failed_are_counted_and_told(bench: Bench) -> None:
    plan = bench.load(blocks=5, disk=3)
    bench.arrive(plan, invalid={plan.device_blocks[2], plan.device_blocks[4], 999})
    (release,) = bench.manager.said()
    assert (release.loaded, release.failed) == (2, 3)
    assert bench.leader.loaded_blocks == {Tier.HOST: 2, Tier.DISK: 0}
    assert bench.leader.failed_blocks == 3
    bench.arrive(plan)
    assert bench.manager.said() == []


def test_a_manager_that_dies_between_promise_and_allocation_costs_no_request(bench: Bench) -> None:
    """The workers may still map that memory: the plan names the epoch of the promise, and they decide."""
    bench.promise(blocks=5, computed=1)
    bench.manager.die()
    bench.step()
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert (plan.epoch, plan.device_blocks, plan.slots) == (7, (101, 102, 103, 104, 105), (0, 1, 2, 3, 4))
    bench.reconnect()
    bench.arrive(plan)
    assert bench.manager.said() == [], "nothing of an earlier life is released in this one"


def test_a_promise_that_was_forgotten_meanwhile_fails_the_right_blocks(bench: Bench) -> None:
    """Somebody asked for the sources after the manager died: the lookup is gone, and the engine waits for a load."""
    bench.promise(blocks=5, computed=2)
    bench.manager.die()
    bench.step()
    assert bench.leader.planned_sources("r") == b""
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert plan.epoch not in (7, 8)
    assert plan.device_blocks == (102, 103, 104, 105, 106)
    assert len(plan.slots) == len(plan.generations) == 5
    assert plan.ready == 0
    bench.arrive(plan, set(plan.device_blocks))
    assert bench.leader.failed_blocks == 5
    bench.leader.finished("r")


def test_a_request_that_is_aborted_while_it_loads_keeps_its_lease_until_the_end(bench: Bench) -> None:
    plan = bench.load()
    bench.leader.finished("r")
    assert bench.manager.said() == []
    bench.arrive(plan)
    (release,) = bench.manager.said()
    assert (release.lookup, release.loaded) == (plan.lookup, 5)


def test_a_request_that_is_aborted_before_it_loads_gives_its_lease_back(bench: Bench) -> None:
    lookup = bench.promise()
    bench.leader.finished("r")
    assert bench.manager.said() == [Release(lookup=lookup.lookup)]
    asked = bench.add("s")
    bench.leader.finished("s")
    bench.answer(asked, 3)
    bench.step()
    assert bench.manager.said() == [Release(lookup=asked.lookup)]


def test_a_preempted_request_asks_anew_when_it_comes_back(bench: Bench) -> None:
    plan = bench.load()
    bench.arrive(plan)
    bench.manager.said()
    bench.step(preempted=["r"])
    assert bench.leader.matched("r", 0).later
    assert [type(m) for m in bench.manager.said()] == [Lookup]


# ---- a store


def test_a_store_in_three_steps(bench: Bench) -> None:
    bench.add()
    assert bench.step({"r": 3}).stores == ()
    (reserve,) = bench.manager.said()
    assert (reserve.parent, split_keys(reserve.keys)) == (b"", keys(3))
    bench.grant(reserve, (HELD, 4, REFUSED))
    (plan,) = bench.step({"r": 3}).stores
    assert plan == StorePlan(
        store=reserve.store, epoch=7, slots=(4,), generations=(74,), device_blocks=(101,)
    )
    assert bench.manager.said() == []
    bench.report(plan)
    assert bench.manager.said() == [Commit(store=reserve.store, seconds=0.1)]
    assert bench.step({"r": 5}).stores == ()
    (more,) = bench.manager.said()
    assert (more.parent, split_keys(more.keys)) == (keys(3)[2], keys(5)[3:])


def test_a_store_that_is_refused_is_not_planned(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.grant(reserve, (HELD, REFUSED))
    assert bench.step({"r": 2}).stores == ()
    assert bench.step({"r": 2}).stores == ()
    assert bench.manager.said() == []


def test_all_ranks_must_have_stored_it() -> None:
    bench = Bench(rank_count=3)
    bench.add()
    plan = bench.store(complete=3)
    bench.report(plan, ranks=1, failed=(1,))
    bench.report(plan, ranks=1)
    assert bench.manager.said() == []
    bench.report(plan, ranks=1, failed=(0, 1))
    assert bench.manager.said() == [Commit(store=plan.store, failed=(0, 1), seconds=0.1)]
    bench.report(plan, ranks=3)
    assert bench.manager.said() == []
    bench.leader.close()


def test_a_preempted_requests_blocks_are_copied_now_or_never(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.grant(reserve)
    (plan,) = bench.step(preempted=["r"]).stores
    assert plan.store == reserve.store
    bench.report(plan)
    assert [type(m) for m in bench.manager.said()] == [Commit]
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    assert bench.step(preempted=["r"]).stores == (), "no answer by now"
    bench.grant(reserve)
    assert bench.step().stores == (), "somebody else's bytes are there now"
    assert bench.manager.said() == [Commit(store=reserve.store, failed=(0, 1))]


def test_a_finished_requests_blocks_are_copied_now_or_never(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()[-1:]
    bench.leader.finished("r")
    bench.step()
    bench.grant(reserve, (5, HELD))
    assert bench.step().stores == ()
    assert bench.manager.said()[-1] == Commit(store=reserve.store, failed=(0,))


def test_an_answer_that_is_too_old_is_given_back(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.clock.advance(PLAN_AGE_S_MAX + 1.0)
    bench.grant(reserve)
    assert bench.step().stores == ()
    assert bench.manager.said() == [Commit(store=reserve.store, failed=(0, 1))]


def test_a_question_that_is_never_answered_is_forgotten(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    bench.clock.advance(PLAN_AGE_S_MAX + 1.0)
    bench.step()
    assert not bench.leader._stores.waiting


def test_stores_of_an_earlier_life_are_not_committed_and_begin_again(bench: Bench) -> None:
    bench.add()
    plan = bench.store(complete=3)
    bench.step({"r": 4})
    bench.manager.die()
    bench.step()
    bench.reconnect()
    bench.report(plan)
    assert bench.manager.said() == []
    assert bench.step({"r": 4}).stores == ()
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(4), "everything that is on the device is offered to the new manager"
    bench.grant(reserve)
    (again,) = bench.step().stores
    assert again.epoch == 8
    assert again.store != plan.store


def test_open_stores_are_bounded(bench: Bench) -> None:
    bench.leader.request_added("r", HASHES, b"", 40)
    bench.manager.said()
    leader_stores = bench.leader._stores
    for _ in range(OPEN_STORES_MAX):
        assert leader_stores.ask("r", None, keys(1), [1])
    assert not leader_stores.ask("r", None, keys(1), [1])


def test_blocks_that_are_not_in_the_table_are_not_stored(bench: Bench) -> None:
    bench.add()
    bench.leader.step([Scheduled("r", 4, lambda: TABLE[:1])], (), 0, False)
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(1)
    bench.leader.step([Scheduled("unknown", 4, lambda: TABLE)], (), 0, False)
    assert bench.manager.said() == []


# ---- reset


def test_after_a_reset_no_key_is_what_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "RESET_WAIT_S", 0.01)
    before = bench.add("a")
    assert not bench.leader.reset(), "nobody answered"
    assert [type(m) for m in bench.manager.said()] == [Reset]
    after = bench.add("b")
    assert not set(split_keys(before.keys)) & set(split_keys(after.keys))
    bench.step({"a": 2})
    (reserve,) = bench.manager.said()
    assert not set(split_keys(before.keys)) & set(split_keys(reserve.keys))


@pytest.mark.parametrize(("in_use", "clean"), [(0, True), (3, False)])
def test_a_reset_is_clean_when_nothing_was_in_use(bench: Bench, in_use: int, clean: bool) -> None:
    bench.manager.send(ResetReply(dropped=5, in_use=in_use))
    assert bench.leader.reset() is clean


def test_a_reset_without_a_manager_has_nothing_to_drop(bench: Bench) -> None:
    bench.manager.die()
    bench.step()
    assert bench.leader.reset()


# ---- a walk


def test_joined_keys_are_the_requests_own(bench: Bench) -> None:
    hashes = HASHES[:2]
    bench.leader.request_added("r", hashes, b"", 0)
    (lookup,) = bench.manager.said()
    assert lookup.keys == join_keys(keys(2))
    hashes.append(HASHES[2])  # the engine's list grows as tokens come
    bench.step({"r": 3})
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(3)
