"""The learning policy: its tree, its duel with LRU, and what it is for. Its model has tests of its own."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.policy import LeafFirstLru
from kvbm.policy.gittins.names import names_of
from kvbm.policy.gittins.policy import Gittins
from kvbm.policy.gittins.runs import NO_RUN, RunTree
from kvbm.sim.replay.replay import replay
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace, TraceBuilder
from rigs.property_tests import scale_examples

# ---- the tree of runs


def check(tree: RunTree) -> None:
    """The invariants of a tree."""
    alive = [run for run in range(len(tree.start)) if tree.length[run]]
    assert len(alive) == len(tree)
    assert tree.live_blocks == sum(tree.length[run] for run in alive)
    assert tree.resident_blocks == sum(tree.resident[run] for run in alive)
    assert tree.resident_runs == sum(tree.resident[run] > 0 for run in alive)
    for run in alive:
        assert 0 <= tree.resident[run] <= tree.length[run]
        assert all(tree.run_of[slot] == run for slot in tree.slots(run))
        children = list(children_of(tree, run))
        assert all(tree.parent[child] == run for child in children)
        assert tree.resident_children[run] == sum(tree.resident[child] > 0 for child in children)


def children_of(tree: RunTree, run: int) -> Iterator[int]:
    child = tree.child[run]
    while child >= 0:
        yield child
        child = tree.next[child]


def names_in(tree: RunTree, run: int) -> list[int]:
    return list(tree.log_names[tree.start[run] : tree.start[run] + tree.length[run]])


@given(st.integers(0, 2**32))
@settings(max_examples=scale_examples(150), deadline=None)
def test_the_tree_says_what_was_put_in(seed: int) -> None:
    """Chains of a made-up tree of blocks are matched, added, filled, trimmed, merged and forgotten."""
    choice = random.Random(seed)
    tree, known, free = RunTree(64), set[int](), list(range(64))
    parent_of = {block: choice.choice([0, *range(max(1, block - 6), block)]) for block in range(1, 60)}

    def chain(block: int) -> array[int]:
        path = []
        while block:
            path.append(block)
            block = parent_of[block]
        return array("q", reversed(path))

    for _ in range(60):
        names = chain(choice.randint(1, 59))
        path, length = tree.match(names)
        assert length == next((i for i, name in enumerate(names) if name not in known), len(names))
        assert [name for run in path for name in names_in(tree, run)] == list(names[:length])
        if length < len(names):
            path.append(tree.add(path[-1] if path else NO_RUN, names[length:]))
            known.update(names)
        for run in path:  # what is missing comes in, from the front
            if tree.parent[run] >= 0 and tree.resident[tree.parent[run]] < tree.length[tree.parent[run]]:
                break
            wanted = min(tree.length[run] - tree.resident[run], len(free))
            if wanted:
                tree.fill(run, [free.pop() for _ in range(wanted)])
        check(tree)
        act(tree, choice, known, free)
        check(tree)


def act(tree: RunTree, choice: random.Random, known: set[int], free: list[int]) -> None:
    """One of the things that happen to runs between two requests."""
    alive = [run for run in range(len(tree.start)) if tree.length[run]]
    run = choice.choice(alive)
    leaf = tree.resident[run] and not tree.resident_children[run]
    child = tree.child[run]
    match choice.randrange(3):
        case 0 if leaf:
            free.extend(tree.trim(run, choice.randint(1, tree.resident[run])))
        case 1 if child >= 0 and tree.next[child] < 0 and tree.resident[run] in (0, tree.length[run]):
            if bool(tree.resident[run]) == bool(tree.resident[child]):
                tree.merge(run, child)
        case 2 if not tree.resident[run] and child < 0:
            known.difference_update(names_in(tree, run))
            tree.forget(run)


def test_what_continues_a_block_that_was_removed_stays_and_can_go() -> None:
    tree = RunTree(8)
    run = tree.add(NO_RUN, array("q", [1, 2, 3, 4]))
    tree.fill(run, [0, 1, 2, 3])
    end = tree.add(run, array("q", [5]))
    tree.fill(end, [4])
    tree.remove(1)
    check(tree)
    assert [list(tree.slots(tree.run_of[slot])) for slot in (0, 2, 4)] == [[0], [2, 3], [4]]
    rest = tree.run_of[2]
    assert (tree.parent[rest], tree.parent[end]) == (NO_RUN, rest)
    assert tree.match(array("q", [1, 2, 3, 4, 5]))[1] == 5, "its name is still known"
    assert list(tree.trim(end, 1)) == [4]
    assert list(tree.trim(rest, 2)) == [3, 2]
    check(tree)


def test_keys_and_numbers_have_names() -> None:
    keys = [bytes([i]) * 32 for i in range(5)]
    assert list(names_of(keys)) == [int.from_bytes(key[:8], "little", signed=True) for key in keys]
    assert list(names_of((3, 1, 2))) == [3, 1, 2]
    assert not names_of(())


# ---- the policy


def rates(trace: Trace, share: float) -> tuple[float, float]:
    """Hit rates of LRU and of the policy."""
    capacity = max(4, int(trace.unique_blocks * share))
    return (
        replay(trace, capacity, LeafFirstLru(capacity)).hit_rate,
        replay(trace, capacity, Gittins(capacity)).hit_rate,
    )


def made_up(
    next_chain: Callable[[random.Random, Callable[[int], list[int]]], list[int]], count: int
) -> Trace:
    """A trace of `count` requests, two a second."""
    choice, last, now_s = random.Random(1), 0, 0.0

    def new(blocks: int) -> list[int]:
        nonlocal last
        last += blocks
        return list(range(last - blocks, last))

    builder = TraceBuilder("made up", 512)
    for _ in range(count):
        now_s += choice.expovariate(2.0)
        chain = next_chain(choice, new)
        builder.add(now_s, chain, 512 * len(chain), 200)
    return builder.build()


def test_documents_that_come_back_are_kept_from_those_that_never_do() -> None:
    popular = [list(range(1_000_000 + 40 * i, 1_000_000 + 40 * i + 30)) for i in range(20)]

    def chain(choice: random.Random, new: Callable[[int], list[int]]) -> list[int]:
        return choice.choice(popular) + new(1) if choice.random() < 0.4 else new(30)

    trace = made_up(chain, 2500)
    lru, gittins = rates(trace, 0.012)
    assert gittins > lru + 0.1
    assert gittins > 0.65 * 0.4, "most of what there is to hit, though it stakes little at first"


def test_where_lru_is_right_it_stays_near_it() -> None:
    alive: list[list[int]] = []

    def chain(choice: random.Random, new: Callable[[int], list[int]]) -> list[int]:
        if alive and choice.random() < 0.7:
            rank = min(len(alive), int(choice.paretovariate(0.6)))
            mine = alive.pop(-rank) + new(choice.randint(1, 8))
        else:
            mine = new(choice.randint(3, 30))
        alive.append(mine)
        return mine

    trace = made_up(chain, 2500)
    for share in (0.02, 0.1):
        lru, gittins = rates(trace, share)
        assert gittins > lru - 0.003


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_the_shadow_of_lru_hits_what_lru_hits(share: float) -> None:
    trace = chats(ChatShape(conversations=150), seed=3)
    capacity = int(trace.unique_blocks * share)
    policy = Gittins(capacity)
    hits = replay(trace, capacity, policy).hits
    assert hits + policy.duel.deficit == replay(trace, capacity, LeafFirstLru(capacity)).hits
    assert policy.duel.accesses == trace.accesses


def test_replays_are_deterministic() -> None:
    trace = chats(ChatShape(conversations=80), seed=4)
    capacity = trace.unique_blocks // 20
    first, second = (replay(trace, capacity, Gittins(capacity)).hits_by_request for _ in range(2))
    assert first == second


def test_its_memory_is_bounded_by_what_it_is_told() -> None:
    trace = chats(ChatShape(conversations=200), seed=5)
    policy = Gittins(40, history_runs_min=60, history_blocks_min=500, turns_max=64, kinds_max=50)
    replay(trace, 40, policy)
    tree = policy.tree
    assert len(tree) - tree.resident_runs <= 60
    assert tree.live_blocks - tree.resident_blocks <= 500
    assert len(policy.running) <= 64
    assert policy.learner.model.kind_count <= 50 + 12 * 6 * 14 * 2, "and the rough ones"
    check(tree)
    assert len(tree.log_names) <= max(4096, 2 * tree.live_blocks) + 500


def test_generated_blocks_are_one_run_however_they_come() -> None:
    policy = Gittins(64)
    policy.requested([1, 2, 3], [-1, -1, -1], 0.0)
    policy.inserted([1, 2, 3], [0, 1, 2], -1, 0.1)
    policy.evictable([0, 1, 2])
    for block in range(4, 14):
        policy.inserted([block], [block - 1], block - 2, 1.0)
        policy.evictable([block - 1])
    tree = policy.tree
    check(tree)
    assert len({tree.run_of[slot] for slot in range(3, 13)}) == 1
    assert policy.victims(3, (), (), 2.0) == [12, 11, 10], "from the end"


def test_keys_that_contradict_one_another_do_no_harm() -> None:
    """A chain says what comes before a block. An engine that says now this, now that must not stop the manager."""
    policy = Gittins(8)
    now_s = 0.0
    choice = random.Random(2)
    free, there = list(range(8)), dict[int, int]()
    for _ in range(300):
        now_s += 1.0
        names = [choice.randint(1, 5) for _ in range(choice.randint(1, 4))]
        policy.requested(names, [there.get(name, -1) for name in names], now_s)
        missing = [name for name in dict.fromkeys(names) if name not in there]
        for slot in policy.victims(max(0, len(missing) - len(free)), missing, (), now_s):
            del there[next(name for name, at in there.items() if at == slot)]
            free.append(slot)
        for name in missing[: len(free)]:
            slot = there[name] = free.pop()
            policy.inserted(
                [name], [slot], choice.choice([-1, *(s for s in there.values() if s != slot)]), now_s
            )
            policy.evictable([slot])
        policy.finished(names[-1], 5, now_s + 0.5)
    assert sorted([*there.values(), *free]) == list(range(8))


def test_a_long_chain_is_cleared_from_its_front_without_cutting_it_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator's reset empties slot after slot; a pool of a million must not stop the manager for minutes."""
    policy, count = Gittins(2000), 2000
    blocks = list(range(1, count + 1))
    policy.requested(blocks, [-1] * count, 0.0)
    policy.inserted(blocks, list(range(count)), -1, 0.0)
    policy.evictable(range(count))
    cuts = 0
    cut = policy.tree.cut

    def counted(run: int, size: int) -> int:
        nonlocal cuts
        cuts += 1
        return cut(run, size)

    monkeypatch.setattr(policy.tree, "cut", counted)
    for slot in range(count):
        policy.removed((slot,))
        if slot % 100 == 0:
            check(policy.tree)
    assert cuts < 10
    assert policy.tree.resident_blocks == 0


