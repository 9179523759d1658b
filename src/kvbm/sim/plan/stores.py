"""Whether a store that several nodes share pays on a trace, for `kvbm plan --remote`.

Three ways to a target of hit rates are replayed: host memory on each node, a disk alone on each node, and host memory
with one store for all. The store is then held against what its whole cost would buy of the other two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvbm.errors import KvbmError, SettingsError
from kvbm.present.numbers import format_bytes, quantile
from kvbm.settings.parse import GB
from kvbm.sim.plan.cheapest import DOLLARS, Point, Prices, Target, coarse, sizes_between
from kvbm.sim.plan.planning import HOST_SPAN, STAGING_BYTES, Question, first_requests
from kvbm.sim.plan.store_prices import StoreMonth, StorePrices, month_of
from kvbm.sim.replay.fleet import ROUTES, FleetReplay, fleet_replay, routed
from kvbm.sim.serving.store import StoreRules
from kvbm.sim.simulate.report import TraceFacts, facts
from kvbm.sim.simulate.simulation import Watch, open_trace
from kvbm.sim.traces.trace import Trace

HOST, DISK, STORE = "host", "disk", "store"
"""The ways: host memory alone, a disk alone (and the staging area that it needs), host memory and the store."""
PAUSES_SHARE = 0.99


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of each node that were tried, in bytes, and what they and the store cost together in a month."""

    kind: str
    host_bytes: int
    disk_bytes: int
    cost: float
    hit_rate: float
    store_hit_rate: float = 0.0
    pause_s: float = 0.0
    """Of the blocks read from the store, 99 % had been written or used there no longer before than this."""
    month: StoreMonth | None = None
    meets: bool = False


class StoreAnswer(msgspec.Struct, kw_only=True):
    """The answer for one trace. `best` is the cheapest way with the store that meets the target, or the one that comes
    nearest; `without` the cheapest that meets it without the store. `same_money`: what the cost of `best` buys else.
    """

    trace: TraceFacts
    target: Target
    policy: str
    nodes: int
    route: str
    prices: Prices
    store_prices: StorePrices
    store: StoreRules
    ways: list[Way] = msgspec.field(default_factory=list)
    best: Way | None = None
    without: Way | None = None
    same_money: list[Way] = msgspec.field(default_factory=list)
    pays: bool = False
    replays: int = 0
    notes: list[str] = msgspec.field(default_factory=list)


class StoreAnswers(msgspec.Struct, kw_only=True):
    """One answer for each trace, as `--json` writes them."""

    settings: dict[str, object]
    plans: list[StoreAnswer] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StoreQuestion:
    """What is asked about a store, beside what `Question` says of the trace, the target and the other prices.

    `rules`: the store's fields of `StoreRules` but for the blocks, which follow from the trace.
    """

    question: Question
    nodes: int = 1
    route: str = ROUTES[0]
    prices: StorePrices = field(default_factory=lambda: StorePrices(assumed=True))
    rules: dict[str, object] = field(default_factory=dict)

    def check(self) -> None:
        """`SettingsError` for options that cannot be run, whatever the traces hold."""
        question = self.question
        question.check()
        times = "a target of hit rates with --remote: for times over a network see kvbm scale"
        for option, given, accepted in (
            ("--target-ttft", question.target.most_s, times),
            ("--sample", question.sample, "all conversations with --remote: a sample has another bill"),
            ("--model", question.model and question.model.name, "with --remote a model without groups"),
        ):
            if given is not None:
                raise SettingsError(option, given, accepted)
        if question.prices.unit != DOLLARS:
            raise KvbmError(
                "--remote: its cost is in dollars: give --price-host and --price-disk with --machine"
            )
        if self.route not in ROUTES:
            raise SettingsError("--router", self.route, f"one of {', '.join(ROUTES)}")
        StoreRules.of(1, **self.rules).check()


def answer_stores(asked: StoreQuestion, watch: Watch) -> StoreAnswers:
    """Every trace's answer. `TraceError` for files that cannot be read."""
    question = asked.question
    settings: dict[str, object] = {
        "policy": question.policy,
        "bytes_per_token": question.bytes_per_token,
        "bounds": question.bounds,
        "reading": question.reading,
        "limit": question.limit,
        "replays": question.replays,
        "nodes": asked.nodes,
        "router": asked.route,
        "remote": asked.rules,
    }
    answers = StoreAnswers(settings=settings)
    for word in dict.fromkeys(question.traces):
        watch(f"reading {word}", 0)
        trace = open_trace(word, question.reading)
        if question.limit is not None:
            trace = first_requests(trace, min(question.limit, len(trace.requests)))
        answers.plans.append(_Planning(asked, word, trace, watch).answer())
    return answers


