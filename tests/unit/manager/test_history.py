"""Why a request missed: every reason, brought about by what really brings it about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbm.block import BlockKey, Tier
from kvbm.hashing import join_keys
from kvbm.manager import departed as departed_module
from kvbm.manager import history as history_module
from kvbm.manager.departed import Departed, Fate
from kvbm.manager.lost import fates, reason_of
from kvbm.policy import DiskFilter
from kvbm.protocol import (
    UNLOADED_REASONS,
    Commit,
    Lookup,
    LookupReply,
    Release,
    Reset,
)
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, OTHER, ManagerBench, one, store, why
from rigs.space import Bench

PROMPT = b"p" * 16


class Asker:
    """A leader whose requests have names, and somebody who asks about them."""

    def __init__(self, manager: ManagerBench, engine: str = "e", **hello: Any) -> None:
        self.manager = manager
        self.leader, self.worker = manager.engine(engine, **hello)
        self._numbers = iter(range(1, 100_000))

    def lookup(
        self, request: str, keys: list[BlockKey], skip: int = 0, prompt: bytes = b"", **extras: str
    ) -> LookupReply:
        number = next(self._numbers)
        self.leader.send(
            Lookup(
                lookup=number, keys=join_keys(keys), skip=skip, request=request, prompt=prompt, extras=extras
            )
        )
        return self.leader.expect(LookupReply)

    def miss(self, keys: list[BlockKey], request: str = "r", **told: Any) -> dict[str, Any]:
        """What is said of a request that was looked up just now and is over."""
        reply = self.lookup(request, keys, **told)
        self.leader.send(Release(lookup=reply.lookup))
        return one(self.manager, request)

    def store(self, keys: list[BlockKey]) -> tuple[int, ...]:
        return store(self.leader, self.worker, next(self._numbers), keys)


# ---- blocks that are in no tier


def test_never_seen(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:3])
    found = asker.miss(KEYS[:5])
    assert (found["device"], found["host"], found["disk"], found["first_missing"]) == (0, 3, 0, 3)
    assert found["missing"] == {"never_seen": 2}
    assert found["history_complete"]


def test_what_is_on_the_device_counts_as_found(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:3])
    found = asker.miss(KEYS[:5], skip=2)
    assert (found["device"], found["host"], found["first_missing"]) == (2, 1, 3)


def test_evicted_by_the_policy_when(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:4])
    asker.store(KEYS[100:115])  # 16 slots: three of the four have to go
    manager.clock.advance(41.0)
    found = asker.miss(KEYS[:6])
    assert found["host"] == 1
    assert found["missing"] == {"evicted": 3, "never_seen": 2}
    assert found["left"] == {"host": {"what": "evicted", "seconds_ago": 41.0}}
    assert found["eviction_policy"] == manager.settings.eviction


def test_reset_by_somebody(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:4])
    asker.leader.send(Reset())
    asker.leader.take()
    assert asker.miss(KEYS[:4])["missing"] == {"reset": 4}


def test_never_stored_for_want_of_a_slot(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:16])
    reply = asker.lookup("holds", KEYS[:16])  # its lease keeps all of them
    assert asker.store(KEYS[20:22]) == (-2, -2)
    asker.leader.send(Release(lookup=reply.lookup))
    found = asker.miss(KEYS[20:22])
    assert found["missing"] == {"not_stored": 2}
    assert found["left"]["host"]["what"] == "no_slot"


def test_ranks_that_failed_to_store(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.leader.reserve(7, KEYS[:2])
    asker.leader.send(Commit(store=7, failed=(1,)))
    found = asker.miss(KEYS[:2])
    assert (found["host"], found["missing"], found["left"]["host"]["what"]) == (
        1,
        {"not_stored": 1},
        "aborted",
    )


def test_unavailable_while_a_rank_is_missing(manager: ManagerBench) -> None:
    leader = manager.leader()
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:3]), request="early"))
    leader.expect(LookupReply)
    assert one(manager, "early")["missing"] == {"unavailable": 3}


# ---- the same prompt under another key


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ({"adapter": "cats"}, {"adapter": "dogs"}, "adapter_changed"),
        ({}, {"adapter": "dogs"}, "adapter_changed"),
        ({"cache_salt": "aa"}, {"cache_salt": "bb"}, "salt_changed"),
        ({}, {"weights": "12"}, "weights_changed"),
        ({"adapter": "a", "cache_salt": "s"}, {}, "extras_changed"),
        ({"media": "x"}, {"media": "y"}, "extras_changed"),
    ],
)
def test_the_same_tokens_with_other_extras(
    manager: ManagerBench, before: dict[str, str], now: dict[str, str], reason: str
) -> None:
    asker = Asker(manager)
    asker.lookup("first", KEYS[:2], prompt=PROMPT, **before)
    found = asker.miss(KEYS[10:12], prompt=PROMPT, **now)
    assert found["missing"] == {reason: 2}
    for name in {*before, *now}:
        assert f"{name} is {now.get(name, 'none')} here, {before.get(name, 'none')} there" in found["differs"]


def test_other_tokens_are_never_called_another_salt(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.lookup("first", KEYS[:2], prompt=PROMPT, cache_salt="aa")
    assert asker.miss(KEYS[10:12], prompt=b"q" * 16, cache_salt="bb")["missing"] == {"never_seen": 2}


def test_another_namespace_and_which_field_differs(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(namespaces=2)
    Asker(manager, "one").lookup("first", KEYS[:2], prompt=PROMPT)
    other = Asker(manager, "two", namespace=OTHER)
    found = other.miss(KEYS[:2], prompt=PROMPT)
    assert found["missing"] == {"model_changed": 2}
    assert found["differs"] == ["weights is bb here, aa there"]
    other.store(KEYS[:2])
    assert other.miss(KEYS[:3], prompt=PROMPT)["missing"] == {"never_seen": 1}, "its beginning is here"


# ---- disk


def test_refused_by_the_filter(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, admission=DiskFilter())
    bench.store(KEYS[:4])
    bench.store(KEYS[10:14])
    bench.finish_all()
    missing = bench.space.departed.missing(KEYS[:4])
    assert (missing.first, missing.unknown) == (4, 0)
    assert missing.host is not None and missing.host.what == "evicted"
    assert reason_of(fates(bench.space, missing)) == "refused_by_filter"


def test_without_a_filter_nothing_is_blamed_on_one(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, disk=False, admission=DiskFilter())
    bench.store(KEYS[:4])
    bench.store(KEYS[10:14])
    assert reason_of(fates(bench.space, bench.space.departed.missing(KEYS[:4]))) == "evicted"


def test_evicted_from_disk_too(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, disk_slots=4)
    for first in (0, 10, 20):
        bench.store(KEYS[first : first + 4])
        bench.finish_all()
    missing = bench.space.departed.missing(KEYS[:4])
    assert missing.host is not None and missing.disk is not None
    assert (missing.host.what, missing.disk.what) == ("evicted", "evicted")
    assert reason_of(fates(bench.space, missing)) == "evicted"


def test_host_memory_was_faster_than_the_disk(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, pending_limit=1)
    bench.store(KEYS[:4])  # the first is being written, the others wait
    bench.store(KEYS[10:13])
    bench.finish_all()
    missing = bench.space.departed.missing(KEYS[1:4])
    assert (missing.host, missing.disk) == (Fate(100.0, "evicted"), Fate(100.0, "too_late"))
    assert reason_of(fates(bench.space, missing)) == "not_written"


def test_a_disk_that_fails_the_write(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4)
    bench.store(KEYS[:2])
    bench.tier.break_down()
    bench.store(KEYS[10:14])
    bench.finish_all()
    missing = bench.space.departed.missing(KEYS[:2])
    assert reason_of(fates(bench.space, missing)) == "not_written"


def test_a_checksum_that_failed(make_manager: Callable[..., ManagerBench], below: FakeTier) -> None:
    manager = make_manager(disk_blocks=40, disk_dir="/nowhere", disk_admission="all")
    asker = Asker(manager)
    asker.store(KEYS[:3])
    space = manager.space()
    assert space.disk is not None
    while below.release():
        manager.step()
    space.clear("host")
    below.medium.corrupt(int(space.disk.pool.find(KEYS[1])))  # type: ignore[arg-type]  # it is there
    reply = asker.lookup("r", KEYS[:3])
    assert reply.sources == bytes((Tier.DISK,)) * 3
    while below.release():
        manager.step()
    asker.leader.take()
    asker.leader.send(Release(lookup=reply.lookup, loaded=1, unloaded={"refused": 2}))
    assert one(manager, "r")["unloaded"] == {"refused": 2}
    found = asker.miss(KEYS[:3], request="again")
    assert (found["host"], found["first_missing"]) == (1, 1)
    assert found["left"]["disk"]["what"] == "corrupt"
    assert next(iter(found["missing"])) == "failed_checksum"


def test_a_staging_area_is_no_tier_that_blocks_are_lost_from(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, disk_slots=8, staging=True)
    for first in (0, 4, 8):
        bench.store(KEYS[first : first + 4])
        bench.finish_all()
    missing = bench.space.departed.missing(KEYS[:4])
    assert missing.host is None
    assert missing.disk is not None and missing.disk.what == "evicted"


# ---- blocks that were found and are computed


@pytest.mark.parametrize("reason", UNLOADED_REASONS)
def test_what_the_leader_says_of_blocks_that_were_found(manager: ManagerBench, reason: str) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:4])
    reply = asker.lookup("r", KEYS[:4])
    asker.leader.send(Release(lookup=reply.lookup, loaded=3, unloaded={reason: 1, "nonsense": 9}))
    found = one(manager, "r")
    assert (found["loaded"], found["missing"]) == (3, {})
    name = history_module.UNLOADED.get(reason, reason)
    assert found["unloaded"] == {name: 1}
    assert why(manager).reasons == {name: 1}


# ---- which request


@pytest.mark.parametrize("wanted", ["cmpl-1", "cmpl-1-0a1b2c3d", "cmpl-1-0a"])
def test_the_id_of_the_client_finds_it_with_what_the_engine_appends(
    manager: ManagerBench, wanted: str
) -> None:
    asker = Asker(manager)
    for request in ("cmpl-12-0a1b2c3d", "cmpl-1-0a1b2c3d", "other"):
        asker.lookup(request, KEYS[:2])
    assert [found["request"] for found in why(manager, wanted).requests] == ["cmpl-1-0a1b2c3d"]


def test_a_prefix_of_several_finds_all_of_them_and_nonsense_none(manager: ManagerBench) -> None:
    asker = Asker(manager)
    for request in ("cmpl-12-0a1b2c3d", "cmpl-1-0a1b2c3d"):
        asker.lookup(request, KEYS[:2])
    assert why(manager, "cmpl").matching == 2
    assert why(manager, "x").matching == 0


def test_a_request_that_is_looked_up_again_is_counted_once(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.lookup("r", KEYS[:5])
    asker.store(KEYS[:4])
    found = asker.miss(KEYS[:5])
    assert (found["lookups"], found["host"], found["missing"]) == (2, 4, {"never_seen": 1})
    reply = why(manager)
    assert (reply.reasons, reply.asked_blocks) == ({"never_seen": 1}, 5)


# ---- bounds


def test_the_history_of_requests_is_bounded(manager: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "REQUESTS_MAX", 5)
    monkeypatch.setattr(history_module, "PROMPTS_MAX", 3)
    asker, history = Asker(manager), manager.server._history
    for number in range(12):
        asker.lookup(f"r{number}", KEYS[:2], prompt=bytes([number]) * 16)
    for _ in range(20):
        asker.lookup("r11", KEYS[:2])
    assert [found["request"] for found in why(manager).requests] == ["r11", "r10", "r9", "r8", "r7"]
    assert (len(history), len(history._prompts)) == (5, 3)
    assert len(history._by_name) == 4 + history_module.NAMES_MAX
    for salt in range(9):
        asker.lookup("r", KEYS[salt : salt + 2], prompt=PROMPT, cache_salt=str(salt))
    assert len(history._prompts[PROMPT]) == history_module.VARIANTS_MAX
    assert len(why(manager, limit=2).requests) == 2


def test_a_client_cannot_make_the_history_large(manager: ManagerBench) -> None:
    asker = Asker(manager)
    extras = {f"{i}" + "n" * 5000: "v" * 5000 for i in range(50)}
    asker.lookup("r" * 5000, KEYS[:2], prompt=PROMPT, **extras)
    (found,) = why(manager).requests
    assert len(str(found["request"])) == history_module.TEXT_MAX
    (variant,) = manager.server._history._prompts[PROMPT]
    assert len(variant.extras) == history_module.EXTRAS_MAX
    assert max(map(len, (*variant.extras, *variant.extras.values()))) == history_module.TEXT_MAX


def test_ghost_entries_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed_module, "GENERATION_BLOCKS", 10)
    departed = Departed(lambda: 1.0)
    for first in range(0, 800, 5):
        departed.emptied(Tier.HOST, KEYS[first : first + 5], "capacity")
    assert len(departed) == 10 * departed_module.GENERATIONS
    assert departed.forgotten
    assert departed.missing(KEYS[:3]).unknown == 3
    assert departed.missing(KEYS[795:803]) == (Fate(1.0, "evicted"), None, 5, 3, None)
    departed.emptied(Tier.HOST, KEYS[1000:1500], "capacity")
    assert len(departed) <= 10 * departed_module.GENERATIONS


def test_what_may_be_forgotten_is_not_called_complete(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departed_module, "GENERATION_BLOCKS", 2)
    asker = Asker(manager)
    for first in range(0, 96, 8):
        asker.store(KEYS[first : first + 8])
    found = asker.miss(KEYS[:8])
    assert (found["missing"], found["history_complete"]) == ({"never_seen": 8}, False)


def test_blocks_that_another_request_had_loaded(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.store(KEYS[:4])
    reply = asker.lookup("r", KEYS[:4])
    assert one(manager, "r")["unneeded"] == 0, "nothing is known of them yet"
    asker.leader.send(Release(lookup=reply.lookup, unloaded={"cost": 1}))
    assert one(manager, "r")["unneeded"] == 3


def test_an_id_that_would_steer_a_terminal_is_kept_without_that(manager: ManagerBench) -> None:
    asker = Asker(manager)
    asker.miss(KEYS[:2], request="a\x1b[2J\x07\nb", adapter="\x1b]0;owned")
    (found,) = why(manager, "a\x1b[2J").requests
    assert found["request"] == "a?[2J??b"
    assert [each["request"] for each in why(manager).requests] == ["a?[2J??b"]