def test_a_long_chain_that_is_given_up_from_its_end_is_not_cut_nor_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that fails gives back its slots, the last block's first."""
    policy, count = Gittins(2000), 2000
    blocks = list(range(1, count + 1))
    policy.requested(blocks, [-1] * count, 0.0)
    policy.inserted(blocks, list(range(count)), -1, 0.0)
    tree, runs = policy.tree, len(policy.tree)
    with monkeypatch.context() as patch:
        patch.setattr(tree, "cut", lambda *_: pytest.fail("cut"))
        patch.setattr(tree, "slots", lambda *_: pytest.fail("searched"))
        policy.removed(reversed(range(1000, count)))
    check(tree)
    assert (tree.resident_blocks, len(tree)) == (1000, runs)
    policy.removed((500,))
    check(tree)
    policy.removed((499,))
    check(tree)
    assert tree.resident_blocks == 998


def test_many_chains_that_grow_by_turns_are_not_copied_each_time() -> None:
    """As after a restart, when the blocks of a disk are inserted in the order in which they were written."""
    chains, length = 20, 400
    policy = Gittins(chains * length)
    for depth in range(length):
        for chain in range(chains):
            slot = depth * chains + chain
            policy.inserted([slot + 1], [slot], slot - chains if depth else -1, 0.0)
    tree = policy.tree
    check(tree)
    assert max(tree.length) <= 256
    policy.evictable(range(chains * length))
    assert len(policy.victims(chains * length, (), (), 1.0)) == chains * length