class _Planning:
    """One trace's answer in the making."""

    def __init__(self, asked: StoreQuestion, word: str, trace: Trace, watch: Watch) -> None:
        question = asked.question
        assert question.bytes_per_token is not None
        if not trace.seconds:
            raise KvbmError(f"{word}: all requests come at once, which says nothing of a month")
        self._asked, self._question, self._trace, self._watch = asked, question, trace, watch
        self._block_bytes = question.bytes_per_token * trace.block_tokens
        self._everything = trace.unique_blocks * self._block_bytes
        self._rules = StoreRules.of(self._block_bytes, **asked.rules)
        self._routed = routed(trace, asked.nodes, asked.route, question.reading.seed)
        self._known: dict[tuple[int, bool], FleetReplay] = {}
        self._ways: dict[tuple[str, int], Way] = {}
        self._answer = StoreAnswer(
            trace=facts(trace, word, question.reading.seed, question.bytes_per_token),
            target=question.target,
            policy=question.policy,
            nodes=asked.nodes,
            route=asked.route,
            prices=question.prices,
            store_prices=asked.prices,
            store=self._rules,
        )

    def answer(self) -> StoreAnswer:
        """Search, and say what was found."""
        answer, bounds = self._answer, self._question.bounds
        kinds = [(STORE, bounds.host_bytes), (HOST, bounds.host_bytes), (DISK, bounds.disk_bytes)]
        for kind, bound in kinds:
            if bound != 0:
                self._look(kind, self._sizes(bound))
        answer.ways = sorted(self._ways.values(), key=lambda way: (way.cost, way.kind))
        meeting = [way for way in answer.ways if way.meets]
        answer.best = next((way for way in meeting if way.kind == STORE), None)
        answer.without = next((way for way in meeting if way.kind != STORE), None)
        stores = [way for way in answer.ways if way.kind == STORE]
        if answer.best is None and stores:
            answer.best = max(stores, key=lambda way: (way.hit_rate, -way.cost))
        if answer.best is not None:
            best, without = answer.best, answer.without
            answer.same_money = self._for_the_money(best.cost)
            answer.pays = best.meets and (without is None or best.cost < without.cost)
        answer.replays = len(self._known)
        if answer.replays >= self._question.replays:
            answer.notes.append(f"stopped after {answer.replays} replays (--replays): cheaper sizes may do")
        return answer

    def _sizes(self, bound: int | None) -> list[int]:
        smallest = self._everything // (HOST_SPAN * self._asked.nodes)
        return sizes_between(smallest, self._everything, bound, self._block_bytes)

    def _look(self, kind: str, sizes: Sequence[int]) -> None:
        """A coarse grid of sizes, then those between the last that fails and the first that meets."""
        low = high = -1
        for size in coarse(sizes):
            way = self._try(kind, size)
            if way is not None and way.meets and high < 0:
                high = sizes.index(size)
            elif way is not None and high < 0:
                low = sizes.index(size)
        while high - low > 1:
            middle = (low + high) // 2
            way = self._try(kind, sizes[middle])
            if way is None:
                return
            low, high = (low, middle) if way.meets else (middle, high)

    def _try(self, kind: str, size: int) -> Way | None:
        """None when there are no replays left."""
        found = self._replay(size, kind == STORE)
        if found is None:
            return None
        way = self._ways[kind, size] = self._way(kind, size, found)
        return way

    def _way(self, kind: str, size: int, found: FleetReplay) -> Way:
        asked = self._asked
        point: Point = (STAGING_BYTES, size) if kind == DISK else (size, 0)
        month = None
        if found.use is not None:
            month = month_of(found.use, self._rules, asked.prices, asked.nodes, self._trace.seconds)
        cost = asked.nodes * self._question.prices.cost(point) + (month.cost if month is not None else 0.0)
        least = self._question.target.least_hit_rate
        assert least is not None
        return Way(
            kind=kind,
            host_bytes=point[0],
            disk_bytes=point[1],
            cost=cost,
            hit_rate=found.hit_rate,
            store_hit_rate=found.store_hit_rate,
            pause_s=quantile(found.use.pauses_s, PAUSES_SHARE) if found.use is not None else 0.0,
            month=month,
            meets=found.hit_rate >= least,
        )

    def _replay(self, size: int, with_store: bool) -> FleetReplay | None:
        # More than all blocks is as good as all.
        blocks = min(size // self._block_bytes, self._trace.unique_blocks)
        if (blocks, with_store) not in self._known:
            if len(self._known) >= self._question.replays:
                return None
            what = f"host {format_bytes(size)}" + (" + store" if with_store else "")
            self._known[blocks, with_store] = fleet_replay(
                self._trace,
                self._routed,
                self._asked.nodes,
                blocks,
                self._question.policy,
                self._rules if with_store else None,
                self._watch(f"{self._trace.name}: {what}", len(self._trace.requests)),
            )
        return self._known[blocks, with_store]

    def _for_the_money(self, cost: float) -> list[Way]:
        """What the same money buys for each node without a store: host memory, and a disk."""
        prices, each = self._question.prices, cost / self._asked.nodes
        ways: list[Way] = []
        for kind, price, left in (
            (HOST, prices.host_per_gb, each),
            (DISK, prices.disk_per_gb, each - prices.cost((STAGING_BYTES, 0))),
        ):
            size = int(left / price * GB) if price else 0
            found = self._replay(size, False) if size >= self._block_bytes else None
            if found is not None:
                ways.append(self._way(kind, size, found))
        return ways
