"""What the manager publishes for routers: whatever happens, a subscriber's account is what the tiers hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.block import BlockKey, Tier
from kvbm.errors import SettingsError
from kvbm.events.tier_form import tier_fields
from kvbm.events.wire import cleared_fields, name_of
from kvbm.manager import announcements
from kvbm.manager.event_stream import FIRST_S, TOLD_APART_S, publishing
from kvbm.protocol import Lookup, LookupReply, Reset, ResetReply, TierEvents
from kvbm.settings import Settings
from rigs.announcing import answer, store
from rigs.indexer import Held, Indexer
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER, Client, ManagerBench

TOPIC, OTHERS = NAMESPACE.short, OTHER.short
MEDIUMS = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}


class Wire:
    """Where the manager publishes, without a network: subscribers hear at once, unless nobody reads (`slow`)."""

    def __init__(self) -> None:
        self.endpoint, self.replay_endpoint = "tcp://127.0.0.1:1", ""
        self.slow = False
        self.messages: list[tuple[bytes, TierEvents, bool]] = []
        self.subscribers: list[Indexer] = []
        self._subscribed: list[bytes] = []
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def room(self) -> bool:
        return not self.slow

    def publish(self, topic: bytes, told: TierEvents, cleared: bool = False) -> None:
        assert self.room
        events = [cleared_fields()] * cleared + tier_fields(told)
        self.messages.append((topic, told, cleared))
        for each in self.subscribers:
            if topic.startswith(each.topic):
                each.take_in((topic, len(self.messages), events))

    def fileno(self) -> int:
        return self._woken

    def take_subscribed(self) -> list[bytes]:
        os.eventfd_read(self._woken)
        taken, self._subscribed = self._subscribed, []
        return taken

    def subscribe(self, topic: str = "") -> Indexer:
        """Somebody who comes now."""
        self.subscribers.append(Indexer("inproc://nowhere", topic.encode()))
        self._subscribed.append(topic.encode())
        self.wake()
        return self.subscribers[-1]

    def wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        for each in self.subscribers:
            each.close()
        os.close(self._woken)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


Make = Callable[..., ManagerBench]


@pytest.fixture
def make(make_manager: Make, wire: Wire) -> Make:
    def build(namespaces: int = 1, **settings: Any) -> ManagerBench:
        return make_manager(namespaces, publisher=wire, events_endpoint=wire.endpoint, **settings)

    return build


@pytest.fixture
def manager(make: Make) -> ManagerBench:
    return make()


def held(manager: ManagerBench, number: int = 0) -> Held:
    """What the tiers of a namespace hold."""
    space = manager.space(number)
    return {(MEDIUMS[pool.tier], name_of(key)) for pool in space.pools for _, key in pool.resident()}


def on_host(keys: list[BlockKey]) -> Held:
    return {("CPU", name_of(key)) for key in keys}


def test_a_subscriber_hears_what_comes_and_goes(manager: ManagerBench, wire: Wire) -> None:
    indexer = wire.subscribe()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4])
    manager.until(lambda: indexer.of(TOPIC) == on_host(KEYS[:4]))
    assert indexer.blocks[name_of(KEYS[1])][0] == name_of(KEYS[0])
    store(leader, 2, KEYS[100:116])
    manager.until(lambda: indexer.of(TOPIC) == held(manager))
    assert len(indexer.of(TOPIC)) == 16 < 20, "the tier is full"
    leader.send(Reset())
    answer(leader, ResetReply)
    manager.until(lambda: indexer.of(TOPIC) == set())


def test_late_subscribers_hear_of_everything_and_the_others_forget_nothing(
    manager: ManagerBench, wire: Wire
) -> None:
    early = wire.subscribe()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4])
    manager.tick(FIRST_S)
    cleared = early.cleared
    late = wire.subscribe()
    manager.until(lambda: late.of(TOPIC) == on_host(KEYS[:4]))
    assert (late.cleared, early.cleared) == (0, cleared)
    assert early.of(TOPIC) == on_host(KEYS[:4])
    later = wire.subscribe(TOPIC[:3])
    manager.step(10)
    assert later.of(TOPIC) == set(), "so soon after the other one, it waits a little"
    manager.tick(TOLD_APART_S)
    manager.until(lambda: later.of(TOPIC) == on_host(KEYS[:4]))
    count = len(wire.messages)
    wire.subscribe("nobody")
    manager.tick(TOLD_APART_S)
    assert len(wire.messages) == count, "no namespace has this topic"


def test_who_knows_an_earlier_managers_blocks_forgets_them(manager: ManagerBench, wire: Wire) -> None:
    """One that is there before the namespace, and one whose connection comes back a little later."""
    back, slower = wire.subscribe(), Indexer("inproc://nowhere")
    for each in (back, slower):
        each.held[TOPIC.encode()] = on_host(KEYS[50:60])
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:2])
    manager.until(lambda: back.of(TOPIC) == on_host(KEYS[:2]))
    manager.tick(TOLD_APART_S)
    wire.subscribe().close()
    wire.subscribers[-1] = slower
    manager.until(lambda: slower.of(TOPIC) == on_host(KEYS[:2]))
    assert back.of(TOPIC) == on_host(KEYS[:2])


def test_what_goes_while_all_is_told_again_is_removed(
    manager: ManagerBench, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = wire.subscribe()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:10])
    manager.tick(FIRST_S)
    monkeypatch.setattr(announcements, "TOLD_AT_ONCE", 1)
    monkeypatch.setattr(announcements, "REMOVED_AT_ONCE", 1)
    late = wire.subscribe()
    manager.step(4)
    assert 0 < len(late.of(TOPIC)) < 10
    wire.slow = True
    leader.send(Reset())
    answer(leader, ResetReply)
    store(leader, 2, KEYS[:5])
    monkeypatch.setattr(announcements, "TOLD_AT_ONCE", 4)
    wire.slow = False  # many removals wait, some of blocks that are back
    wire.wake()
    manager.step(100)
    assert late.of(TOPIC) == early.of(TOPIC) == held(manager) != set()


def test_while_nobody_reads_nothing_is_handed_over_and_then_all_of_it(
    manager: ManagerBench, wire: Wire
) -> None:
    indexer = wire.subscribe()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4])
    manager.step(10)
    wire.slow, count = True, len(wire.messages)
    for number in range(2, 10):
        store(leader, number, KEYS[100 * number : 100 * number + 8])
    assert manager.server.idle, "it waits without turning"
    assert len(wire.messages) == count
    assert indexer.of(TOPIC) == on_host(KEYS[:4])
    wire.slow = False
    wire.wake()
    manager.until(lambda: indexer.of(TOPIC) == held(manager))
    told = sum(len(run.hashes) // 32 for _, message, _ in wire.messages[count:] for run in message.stored)
    assert told <= 16, "blocks that came and went unheard cost nothing"


def test_two_engines_of_one_cache_make_one_stream(manager: ManagerBench, wire: Wire) -> None:
    indexer = wire.subscribe()
    one, _ = manager.engine("one")
    two, _ = manager.engine("two")
    store(one, 1, KEYS[:3])
    store(two, 1, KEYS[:6])
    manager.until(lambda: indexer.of(TOPIC) == on_host(KEYS[:6]))
    told = sum(len(run.hashes) // 32 for _, message, _ in wire.messages for run in message.stored)
    assert told == 6


def test_namespaces_have_topics_of_their_own(make: Make, wire: Wire) -> None:
    manager = make(2, host_blocks=32)
    everything, one_only = wire.subscribe(), wire.subscribe(OTHERS)
    one, _ = manager.engine("one")
    two, _ = manager.engine("two", namespace=OTHER)
    store(one, 1, KEYS[:3])
    store(two, 1, KEYS[:5])
    manager.until(lambda: everything.of(OTHERS) == one_only.of(OTHERS) == on_host(KEYS[:5]))
    assert everything.of(TOPIC) == on_host(KEYS[:3])
    assert list(one_only.held) == [OTHERS.encode()]


def test_a_namespace_that_ends_is_forgotten(make: Make, wire: Wire) -> None:
    manager = make(2, host_blocks=32)
    indexer = wire.subscribe()
    passing = OTHER.__class__(model="m", fields=(("weights", "cc"),), ephemeral=True)
    stays, _ = manager.engine("stays")
    leader, worker = manager.engine("goes", namespace=passing)
    store(stays, 1, KEYS[:2])
    store(leader, 1, KEYS[:3])
    manager.until(lambda: indexer.of(passing.short) == on_host(KEYS[:3]))
    leader.close()
    worker.close()
    manager.until(lambda: indexer.of(passing.short) == set())
    assert indexer.of(TOPIC) == on_host(KEYS[:2])


def test_a_namespace_that_fails_is_forgotten(manager: ManagerBench, wire: Wire) -> None:
    indexer = wire.subscribe()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:2])
    manager.until(lambda: indexer.of(TOPIC) == on_host(KEYS[:2]))
    manager.space().failure = "a defect"
    manager.until(lambda: indexer.of(TOPIC) == set())
    manager.space().failure = ""


def with_disk(make: Make, tmp_path: Path, **settings: Any) -> tuple[ManagerBench, Client]:
    disk = {"disk_blocks": 20, "disk_dir": str(tmp_path / "disk"), "disk_offload_filter": False}
    manager = make(**{"host_blocks": 16, **disk, **settings})
    leader, _ = manager.engine()
    return manager, leader


def test_the_disk_is_told_of_too_though_no_engine_publishes_and_after_a_restart(
    make: Make, wire: Wire, tmp_path: Path
) -> None:
    indexer = wire.subscribe()
    manager, leader = with_disk(make, tmp_path)
    store(leader, 1, KEYS[:8])
    both = on_host(KEYS[:8]) | {("STORAGE", name_of(key)) for key in KEYS[:8]}
    manager.until(lambda: indexer.of(TOPIC) == both)
    manager.server.close(keep=True)
    manager.open = False
    manager, leader = with_disk(make, tmp_path)
    manager.until(lambda: indexer.of(TOPIC) == held(manager))
    assert indexer.of(TOPIC) == {("STORAGE", name_of(key)) for key in KEYS[:8]}
    leader.send(Lookup(lookup=1, keys=b"".join(KEYS[:8])))
    answer(leader, LookupReply)
    manager.until(lambda: indexer.of(TOPIC) == both)


def test_host_memory_that_only_passes_blocks_on_is_not_told_of(
    make: Make, wire: Wire, tmp_path: Path
) -> None:
    indexer = wire.subscribe()
    manager, leader = with_disk(make, tmp_path, host_blocks=None, staging_bytes=64 * LAYOUT.block_bytes)
    store(leader, 1, KEYS[:5])
    manager.until(lambda: indexer.of(TOPIC) == {("STORAGE", name_of(key)) for key in KEYS[:5]})


def test_engines_are_asked_to_say_what_blocks_are(manager: ManagerBench, make_manager: Make) -> None:
    silent = make_manager()
    for publishes, each in ((True, manager), (False, silent)):
        assert [client.welcome.events for client in each.engine()] == [publishes] * 2


def test_where_the_address_is_taken_only_an_engines_own_manager_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with publishing(Settings(), private=False) as nobody:
        assert nobody is None
    with publishing(Settings(events_endpoint="tcp://127.0.0.1:0"), private=False) as publisher:
        assert publisher is not None
        taken = Settings(events_endpoint=publisher.endpoint)
        with publishing(taken, private=True) as second:
            assert second is None
        assert "no KV events are published: DYN_KVBM_EVENTS_ENDPOINT=" in caplog.text
        with pytest.raises(SettingsError), publishing(taken, private=False):
            pass
    with publishing(taken, private=False) as after:
        assert after is not None, "the address is free again"
