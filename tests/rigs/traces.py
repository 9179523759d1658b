"""Small random traces for the simulator."""

from __future__ import annotations

import random

from kvbm.sim.traces.trace import Trace, TraceBuilder


def random_trace(seed: int, requests: int = 40, branching: int = 3, depth: int = 7) -> Trace:
    """Chains through a random tree, one a second: equal numbers mean equal prefixes."""
    chance = random.Random(seed)
    builder = TraceBuilder("random", 16)
    for number in range(requests):
        path = tuple(chance.randrange(branching) for _ in range(chance.randint(1, depth)))
        blocks = [path[: i + 1] for i in range(len(path))]
        builder.add(float(number), blocks, 16 * len(path), 5)
    return builder.build()
