"""Why a block that was here is in no tier now, where there is a remote store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbm.block import BlockKey
from kvbm.manager.departed import Fate
from kvbm.manager.lost import Fates, behind_a_fault, fates, reason_of
from kvbm.manager.write_behind import RemoteRules
from kvbm.policy import make_admission
from rigs.fake_remote import FakeStore
from rigs.remote import RemoteBench
from rigs.space import KEYS, LAYOUT


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(LAYOUT)


@pytest.fixture
def node(store: FakeStore) -> Iterator[Callable[..., RemoteBench]]:
    made: list[RemoteBench] = []

    def make(**options: object) -> RemoteBench:
        made.append(RemoteBench(store, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def lost(bench: RemoteBench, keys: list[BlockKey]) -> tuple[str, str]:
    """The reason, and what became of the block at the store."""
    known = fates(bench.space, bench.space.departed.missing(keys))
    return reason_of(known), known.remote.what if known.remote is not None else ""


def test_evicted_before_its_turn(node: Callable[..., RemoteBench]) -> None:
    bench = node(host_slots=4)
    bench.compute(KEYS[:4])
    bench.compute(KEYS[10:14])
    bench.settle(10.0)
    assert lost(bench, KEYS[:4]) == ("not_written", "too_late")


def test_the_budget_was_spent(node: Callable[..., RemoteBench]) -> None:
    bench = node(host_slots=4, options=RemoteRules(linger_s=1.0, requests_per_hour=1))
    bench.shares(KEYS[:2])
    bench.shares(KEYS[4:6])
    bench.compute(KEYS[10:14])
    assert lost(bench, KEYS[4:6]) == ("not_written", "budget")


def test_the_write_failed(node: Callable[..., RemoteBench]) -> None:
    bench = node(host_slots=4)
    bench.compute(KEYS[:2])
    bench.clock.advance(10.0)
    bench.space.pump()
    bench.remote.break_down()
    bench.space.pump()
    bench.compute(KEYS[10:14])
    assert lost(bench, KEYS[:2]) == ("not_written", "io")


def test_the_filter_refused_it(node: Callable[..., RemoteBench]) -> None:
    bench = node(host_slots=4, admission=make_admission("filter", 16, 0.0))
    bench.shares(KEYS[:4])
    bench.compute(KEYS[10:14])
    assert lost(bench, KEYS[:4]) == ("refused_by_filter", "filter")


@pytest.mark.parametrize(
    ("damaged", "reason", "what"), [(True, "failed_checksum", "corrupt"), (False, "evicted", "gone")]
)
def test_the_store_did_not_give_it_back(
    node: Callable[..., RemoteBench], store: FakeStore, damaged: bool, reason: str, what: str
) -> None:
    bench = node(host_slots=4)
    bench.shares(KEYS[:4])
    bench.compute(KEYS[10:14])
    if damaged:
        store.corrupt(KEYS[0])
    else:
        store.lose(KEYS[:1])
    bench.look(1, KEYS[:1])
    bench.settle()
    assert lost(bench, KEYS[:1]) == (reason, what)


def test_what_lies_behind_a_store_that_is_off(node: Callable[..., RemoteBench]) -> None:
    bench = node(host_slots=4)
    bench.shares(KEYS[:4])
    bench.compute(KEYS[10:14])
    assert behind_a_fault(bench.space, KEYS[:6]) == 0
    bench.remote.break_down()
    assert behind_a_fault(bench.space, KEYS[:6]) == 4
    assert behind_a_fault(bench.space, KEYS[5:6]) == 0


def test_the_deepest_tier_counts_unless_it_was_reset_since() -> None:
    budget, evicted = Fate(5.0, "budget"), Fate(4.0, "evicted")
    assert reason_of(Fates(evicted, evicted, budget)) == "not_written"
    assert reason_of(Fates(evicted, evicted, None)) == "evicted"
    assert reason_of(Fates(Fate(6.0, "reset"), None, budget)) == "reset"
