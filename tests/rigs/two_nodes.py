"""An engine over two nodes: a real leader, a real manager on each node, and ranks that carry out its plans by hand."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUnavailable
from kvbm.hashing import chain_keys
from kvbm.leader.leader import Leader
from kvbm.leader.tracked import Scheduled
from kvbm.protocol import PROTOCOL_VERSION, Fence, FenceDone, Hello, Welcome
from kvbm.step_plan import LoadPlan, StepPlan, StepReport, StorePlan
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import open_arena
from rigs.manager import DEADLINE_S, LAYOUT, NAMESPACE, ManagerBench

NODES = 2
CHAINS = [chain_keys(bytes(32), range(1000 * i, 1000 * i + 40), LAYOUT.block_tokens) for i in range(3)]


class Node:
    """One node: its manager, unless that is dead, and its rank, unless that is away."""

    def __init__(self, number: int, directory: Path, clock: ManualClock, host_blocks: int) -> None:
        self.number = number
        self._directory, self._clock, self._host_blocks = directory, clock, host_blocks
        self._lives = 0
        self.bench: ManagerBench | None = None
        self.channel: Channel | None = None
        self.epoch = -1
        self._region: Any = None
        self._generations: Any = None
        self._fenced: set[int] = set()
        self.device: dict[int, bytes] = {}
        """What lies in the device's blocks of this node."""
        self.start()

    # ---- the manager

    def start(self) -> None:
        """The manager starts, with nothing."""
        directory = self._directory / f"{self.number}-{self._lives}"
        directory.mkdir()
        self._lives += 1
        self.bench = ManagerBench(directory, clock=self._clock, host_blocks=self._host_blocks)

    def kill(self) -> None:
        """The manager is killed; the rank keeps its memory."""
        if self.bench is not None:
            self.bench.close()
            self.bench = None

    # ---- the leader's way to it

    def attempt(self) -> Channel | None:
        """As the finder of the leader's link."""
        with contextlib.suppress(ManagerUnavailable):
            return Channel.connect(self.bench.path) if self.bench is not None else None
        return None

    def welcomed(self) -> None: ...

    # ---- the rank

    def attach(self) -> None:
        """The rank joins the manager, if there is one and it has not."""
        if self.bench is None or self.channel is not None:
            return
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="worker",
            engine="e",
            rank=self.number,
            rank_count=NODES,
            ranks=(self.number,),
            part=self.number,
            part_count=NODES,
            namespace=NAMESPACE.part(f"{self.number} of {NODES}"),
            layout=LAYOUT,
        )
        channel = Channel.connect(self.bench.path)
        channel.send(hello)
        welcome = None
        until_s = time.monotonic() + DEADLINE_S
        while welcome is None and time.monotonic() < until_s:
            self.bench.step()
            welcome = next((each for each in channel.receive() if isinstance(each, Welcome)), None)
        assert welcome is not None
        self._region, generations = open_arena(channel.take_fds())
        self._generations = memoryview(generations).cast("Q")
        self.channel, self.epoch = channel, welcome.epoch

    def detach(self) -> None:
        """The rank ends, or its session does."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def turn(self) -> None:
        """The manager and the rank deal with what has arrived."""
        if self.bench is not None:
            self.bench.step()
        if self.channel is None:
            return
        try:
            for message in self.channel.receive():
                if isinstance(message, Fence):
                    self._fenced.update(message.stores)
                    self.channel.send(FenceDone(fence=message.fence))
        except ManagerUnavailable:
            self.detach()

    def _intact(self, epoch: int, slot: int, generation: int) -> bool:
        return bool(epoch == self.epoch and self._generations[slot] == generation)

    def store(self, plan: StorePlan) -> tuple[int, ...]:
        """The positions that failed: all or none."""
        pairs = list(zip(plan.slots, plan.generations, plan.device_blocks, strict=True))
        whole = self.channel is not None and plan.store not in self._fenced
        if pairs and not (whole and all(self._intact(plan.epoch, slot, due) for slot, due, _ in pairs)):
            return plan.positions
        for slot, _, block in pairs:
            size = LAYOUT.shard_bytes
            self._region[slot * size : (slot + 1) * size] = self.device[block]
        return ()

    def load(self, plan: LoadPlan) -> set[int]:
        """The device blocks that did not arrive: those from the first one on that is not there."""
        for place, (slot, due) in enumerate(zip(plan.slots, plan.generations, strict=True)):
            if place >= plan.ready or not self._intact(plan.epoch, slot, due):
                return {*plan.device_blocks[place:]}
            size = LAYOUT.shard_bytes
            self.device[plan.device_blocks[place]] = bytes(self._region[slot * size : (slot + 1) * size])
        return set()

    def content(self, key: BlockKey) -> bytes:
        """What this node's ranks compute for a block."""
        return block_bytes(key, self.number, LAYOUT.shard_bytes)


@dataclass
class Request:
    """A request and its blocks, of which the first `computed` are on the device."""

    name: str
    keys: list[BlockKey]
    table: list[int]
    computed: int = 0
    loading: bool = False


