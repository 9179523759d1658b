"""A manager that serves a hybrid model: what is answered, counted and told."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvbm.admin_protocol import (
    FindPrefix,
    Pin,
    Pinned,
    PrefixFound,
    Unpin,
    Unpinned,
    WhyPrompt,
    WhyReply,
)
from kvbm.grouping import Grouping
from kvbm.groups import Group, GroupKind
from kvbm.hashing import join_keys
from kvbm.manager import requests
from kvbm.protocol import Commit, Lookup, LookupReply, Release, Reserve, ReserveReply
from rigs.manager import KEYS, LAYOUT, NAMESPACE, Client, ManagerBench, connect_operator, one, refusal

GROUPS = (Group(), Group(kind=GroupKind.WINDOW, reach=2), Group(kind=GroupKind.STATE))
GROUPING = Grouping(GROUPS)
HYBRID = msgspec.structs.replace(LAYOUT, groups=GROUPS)
ENGINE = "unit/model/dp0"


@pytest.fixture
def manager(make_manager: Callable[..., ManagerBench]) -> ManagerBench:
    return make_manager(host_blocks=64)


def engine(manager: ManagerBench) -> Client:
    leader, _ = manager.engine(layout=HYBRID)
    return leader


def store(leader: Client, number: int, boundary: int, start: int = 0, tail: bool = True) -> None:
    """The blocks of all tokens from `start` on, and what a boundary needs besides."""
    places = GROUPING.chain(start, boundary) + (GROUPING.tail(boundary) if tail else [])
    keys = join_keys(GROUPING.keys(KEYS, places))
    parent = join_keys(GROUPING.keys(KEYS, GROUPING.chain(0, start)[-1:]))
    leader.send(Reserve(store=number, parent=parent, keys=keys, groups=bytes(group for group, _ in places)))
    assert min(leader.expect(ReserveReply).slots) >= 0
    leader.send(Commit(store=number))


def test_a_boundary_is_found_leased_counted_and_told(manager: ManagerBench) -> None:
    leader = engine(manager)
    store(leader, 1, 6)
    reply = leader.lookup(2, KEYS[:9])
    assert (reply.boundary, reply.full, reply.ready) == (6, 6, 9)
    assert len(reply.slots) == 6 + 2 + 1
    value = manager.metrics.value
    assert value("kvbm_hit_tokens_total", engine=ENGINE, tier="host") == 6 * LAYOUT.block_tokens
    assert value("kvbm_hit_blocks_total", tier="host") == 6
    leader.send(Release(lookup=2, loaded=9, seconds=0.1))
    manager.step()
    assert value("kvbm_matched_tokens") == 6 * LAYOUT.block_tokens
    assert value("kvbm_onboard_blocks_h2d") == 9


def test_what_lacks_a_state_is_told(manager: ManagerBench) -> None:
    leader = engine(manager)
    store(leader, 1, 4)
    store(leader, 2, 7, start=4, tail=False)
    leader.send(Lookup(lookup=3, keys=join_keys(KEYS[:9]), request="r"))
    reply = leader.expect(LookupReply)
    assert (reply.boundary, reply.full) == (4, 7)
    leader.send(Release(lookup=3))
    assert one(manager, "r")["missing"] == {"no_state_at_boundary": 3, "never_seen": 2}
    assert leader.lookup(4, KEYS[:7], skip=4).slots == ()
    assert manager.metrics.value("kvbm_missed_lookups_total", reason="no_state_at_boundary") == 1


def test_why_tells_of_a_prompt_what_its_next_request_would_meet(manager: ManagerBench) -> None:
    leader, admin = engine(manager), connect_operator(manager)
    store(leader, 1, 4)
    store(leader, 2, 7, start=4, tail=False)
    admin.send(WhyPrompt(fingerprint=NAMESPACE.fingerprint.hex(), keys=join_keys(KEYS[:9])))
    (found,) = admin.expect(WhyReply).requests
    assert (found["host"], found["disk"], found["prefix"]) == (4, 0, {"host": 4})
    assert found["missing"] == {"no_state_at_boundary": 3, "never_seen": 2}
    admin.send(FindPrefix(fingerprint=NAMESPACE.fingerprint.hex(), keys=join_keys(KEYS[:9])))
    assert admin.expect(PrefixFound).blocks == 4


def test_a_pin_holds_what_a_boundary_needs_and_no_more_than_it_may(manager: ManagerBench) -> None:
    leader, admin = engine(manager), connect_operator(manager)
    store(leader, 1, 4)
    store(leader, 2, 7, start=4, tail=False)
    store(leader, 3, 14, start=7)
    fingerprint = NAMESPACE.fingerprint.hex()
    admin.send(Pin(fingerprint=fingerprint, keys=join_keys(KEYS[:13]), seconds=60.0))
    reply = admin.expect(Pinned)
    assert (reply.blocks, reply.ready, reply.blocks_max) == (4, 4, 16), "blocks of the prompt"
    admin.send(Unpin(fingerprint=fingerprint))
    assert admin.expect(Unpinned).blocks == 4 + 2 + 1, "of all groups"
    admin.send(Pin(fingerprint=fingerprint, keys=join_keys(KEYS[:14]), seconds=60.0))
    assert admin.expect(Pinned).blocks == 4, "14 + 2 + 1 are more than 16"


def test_a_part_of_a_load_stands_for_nothing(manager: ManagerBench) -> None:
    leader = engine(manager)
    store(leader, 1, 6)
    leader.lookup(2, KEYS[:9])
    leader.send(Release(lookup=2, loaded=4, failed=5))
    manager.step()
    assert manager.metrics.value("kvbm_matched_tokens") == 6 * LAYOUT.block_tokens, "it was begun"
    assert manager.metrics.value("kvbm_recompute_fallbacks_total", engine=ENGINE) == 1


def test_groups_that_do_not_fit_their_keys_are_nonsense(manager: ManagerBench) -> None:
    leader = engine(manager)
    leader.send(Reserve(store=1, parent=b"", keys=join_keys(KEYS[:3]), groups=b"\0"))
    leader.expect_end()


def test_a_run_longer_than_one_turn_keeps_its_groups(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "RESERVED_AT_ONCE", 4)
    leader = engine(manager)
    places = GROUPING.run(6, 0)
    keys = GROUPING.keys(KEYS, places)
    leader.send(Reserve(store=1, parent=b"", keys=join_keys(keys), groups=bytes(g for g, _ in places)))
    reply = leader.expect(ReserveReply)
    space = manager.space()
    assert [space.engine_name(slot, key).group for slot, key in zip(reply.slots, keys, strict=True)] == [
        group for group, _ in places
    ]
    assert [space.host_pool.is_tail(slot) for slot in reply.slots] == [False] * 6 + [True] * 3


def test_another_layout_of_the_same_namespace_is_refused(manager: ManagerBench) -> None:
    engine(manager)
    worker = manager.client()
    worker.send(manager.worker_hello("other"))
    assert "layout" in refusal(worker)
