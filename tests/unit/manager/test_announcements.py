"""What a manager tells leaders that asked: of each tier once, in their own order, also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvbm.block import KEY_BYTES, BlockKey, Outcome, Tier
from kvbm.framing import FACTS_BYTES_MAX, TOKEN_BYTES, encode
from kvbm.hashing import join_keys, split_keys
from kvbm.manager import announcements, assembly, disk_side
from kvbm.manager.announcements import next_events
from kvbm.manager.slot_facts import SlotFact, SlotFacts
from kvbm.protocol import (
    Announce,
    Lookup,
    LookupReply,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    TierEvents,
)
from kvbm.tiers.disk.facts_file import FACTS_NAME
from rigs.announcing import answer, store, tokens
from rigs.gated_syscalls import GatedSyscalls
from rigs.manager import KEYS, OTHER, Client, ManagerBench, refusal

Held = set[tuple[int, bytes]]
HOST, DISK = int(Tier.HOST), int(Tier.DISK)


class Account:
    """A leader that asked, and what it believes the tiers to hold."""

    def __init__(self, leader: Client) -> None:
        self.leader = leader
        self.held: Held = set()
        self.before: dict[bytes, bytes] = {}
        self.complete = 0
        leader.send(Announce())

    def hear(self) -> Held:
        """Take in what has come."""
        for _ in range(8):
            for message in self.leader.take():
                if isinstance(message, TierEvents):
                    self._take_in(message)
        return self.held

    def _take_in(self, message: TierEvents) -> None:
        for gone in message.removed:
            for name in split_keys(gone.hashes):
                self.held.remove((gone.tier, name))
        for run in message.stored:
            before, names = run.before, split_keys(run.hashes)
            assert run.tokens == tokens(names)
            for name in names:
                assert (run.tier, name) not in self.held
                self.held.add((run.tier, name))
                self.before[name], before = before, name
        self.complete += message.complete


def in_tier(tier: int, keys: list[BlockKey]) -> Held:
    return {(tier, key) for key in keys}


def test_a_leader_is_told_of_what_is_held_and_of_what_comes_and_goes(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4])
    account = Account(leader)
    assert account.hear() == in_tier(HOST, KEYS[:4])
    assert account.complete == 1
    store(leader, 2, KEYS[4:6], KEYS[3])
    assert account.hear() == in_tier(HOST, KEYS[:6])
    assert account.before == dict(zip(KEYS[:6], (b"", *KEYS[:5]), strict=True))
    store(leader, 3, KEYS[100:112])
    held = account.hear()
    assert len(held) == 16 < 18, "the tier is full"
    assert {key for _, key in held} == {key for _, key in manager.space().host_pool.resident()}
    leader.send(Reset())
    answer(leader, ResetReply)
    assert account.hear() == set()
    assert account.complete == 1


def test_blocks_of_which_nothing_was_said_are_told_of_when_somebody_speaks(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    account = Account(leader)
    store(leader, 1, KEYS[:3], said=False)
    assert account.hear() == set()
    store(leader, 2, KEYS[:3])
    assert account.hear() == in_tier(HOST, KEYS[:3])


def test_the_engines_own_names_are_told(manager: ManagerBench) -> None:
    """With an adapter keys are others than the engine's hashes."""
    leader, _ = manager.engine()
    account = Account(leader)
    names = KEYS[200:202]
    leader.send(
        Reserve(
            store=1,
            parent=KEYS[0],
            keys=join_keys(KEYS[1:3]),
            hashes=join_keys(names),
            before=KEYS[199],
            tokens=tokens(names),
            facts=(b"an adapter", b""),
        )
    )
    answer(leader, ReserveReply)
    assert account.hear() == set(), "nobody can find them yet"


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_a_slow_start_tells_everything_once(
    make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(announcements, "TOLD_AT_ONCE", at_once)
    manager = make_manager(host_blocks=16)
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:10])
    account = Account(leader)
    store(leader, 2, KEYS[100:110])
    for _ in range(16):
        account.hear()
    assert {key for _, key in account.held} == {key for _, key in manager.space().host_pool.resident()}
    assert account.complete == 1


def test_two_engines_of_a_shared_cache_are_told_of_each_others_blocks(manager: ManagerBench) -> None:
    one, _ = manager.engine("one")
    two, _ = manager.engine("two")
    accounts = [Account(one), Account(two)]
    store(one, 1, KEYS[:3])
    store(two, 1, KEYS[3:5], KEYS[2])
    assert [account.hear() for account in accounts] == [in_tier(HOST, KEYS[:5])] * 2
    one.close()
    manager.step()
    store(two, 2, KEYS[5:6], KEYS[4])
    assert accounts[1].hear() == in_tier(HOST, KEYS[:6])


def test_asked_again_it_begins_anew(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:3])
    assert Account(leader).hear() == Account(leader).hear() == in_tier(HOST, KEYS[:3])