def test_blocks_that_came_without_a_request_do_not_disturb_the_duel() -> None:
    """LRU's shadow knows nothing of the blocks that a disk held before a restart, and still counts right."""
    policy = Gittins(30, turns_max=64)
    policy.inserted(list(range(1000, 1030)), list(range(30)), -1, 0.0)
    policy.evictable(range(30))
    slots: dict[int, int] = {1000 + i: i for i in range(30)}
    choice, duel = random.Random(3), policy.duel
    for number in range(400):
        now_s = float(number)
        chat = choice.randrange(1, 6) * 100
        blocks = list(range(chat, chat + choice.randint(1, 8)))
        policy.requested(blocks, [slots.get(block, -1) for block in blocks], now_s)
        missing = [block for block in blocks if block not in slots]
        gone = policy.victims(max(0, len(missing) + len(slots) - 30), (), (), now_s)
        slots = {block: slot for block, slot in slots.items() if slot not in gone}
        free = iter(sorted(set(range(30)) - set(slots.values())))
        taken = [next(free) for _ in missing]
        behind = slots.get(missing[0] - 1, -1) if missing else -1
        policy.inserted(missing, taken, behind, now_s)
        policy.evictable(taken)
        slots.update(zip(missing, taken, strict=True))
        recent = range(duel.cutoff + 1, duel._latest + 1)
        assert duel._kept == sum(duel._blocks[request % 65] for request in recent) <= 30
        assert duel._kept_there == sum(duel._there[request % 65] for request in recent) <= duel._kept
        assert duel.cutoff <= duel._latest
    assert duel.deficit < 400


def test_a_chain_that_comes_block_by_block_is_as_one_that_came_at_once() -> None:
    """A disk takes the blocks of a chain one after the other: they are one run, and go in the same order."""
    blocks = list(range(1, 301))
    at_once, one_by_one = Gittins(400), Gittins(400)
    for policy in (at_once, one_by_one):
        policy.requested(blocks, [-1] * len(blocks), 1.0)
    at_once.inserted(blocks, list(range(300)), -1, 2.0)
    for slot, block in enumerate(blocks):
        one_by_one.inserted((block,), (slot,), slot - 1, 2.0)
    assert len(one_by_one.tree) == len(at_once.tree)
    for policy in (at_once, one_by_one):
        policy.evictable(range(300))
        policy.finished(blocks[-1], 10, 3.0)
        policy.requested(blocks, list(range(300)), 4.0)
    orders = [policy.victims(200, (), (), 5.0) for policy in (at_once, one_by_one)]
    assert orders[0] == orders[1] == list(range(299, 99, -1))
