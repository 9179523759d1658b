"""The manager hears what clients say: policies are told, parts are counted, and nonsense does no harm."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from kvbm.hashing import join_keys
from kvbm.policy.contract import ClientWord
from kvbm.policy.lru import LeafFirstLru
from kvbm.protocol import Says
from rigs.manager import KEYS, ManagerBench, store

Heard = list[tuple[Hashable, ClientWord]]


class Listening(LeafFirstLru):
    """LRU that notes what it is told."""

    heard: Heard

    def hinted(self, key: Hashable, word: ClientWord, now_s: float) -> None:
        self.heard.append((key, word))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What the policies of host memory and disk hear."""
    told: Heard = []
    monkeypatch.setattr(Listening, "heard", told, raising=False)
    monkeypatch.setattr("kvbm.manager.host_side.make_policy", lambda name, slots: Listening(slots))
    monkeypatch.setattr("kvbm.manager.disk_side.make_policy", lambda name, slots: Listening(slots))
    return told


def test_policies_of_both_tiers_are_told_of_the_last_block(
    make_manager: Callable[..., ManagerBench], heard: Heard
) -> None:
    manager = make_manager(disk_blocks=32)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    leader.lookup(2, KEYS[:4], tenant="a", hint={"session": "talk", "expect_s": 30})
    manager.step()
    assert heard == [(KEYS[3], ClientWord("a", "talk", False, 30.0))] * 2
    heard.clear()
    leader.lookup(3, KEYS[:2], hint={"final": True})
    manager.step()
    assert heard == [(KEYS[1], ClientWord("", "", True))] * 2


@pytest.mark.parametrize("hint", [{}, {"retain": [{"end": 32}]}, {"prefetch": True, "store": False}])
def test_what_concerns_no_policy_is_not_told(
    make_manager: Callable[..., ManagerBench], heard: Heard, hint: dict[str, Any]
) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    leader.lookup(1, KEYS[:4], hint=hint)
    manager.step()
    assert heard == []


def counts(manager: ManagerBench) -> dict[tuple[str, ...], float]:
    values = manager.metrics.snapshot().items()
    return {
        labels: value
        for (name, *labels_), value in values
        if name == "kvbm_hints_total"
        for labels in [tuple(labels_)]
    }


def test_the_leaders_reading_is_counted_once(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    verdicts = (("session", "accepted", "", "none"), ("expect_s", "rejected", "below 0", "form"))
    leader.lookup(1, KEYS[:4], hint={"session": "s"}, verdicts=verdicts)
    leader.lookup(2, KEYS[:4], hint={"session": "s"}, verdicts=verdicts, again=True)
    assert counts(manager) == {("session", "accepted", "none"): 1, ("expect_s", "rejected", "form"): 1}


def test_a_client_without_a_leader_is_read_here(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    leader.lookup(1, KEYS[:4], hint={"session": "s", "final": "yes", "expect_s": float("nan"), "soon": 1})
    assert counts(manager) == {
        ("session", "accepted", "none"): 1,
        ("final", "rejected", "form"): 1,
        ("expect_s", "rejected", "form"): 1,
        ("unknown", "rejected", "unknown"): 1,
    }


def test_verdicts_that_are_none_are_not_counted(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    verdicts = (
        ("soon", "accepted", "", "none"),
        ("session", "maybe", "", "none"),
        ("final", "clipped", "", "why"),
    )
    leader.lookup(1, KEYS[:4], verdicts=verdicts)
    assert counts(manager) == {}


def test_what_is_said_later_is_done_and_counted(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    leader.lookup(2, KEYS[:4], request="r")
    leader.send(Says(keys=join_keys(KEYS[:4]), hint={"retain": [{"end": 8, "priority": 90}]}))
    manager.step()
    assert counts(manager) == {("retain", "accepted", "none"): 1}
    favours = manager.space().host_pool.favouring.favours
    assert favours is not None
    leader.send(Says(keys=join_keys(KEYS[:4]), hint={"retain": [{"start": 4000}]}))
    manager.step()
    assert counts(manager)["retain", "rejected", "nothing"] == 1


def test_a_low_priority_that_is_said_later_reaches_the_policies(
    make_manager: Callable[..., ManagerBench], heard: Heard
) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    leader.lookup(1, KEYS[:4])
    leader.send(Says(keys=join_keys(KEYS[:4]), hint={"retain": [{"priority": 10}]}))
    manager.step()
    assert heard == [(KEYS[3], ClientWord("", "", True))]


def test_why_tells_what_became_of_a_hint(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    leader.lookup(1, KEYS[:4], request="r", hint={"session": "s", "expect_s": 1e9, "prefetch": True})
    (found,) = manager.server._history.reply("r", 1).requests
    assert found["hint"] == [
        "session accepted",
        "expect_s clipped (above 86400 s)",
        "prefetch rejected (host memory keeps no blocks of a disk here)",
    ]


def test_a_client_that_is_not_believed_is_told_so(
    make_manager: Callable[..., ManagerBench], heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listening, "believes", lambda policy, client: client != "liar", raising=False)
    manager = make_manager()
    leader, _ = manager.engine()
    said = {"session": "s", "expect_s": 30}
    told = leader.lookup(1, KEYS[:4], tenant="liar", hint=said).verdicts
    assert [(part, outcome, why) for part, outcome, _, why in told] == [("expect_s", "rejected", "doubted")]
    assert leader.lookup(2, KEYS[:4], tenant="honest", hint=said).verdicts == ()
    assert counts(manager)["expect_s", "rejected", "doubted"] == 1
