"""A lookup that finds nothing is counted with its reason, and the time of its answer too."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.hashing import join_keys
from kvbm.manager import history, lost
from kvbm.observe.metric_table import MISSED_REASONS
from kvbm.protocol import Lookup, LookupReply, Release, Reset, ResetReply
from rigs.manager import KEYS, ManagerBench, store

ENGINE = "unit/model/dp0"


def missed(manager: ManagerBench) -> dict[str, float]:
    """By reason, without the zeros."""
    counts = {
        reason: manager.metrics.value("kvbm_missed_lookups_total", reason=reason) for reason in MISSED_REASONS
    }
    return {reason: count for reason, count in counts.items() if count}


def test_every_reason_that_is_found_has_its_series() -> None:
    fixed = {
        history.NEVER_SEEN,
        history.NO_BOUNDARY,
        lost.NOT_STORED,
        lost.NOT_WRITTEN,
        lost.FILTERED,
        lost.FAILED_CHECKSUM,
        lost.EVICTED,
        lost.EXPIRED,
        lost.RESET,
        lost.STORE_OFF,
        history.MODEL_CHANGED,
        history.OTHER_EXTRAS,
        history.UNAVAILABLE,
    }
    assert set(MISSED_REASONS) == fixed | set(history.EXTRAS_CHANGED.values())


def test_what_was_never_seen_and_what_has_gone(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, worker = manager.engine()
    assert leader.lookup(1, KEYS[:4]).slots == ()
    assert missed(manager) == {"never_seen": 1}
    store(leader, worker, 2, KEYS[:4])
    assert len(leader.lookup(3, KEYS[:8]).slots) == 4
    assert missed(manager) == {"never_seen": 1}, "a part of it was found"
    leader.send(Release(lookup=3))
    leader.send(Reset())
    leader.expect(ResetReply)
    leader.lookup(4, KEYS[:4])
    assert missed(manager) == {"never_seen": 1, "reset": 1}
    leader.lookup(5, KEYS[:4], skip=4)
    assert missed(manager) == {"never_seen": 1, "reset": 1}, "it asked for nothing"


def test_while_a_rank_is_away(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader = manager.leader()
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:2])))
    leader.expect(LookupReply)
    assert missed(manager) == {"unavailable": 1}


def test_the_time_of_an_answer_counts_where_nothing_was_found(
    make_manager: Callable[..., ManagerBench],
) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    leader.lookup(1, KEYS[:4])
    leader.send(Release(lookup=1, answer_s=0.25))
    manager.step()
    assert manager.metrics.value("kvbm_lookup_answer_seconds", engine=ENGINE) == 1
    assert manager.metrics.value("kvbm_load_wait_seconds", engine=ENGINE) == 0