@dataclass
class Ranks:
    """What the ranks have to do: plans that the leader made and they have not carried out."""

    plans: list[StepPlan] = field(default_factory=list)


class TwoNodes:
    """The engine. Nothing happens but in its methods."""

    def __init__(self, directory: Path, host_blocks: tuple[int, int] = (8, 11)) -> None:
        self.clock = ManualClock(50.0)
        self.nodes = [Node(n, directory, self.clock, blocks) for n, blocks in enumerate(host_blocks)]
        hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e", rank_count=NODES)
        first, *others = self.nodes
        self.leader = Leader(
            first,  # type: ignore[arg-type]
            hello,
            LAYOUT.block_tokens,
            True,
            self.clock,
            load_always=True,
            nodes=others,  # type: ignore[arg-type]
        )
        self.requests: dict[str, Request] = {}
        self._names = iter(range(1_000_000))
        self._blocks = iter(range(1, 10_000_000))
        self._plans: list[StepPlan] = []
        self.loaded = 0

    def turn(self) -> None:
        """Messages go both ways."""
        for _ in range(3):
            self.leader.receive()
            for node in self.nodes:
                node.turn()

    def add(self, chain: int, length: int) -> Request:
        """A request for the first blocks of a chain."""
        name = f"r{next(self._names)}"
        keys = CHAINS[chain][:length]
        request = Request(name, keys, [next(self._blocks) for _ in keys])
        self.requests[name] = request
        self.leader.request_added(name, [bytes(key) for key in keys], b"", 0)
        return request

    def ask(self, request: Request) -> bool:
        """The engine asks what may be loaded, and makes room for it. False: it is to ask again."""
        answer = self.leader.matched(request.name, 0)
        if answer.later:
            return False
        assert answer.blocks <= len(request.keys)
        self.leader.allocated(request.name, answer.blocks, request.table)
        request.loading = answer.blocks > 0
        if not request.loading:
            self._compute(request)
        return True

    def _compute(self, request: Request) -> None:
        for key, block in list(zip(request.keys, request.table, strict=True))[request.computed :]:
            for node in self.nodes:
                node.device[block] = node.content(key)
        request.computed = len(request.keys)

    def step(self) -> None:
        """A step of the engine; the ranks carry its plan out later."""
        done = [
            Scheduled(request.name, request.computed, lambda table=request.table: table)
            for request in self.requests.values()
            if request.computed and not request.loading
        ]
        self._plans.append(self.leader.step(done, (), 0, idle=not done))

    def work(self) -> None:
        """All ranks carry out the plans, and report."""
        plans, self._plans = self._plans, []
        for plan in plans:
            report, invalid = StepReport(), set[int]()
            for node in self.nodes:
                mine = plan.on_node(node.number)
                stored = {each.store: (1, node.store(each), 0.1) for each in mine.stores}
                for each in mine.loads:
                    invalid |= node.load(each)
                report = report.merge(StepReport(stored=stored, loaded={e.request: 0.1 for e in mine.loads}))
            for load in plan.loads:
                self._check(load, invalid)
            self.leader.updated(report, [load.request for load in plan.loads], invalid)

    def _check(self, load: LoadPlan, invalid: set[int]) -> None:
        """What has arrived is what these ranks would have computed."""
        request = self.requests.get(load.request)
        if request is None:
            return
        arrived = 0
        for key, block in zip(request.keys, load.device_blocks, strict=False):
            if block in invalid:
                break
            for node in self.nodes:
                assert node.device[block] == node.content(key), f"node {node.number} has another block"
            arrived += 1
        self.loaded += arrived
        request.computed, request.loading = arrived, False
        self._compute(request)

    def finish(self, request: Request) -> None:
        """The request ends, once its load has."""
        if not request.loading:
            del self.requests[request.name]
            self.leader.finished(request.name, 1)

    def settle(self) -> None:
        """All nodes are there, and all requests end."""
        for node in self.nodes:
            if node.bench is None:
                node.start()
        until_s = time.monotonic() + DEADLINE_S
        while not self.leader.ready or self.requests or self.leader.stores or self.leader.lookups.loading:
            assert time.monotonic() < until_s, self.leader._link.__dict__
            for node in self.nodes:
                node.attach()
            self.turn()
            self.clock.advance(0.2)
            for request in list(self.requests.values()):
                if request.computed or request.loading or self.ask(request):
                    self.finish(request)
            self.step()
            self.work()
        self.turn()

    def held(self) -> list[tuple[int, int]]:
        """Leased and filling slots of each manager."""
        counts = []
        for node in self.nodes:
            assert node.bench is not None
            counted = [space.host_pool.counts() for _, space in node.bench.server.spaces]
            counts.append((sum(each.leased for each in counted), sum(each.filling for each in counted)))
        return counts

    def close(self) -> None:
        self.leader.close()
        for node in self.nodes:
            node.detach()
            node.kill()