def test_other_models_blocks_are_not_told_of(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(2, host_blocks=32)
    one, _ = manager.engine("one")
    two, _ = manager.engine("two", namespace=OTHER)
    account = Account(two)
    store(one, 1, KEYS[:3])
    assert account.hear() == set()


def on_disk(make_manager: Callable[..., ManagerBench], tmp_path: Path) -> tuple[ManagerBench, Client]:
    manager = make_manager(
        host_blocks=16, disk_blocks=20, disk_dir=str(tmp_path / "disk"), disk_offload_filter=False
    )
    leader, _ = manager.engine(events=True)
    return manager, leader


def test_blocks_on_disk_are_told_of_and_a_restart_tells_them_again(
    make_manager: Callable[..., ManagerBench], tmp_path: Path
) -> None:
    manager, leader = on_disk(make_manager, tmp_path)
    account = Account(leader)
    store(leader, 1, KEYS[:8])
    manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:8]) | in_tier(DISK, KEYS[:8]))
    manager.server.close(keep=True)
    manager.open = False
    manager, leader = on_disk(make_manager, tmp_path)
    account = Account(leader)
    manager.until(lambda: account.hear() == in_tier(DISK, KEYS[:8]))
    assert account.before == dict(zip(KEYS[:8], (b"", *KEYS[:7]), strict=True))
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:8])))
    answer(leader, LookupReply)
    manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:8]) | in_tier(DISK, KEYS[:8]))
    leader.send(Release(lookup=1))
    for number in range(2, 8):
        store(leader, number, KEYS[100 * number : 100 * number + 8])
    manager.until(lambda: not manager.space().disk.queued_count)  # type: ignore[union-attr]  # there is one
    pools = manager.space().pools
    assert all(pool.evicted_count for pool in pools)
    held = {(int(pool.tier), key) for pool in pools for _, key in pool.resident()}
    manager.until(lambda: account.hear() == held)


def test_facts_on_a_disk_that_hangs_keep_no_client(
    make_manager: Callable[..., ManagerBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come when it works again, and the loop does not turn for them meanwhile."""
    kernel = GatedSyscalls()
    monkeypatch.setattr(assembly, "open_disk_tier", partial(assembly.open_disk_tier, syscalls=kernel))
    manager, leader = on_disk(make_manager, tmp_path)
    store(leader, 1, KEYS[:8])
    disk = manager.space().disk
    assert disk is not None
    manager.until(lambda: not disk.queued_count and disk.pool.counts().resident == 8)
    kernel.shut("preadv", FACTS_NAME)
    account = Account(leader)
    manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:8]))
    kernel.wait_entered()
    assert account.hear() == in_tier(HOST, KEYS[:8])
    assert manager.server.idle
    assert account.complete == 0
    store(leader, 2, KEYS[8:10], KEYS[7])
    kernel.open_gate()
    manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:10]) | in_tier(DISK, KEYS[:10]))
    assert account.complete == 1


def test_blocks_of_a_disk_that_is_off_are_told_of_when_it_works_again(
    make_manager: Callable[..., ManagerBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken for gone until then, some at a time."""
    manager, leader = on_disk(make_manager, tmp_path)
    store(leader, 1, KEYS[:8])
    disk = manager.space().disk
    assert disk is not None
    manager.until(lambda: not disk.queued_count and disk.pool.counts().resident == 8)
    account = Account(leader)
    manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:8]) | in_tier(DISK, KEYS[:8]))
    monkeypatch.setattr(disk_side, "LEFT_AT_ONCE", 3)
    genuine, slices = disk.facts.emptied, list[int]()

    def emptied(slots: Sequence[int]) -> None:
        slices.append(len(slots))
        genuine(slots)

    monkeypatch.setattr(disk.facts, "emptied", emptied)
    with monkeypatch.context() as off:  # it is opened again only once that was heard
        off.setattr(type(disk.medium), "heal", lambda medium: Outcome.PENDING)
        disk.medium._fault.declare("broken by the test")  # type: ignore[attr-defined]  # as a failed call does
        manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:8]))
    manager.until(lambda: manager.clock.advance(1.0) or not disk.trouble)
    manager.until(lambda: account.hear() == in_tier(HOST, KEYS[:8]) | in_tier(DISK, KEYS[:8]))
    assert max(slices) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": b"x"},
        {"tokens": bytes(7 * 2)},
        {"tokens": bytes(32), "facts": (b"",) * 3},
        {"tokens": bytes(32), "before": b"short"},
    ],
)
def test_facts_that_do_not_fit_their_blocks_are_nonsense(
    manager: ManagerBench, wrong: dict[str, object]
) -> None:
    leader, _ = manager.engine()
    fields = {"store": 1, "parent": b"", "keys": join_keys(KEYS[:2]), **wrong}
    leader.send(Reserve(**fields))  # type: ignore[arg-type]  # by name
    assert refusal(leader).startswith("reserve ")


def test_blocks_of_many_tokens_are_told_of_in_messages_within_the_bound() -> None:
    """A turn's message has some of each tier."""
    block_tokens = 16_384
    tokens = bytes(TOKEN_BYTES * block_tokens)
    listeners = []
    for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE):
        facts = SlotFacts(tier, 100, block_tokens)
        for slot in range(100):
            facts.note(slot, SlotFact(slot.to_bytes(KEY_BYTES, "big"), b"", tokens, bytes(FACTS_BYTES_MAX)))
        facts.committed(range(100))
        listeners.append(facts.listen())
    told = 0
    while not all(listener.complete for listener in listeners):
        removed, stored = next_events(listeners)
        encode(TierEvents(removed=removed, stored=stored))
        told += sum(len(run.hashes) // KEY_BYTES for run in stored)
    assert told == 300
