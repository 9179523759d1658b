"""A simulated machine with round numbers, and traces made by hand that it serves."""

from __future__ import annotations

from kvbm.policy import AdmitAll, DiskFilter, LeafFirstLru
from kvbm.sim.serving.engine import Served, SimulatedEngine
from kvbm.sim.serving.machine import Machine
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.trace import Trace, TraceBuilder

BLOCK_TOKENS = 100
BLOCK_BYTES = 1000
MACHINE = Machine(
    BLOCK_BYTES,
    prefill_tokens_per_s=100.0,
    attention_tokens=float("inf"),
    host_bytes_per_s=10_000.0,
    disk_read_bytes_per_s=2_000.0,
    disk_write_bytes_per_s=1_000.0,
)
"""A block takes 1 s to compute, 0.1 s to go to the device, 0.5 s to be read from disk and 1 s to be written."""


def make_trace(*requests: tuple[float, str], seconds: float = 0.5) -> Trace:
    """Each letter is a block; a prompt is its blocks and one token more."""
    builder = TraceBuilder("hand-made", BLOCK_TOKENS)
    for arrived_s, letters in requests:
        blocks = [letters[: i + 1] for i in range(len(letters))]
        builder.add(arrived_s, blocks, BLOCK_TOKENS * len(letters) + 1, 7, seconds)
    return builder.build()


def serve(
    trace: Trace,
    host: int = 0,
    disk: int = 0,
    machine: Machine = MACHINE,
    closed_loop: bool = False,
    admission: AdmitAll | DiskFilter | None = None,
) -> Served:
    """What happens to a trace on a machine with tiers of so many blocks, 0 for none; disk takes one block at a time."""
    tiers = [SimulatedTier(n, LeafFirstLru(n), insist=bool(disk)) if n else None for n in (host, disk)]
    admit = (AdmitAll() if admission is None else admission) if disk else None
    return SimulatedEngine(trace, machine, *tiers, admit, closed_loop, writes_in_flight_max=1).run()
