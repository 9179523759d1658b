"""What an eviction policy costs in a tier with 100,000 leaves: time per block access, and memory per resident block.

python -m benchmarks.policies [--leaves 100000] [--policy gittins,lru]

Conversations of some 30 blocks each fill the tier. Then turns go on arriving, most of them for the latest
conversations, and every turn evicts what it needs. The time is that of the policy's own calls.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbm.policy import EvictionPolicy, make_policy
from kvbm.present.tables import console, plain_table, save_json
from kvbm.sim.serving.tier import SimulatedTier

TURN_BLOCKS = 10
CHATS_ALIVE = 5000
GOES_ON = 2 / 3
SECONDS_PER_REQUEST = 0.05
BUDGET_US = 5.0
BUDGET_BYTES = 64


class Timed:
    """A policy whose calls are timed."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.seconds = 0.0
        self.inner = policy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.inner, name)

        def timed(*arguments: Any) -> Any:
            started_s = time.perf_counter()
            answer = call(*arguments)
            self.seconds += time.perf_counter() - started_s
            return answer

        return timed


def chats(seed: int) -> Iterator[list[int]]:
    """Chains without end: turns of chats that overlap, each behind all blocks of the turns before."""
    choice = random.Random(seed)
    alive: list[list[int]] = []
    block = 0
    while True:
        if alive and choice.random() < GOES_ON:
            chain = choice.choice(alive)
        else:
            chain = []
            if len(alive) == CHATS_ALIVE:
                alive[choice.randrange(CHATS_ALIVE)] = chain
            else:
                alive.append(chain)
        count = choice.randint(TURN_BLOCKS // 2, TURN_BLOCKS * 3 // 2)
        chain += range(block, block + count)
        block += count
        yield list(chain)


def run(name: str, leaves: int, requests: int) -> dict[str, float | str]:
    """Fill a tier until it is full, then go on for `requests`; what the policy took in both parts."""
    slots = leaves * 3 * TURN_BLOCKS
    policy = Timed(make_policy(name, slots))
    tier = SimulatedTier(slots, policy)  # type: ignore[arg-type]  # it passes every call on
    source, now_s, accesses, measured = chats(1), 0.0, 0, 0
    while measured < requests:
        full = tier.evicted_count > 0
        if not full:  # the time of filling up is not that of eviction
            policy.seconds, accesses = 0.0, 0
        chain = next(source)
        now_s += SECONDS_PER_REQUEST
        hits = tier.requested(chain, now_s)
        tier.insert(chain, hits, now_s)
        policy.finished(chain[-1], 200, now_s + 0.01)
        accesses += len(chain)
        measured += full
    return {"policy": name, "microseconds_per_access": 1e6 * policy.seconds / accesses, "accesses": accesses}


def memory(name: str, leaves: int) -> float:
    """Bytes that the policy holds per resident block when the tier is full."""
    slots = leaves * 3 * TURN_BLOCKS
    policy = make_policy(name, slots)
    tier = SimulatedTier(slots, policy)
    now_s = 0.0
    for chain in chats(1):
        now_s += SECONDS_PER_REQUEST
        tier.insert(chain, tier.requested(chain, now_s), now_s)
        if tier.evicted_count:
            break
    return reachable_bytes(policy) / slots


def reachable_bytes(root: object) -> int:
    """The size of all objects that can be reached from `root`, but for classes, functions and modules."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(
            item, (type, types.FunctionType, types.ModuleType, types.MethodType)
        ):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        waiting += gc.get_referents(item)
    return total


def main() -> int:
    """Measure the policies one after the other and print one table."""
    options = _arguments()
    rows = []
    for name in options.policy.split(","):
        row = run(name, options.leaves, options.requests)
        row["bytes_per_block"] = memory(name, options.leaves)
        rows.append(row)
    options.output.mkdir(parents=True, exist_ok=True)
    save_json({"rows": rows}, options.output / "policies.json")
    columns = ("policy", "µs per access", "to the first", "bytes per resident block")
    title = f"Eviction policies with {options.leaves:,} leaves"
    table = plain_table(columns, words={"policy"}, title=title)
    first = float(rows[0]["microseconds_per_access"])
    for row in rows:
        took = float(row["microseconds_per_access"])
        bytes_each = float(row["bytes_per_block"])
        table.add_row(str(row["policy"]), f"{took:.2f}", f"{took / first:.2f} ×", f"{bytes_each:.0f}")
    console().print(table)
    console().print(
        f"Budget of gittins: {BUDGET_US:g} µs per access, {BUDGET_BYTES} bytes per resident block"
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leaves", type=int, default=100_000, help="leaves in the full tier, about")
    parser.add_argument("--requests", type=int, default=3000, help="requests to time once the tier is full")
    parser.add_argument(
        "--policy", default="lru,gittins", help="names, comma-separated; the first is the measure"
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
