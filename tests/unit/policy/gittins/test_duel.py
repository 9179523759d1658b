"""How much the learning policy may lose to LRU, on traffic that is made to suit LRU or to change its nature."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.policy import LeafFirstLru
from kvbm.policy.gittins.duel import LOSS_MAX
from kvbm.policy.gittins.policy import Gittins
from kvbm.sim.replay.replay import replay
from kvbm.sim.traces.trace import Trace, TraceBuilder
from rigs.property_tests import scale_examples

AIM = 0.002
KINDS = ("chats", "once", "popular", "loop", "latest", "giants")


class Traffic:
    """Chains of blocks of one kind after the other."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.count = 0
        self.chats: list[list[int]] = []
        self.latest: list[list[int]] = []
        self.popular = [self.new(self.choice.randint(5, 40)) for _ in range(20)]
        self.loop = [self.new(10) for _ in range(40)]
        self.turn = 0

    def new(self, blocks: int) -> list[int]:
        self.count += blocks
        return list(range(self.count - blocks, self.count))

    def chain(self, kind: str) -> list[int]:
        choice = self.choice
        if kind == "chats":  # the more recent, the more likely to go on
            known = bool(self.chats) and choice.random() < 0.7
            rank = min(len(self.chats), int(choice.paretovariate(0.6)))
            self.chats.append(
                self.chats.pop(-rank) + self.new(choice.randint(1, 8)) if known else self.new(20)
            )
            return self.chats[-1]
        if kind == "popular":
            return choice.choice(self.popular) + self.new(1)
        if kind == "loop":
            self.turn = (self.turn + 1) % len(self.loop)
            return self.loop[self.turn]
        if kind == "latest" and self.latest:  # what never came back comes back after all, the latest first
            return self.latest.pop()
        if kind == "giants" and self.latest and choice.random() < 0.5:
            return choice.choice(self.latest)
        self.latest.append(self.new(300 if kind == "giants" else 10))
        self.latest[:] = self.latest[-40:]
        return self.latest[-1]


def traffic(seed: int, phases: list[tuple[str, int]]) -> Trace:
    """So many requests of each kind, two a second."""
    source, now_s, builder = Traffic(seed), 0.0, TraceBuilder("made up", 512)
    for kind, count in phases:
        for _ in range(count):
            now_s += source.choice.expovariate(2.0)
            chain = source.chain(kind)
            builder.add(now_s, chain, 512 * len(chain), 200)
    return builder.build()


def losses(trace: Trace, capacity: int, policy: Gittins) -> list[float]:
    """After each request, how far the policy is behind LRU, as a share of the blocks asked for until then."""
    lru = replay(trace, capacity, LeafFirstLru(capacity)).hits_by_request
    mine = replay(trace, capacity, policy).hits_by_request
    behind = accumulate(a - b for a, b in zip(lru, mine, strict=True))
    asked = accumulate(len(request.blocks) for request in trace.requests)
    return [a / b for a, b in zip(behind, asked, strict=True)]


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(20, 200)), min_size=1, max_size=5),
    st.sampled_from([20, 100, 400, 1500]),
)
@settings(max_examples=scale_examples(30), deadline=None)
def test_with_stakes_covered_in_full_no_traffic_makes_it_lose_more(
    seed: int, phases: list[tuple[str, int]], capacity: int
) -> None:
    """At no time, in no tier."""
    policy = Gittins(capacity)
    policy.duel.price_min = 1.0
    assert max(losses(traffic(seed, phases), capacity, policy)) <= LOSS_MAX + 1e-9


ALTERNATING = [
    [("chats", 1500)],
    [("once", 300), ("latest", 40)] * 4,
    [("popular", 300), ("chats", 300)] * 3,
    [("once", 700), ("chats", 700)],
    [("loop", 300), ("once", 200)] * 3,
    [("giants", 20), ("chats", 200)] * 5,
]


@pytest.mark.parametrize("phases", ALTERNATING, ids=lambda phases: "-".join(kind for kind, _ in phases[:2]))
@pytest.mark.parametrize("capacity", [80, 300, 1200])
def test_it_loses_no_more_than_two_tenths_of_a_point(phases: list[tuple[str, int]], capacity: int) -> None:
    for seed in (0, 1):
        assert losses(traffic(seed, phases), capacity, Gittins(capacity))[-1] <= AIM


def test_what_lru_holds_is_what_the_duel_says() -> None:
    """Its stakes are those blocks of LRU's tier that the policy's tier does not have."""
    trace, capacity = traffic(3, [("popular", 100), ("chats", 300), ("once", 50)]), 200
    policy = Gittins(capacity)
    lru = replay(trace, capacity, LeafFirstLru(capacity)).hits
    mine = replay(trace, capacity, policy).hits
    assert policy.duel.deficit == lru - mine
    latest: list[int] = []
    for request in reversed(trace.requests):
        latest += [block for block in dict.fromkeys(request.blocks) if block not in latest]
        if len(latest) >= capacity:
            break
    tree = policy.tree
    here = {
        tree.log_names[tree.start[r] + i] for r in range(len(tree.start)) for i in range(tree.resident[r])
    }
    missing = len(set(latest[:capacity]) - here)
    assert missing <= policy.duel.stakes <= missing + max(len(request.blocks) for request in trace.requests)
