"""Three managers that share a store, a replayed trace, and what the simulator says of the same sizes.

python -m benchmarks.fleet [--trace FILE] [--nodes 3] [--policies lru,gittins] [--routes round-robin,session]

Each node is a manager's space with the real remote tier, over one store in memory. Requests come by the trace's clock,
which is moved by hand: before it moves, everything that was begun ends. So the same call gives the same numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kvbm.block import BlockKey, Tier
from kvbm.clock import ManualClock
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.space import Space
from kvbm.manager.write_behind import RemoteRules
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll, make_admission
from kvbm.present.tables import console, plain_table, save_json
from kvbm.sim.replay.fleet import FleetReplay, fleet_replay, routed
from kvbm.sim.serving.store import POLL_S, StoreRules
from kvbm.sim.traces.formats import ReadOptions, read_trace
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import HostArena
from kvbm.tiers.remote.blob_tier import BlobTier, open_blob_tier
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.pack_size import blocks_of_a_load, record_bytes
from kvbm.tiers.remote.packs import PACK_PREFIX

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.faulty_blobs import MemoryBlobs

POINTS_MAX = 2.0
"""By so many points the hit rates of managers and simulator may differ."""
LAYOUT = BlockLayout(block_tokens=16, shard_bytes=4096)
NAMESPACE = Namespace(model="benchmark/fleet", fields=(("dtype", "float32"),))
PACK_BLOCKS = 16
"""As of blocks of 2 MiB, those of 16 tokens of an 8-billion-parameter model."""
STEP_S = 0.5
"""Managers look after time about as often."""
SETTLED_S = 60.0
ME = 1
COUNTS = {"blocks": "blocks written", "packs": "packs", "put": "puts", "get": "gets", "list": "listings"}
"""Counts of both, and what the table calls them."""


class Node:
    """One manager's space, whose memory and store are real."""

    def __init__(
        self,
        store: MemoryBlobs,
        clock: ManualClock,
        number: int,
        host_blocks: int,
        policy: str,
        options: argparse.Namespace,
    ) -> None:
        self.late: bool = options.late
        self.clock = clock
        of_tier = RemoteOptions(hedge=False, collect=False, load_threads=1, store_threads=1)
        self.tier: BlobTier = open_blob_tier(store, LAYOUT, NAMESPACE, of_tier, clock, random.Random(number))
        self.metrics = Metrics()
        self.arena = HostArena(LAYOUT, host_blocks, touch_threads=0)
        admits = make_admission(options.admission, of_tier.catalogue_blocks, clock())
        self.space = Space(
            LAYOUT,
            self.arena,
            None,
            AdmitAll(),
            self.metrics,
            clock,
            lambda lease: None,
            SpaceOptions(eviction=policy),
            [(self.tier, RemoteRules(), admits)],
        )
        self._numbers = iter(range(1, 1 << 60))
        self.settle()

    def settle(self) -> None:
        """Everything that was begun ends."""
        (side,) = self.space.remotes
        assert side.writer is not None
        while True:
            self.space.pump()
            assert self.tier.settle(SETTLED_S), "the store hangs"
            self.space.pump()
            if not (side.writer.in_flight_count or side.onboarder.queued_count):
                return

    def tick(self) -> None:
        """About twice a second."""
        self.space.below.tick()
        self.settle()

    def serve(self, keys: list[BlockKey]) -> tuple[int, int]:
        """A request, as an engine's leader sends it: how many blocks came from host memory, and from the store."""
        number = next(self._numbers)
        lease = self.space.lookup(ME, number, keys, 0)
        if self.late:
            assert self.tier.settle(SETTLED_S), "the store hangs"
        # As a manager does once it has answered, and before what is being read can have come.
        while not self.late and self.space.tell_policies():
            pass
        self.settle()
        from_host = from_store = 0
        if lease is not None:
            from_store = lease.sources[: lease.ready].count(Tier.REMOTE)
            from_host = lease.ready - from_store
            self._check(lease)
            self.space.release(ME, number)
        found = from_host + from_store
        new = keys[found:]
        if new:
            slots = self.space.reserve(ME, number, keys[found - 1] if found else None, new)
            for key, slot in zip(new, slots, strict=True):
                if slot >= 0:
                    self.arena.slot_views(slot)[0][:] = block_bytes(key, 0, LAYOUT.slot_bytes)
            self.space.commit(ME, number)
        self.settle()
        return from_host, from_store

    def _check(self, lease: Lease) -> None:
        for key, slot in zip(lease.keys[: lease.ready], lease.slots, strict=False):
            assert self.arena.slot_views(slot)[0] == block_bytes(key, 0, LAYOUT.slot_bytes), "wrong bytes"

    def close(self) -> None:
        self.space.close(keep=False)


@dataclass(slots=True)
class Served:
    """What the managers did with a trace."""

    accesses: int
    host_hits: int = 0
    store_hits: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the blocks asked for that hit."""
        return (self.host_hits + self.store_hits) / self.accesses


def serve(
    trace: Trace, nodes: Sequence[int], host_blocks: int, policy: str, options: argparse.Namespace
) -> Served:
    """The trace through real managers."""
    clock = ManualClock(1000.0)
    store = MemoryBlobs(clock, blob_bytes_max=PACK_BLOCKS * record_bytes(LAYOUT.block_bytes))
    fleet = [Node(store, clock, n, host_blocks, policy, options) for n in range(options.nodes)]
    begun_s, served = clock(), Served(trace.accesses)
    keys = [BlockKey(hashlib.sha256(b"%d" % block).digest()) for block in range(trace.unique_blocks)]
    ends: list[tuple[float, int]] = []
    for number, request in enumerate(trace.requests):
        _pass_until(clock, begun_s + request.arrived_s, fleet)
        ends.sort(reverse=True)
        while ends and ends[-1][0] <= request.arrived_s:
            _, ended = ends.pop()
            before = trace.requests[ended]
            fleet[nodes[ended]].space.finished(keys[before.blocks[-1]], before.output_tokens)
        from_host, from_store = fleet[nodes[number]].serve([keys[block] for block in request.blocks])
        served.host_hits += from_host
        served.store_hits += from_store
        ends.append((request.arrived_s + request.seconds, number))
    for node in fleet:
        (side,) = node.space.remotes
        assert side.writer is not None
        side.writer.flush()
        node.settle()
    written = sum(node.metrics.value("kvbm_offload_blocks_d2o") for node in fleet)
    packs = sum(f"/{PACK_PREFIX}" in name for name in store.blobs)
    requests = store.requests()
    served.counts = {"blocks": int(written), "packs": packs}
    served.counts |= {kind: requests.get(kind, 0) for kind in ("put", "get", "list")}
    for node in fleet:
        node.close()
    return served


def _pass_until(clock: ManualClock, until_s: float, fleet: Sequence[Node]) -> None:
    while (left_s := until_s - clock()) > 0.0:
        clock.advance(min(STEP_S, left_s))
        for node in fleet:
            node.tick()


def row(trace: Trace, options: argparse.Namespace, policy: str, route: str) -> dict[str, Any]:
    """Both answers for one policy and one way of routing."""
    host_blocks = max(1, int(trace.unique_blocks * options.host / 100))
    nodes = routed(trace, options.nodes, route)
    real = serve(trace, nodes, host_blocks, policy, options)
    rules = StoreRules(
        block_bytes=LAYOUT.block_bytes,
        pack_blocks=PACK_BLOCKS,
        load_blocks=blocks_of_a_load(LAYOUT.block_bytes),
        admission=options.admission,
    )
    simulated = fleet_replay(trace, nodes, options.nodes, host_blocks, policy, rules)
    alone = fleet_replay(trace, nodes, options.nodes, host_blocks, policy)
    use = simulated.use
    assert use is not None
    return {
        "policy": policy,
        "route": route,
        "host_blocks": host_blocks,
        "alone": alone.hit_rate,
        "real": _rates(real),
        "simulated": _rates(simulated),
        "points": {name: 100 * (_rates(simulated)[name] - rate) for name, rate in _rates(real).items()},
        "managers": real.counts,
        "simulator": {
            "blocks": use.written_blocks,
            "packs": use.pack_puts - use.existed,
            "put": use.pack_puts + use.log_puts + use.touches,
            "get": use.pack_gets + use.log_gets,
            "list": int(options.nodes * trace.seconds / POLL_S),
        },
    }


def _rates(found: Served | FleetReplay) -> dict[str, float]:
    accesses = found.accesses
    return {
        "all": found.hit_rate,
        "host": found.host_hits / accesses,
        "store": found.store_hits / accesses,
    }


def render(trace: Trace, rows: Sequence[dict[str, Any]], nodes: int) -> Table:
    """Hit rates in percent, differences in points."""
    title = (
        f"{nodes} managers over one store, {trace.name}: {len(trace.requests):,} requests for "
        f"{trace.accesses:,} blocks, {trace.unique_blocks:,} different; within {POINTS_MAX:g} points"
    )
    headings = ["policy", "routed", "host, blocks", "hits without", "what", "managers", "simulator", "points"]
    table = plain_table(headings, words={"policy", "routed", "what"}, title=title)
    for each in rows:
        first = [each["policy"], each["route"], f"{each['host_blocks']:,}", f"{each['alone']:.2%}"]
        for tier, name in (("all", "hits"), ("host", "of host memory"), ("store", "of the store")):
            cells = (
                f"{each['real'][tier]:.2%}",
                f"{each['simulated'][tier]:.2%}",
                f"{each['points'][tier]:+.2f}",
            )
            table.add_row(*first, name, *cells)
            first = [""] * 4
        for key, name in COUNTS.items():
            table.add_row(*first, name, f"{each['managers'][key]:,}", f"{each['simulator'][key]:,}", "")
        table.add_section()
    return table


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--trace", type=Path, help="a trace instead of made-up conversations")
    options.add_argument("--chunk-tokens", type=int, help="regroup its blocks into larger ones")
    options.add_argument("--requests", type=int, default=1500, help="the first so many of it")
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--host", type=float, default=5.0, help="host memory of a node, %% of all blocks")
    options.add_argument("--policies", default="lru,gittins")
    options.add_argument("--routes", default="round-robin,session")
    options.add_argument("--admission", default="all", help="which blocks are written to the store")
    options.add_argument("--late", action="store_true", help="policies learn of a request after its reads")
    options.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    return options


def main() -> int:
    """Replay and print one table; status 1 where the two differ by too much."""
    options = parser().parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    reading = ReadOptions(chunk_tokens=options.chunk_tokens, limit=options.requests)
    if options.trace is None:
        trace = chats(replace(ChatShape(), block_tokens=64), limit=options.requests)
    else:
        trace = read_trace(options.trace, reading)
    rows = [
        row(trace, options, policy, route)
        for policy in options.policies.split(",")
        for route in options.routes.split(",")
    ]
    save_json(
        {"trace": trace.name, "requests": len(trace.requests), "rows": rows}, options.output / "fleet.json"
    )
    console().print(render(trace, rows, options.nodes))
    return int(any(abs(points) > POINTS_MAX for each in rows for points in each["points"].values()))


if __name__ == "__main__":
    sys.exit(main())
