"""Requests of a space with what their clients say, and what lies where afterwards."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.hints import ClientHint, read_hint
from kvbm.manager.foresight import Decided
from kvbm.slices import advance
from rigs.space import ME, Bench


def hears(
    bench: Bench, keys: list[BlockKey], tenant: str = "", again: bool = False, **said: object
) -> Decided:
    """A request from its lookup to its release, and what the space said of its hint."""
    asker = ClientHint(tenant, *read_hint(said))
    number = next(bench.numbers)
    lease = bench.space.lookup(ME, number, keys, 0, asker)
    reached = len(lease.keys) if lease is not None else 0
    hearing = bench.space.heard(asker, keys, reached, again)
    while (decided := advance(hearing)) is None:
        pass
    bench.space.pump()
    bench.space.release(ME, number)
    return decided


def turn(bench: Bench, keys: list[BlockKey], output: list[BlockKey], **said: object) -> Decided:
    """A whole request, of which everything reaches the disk."""
    decided = hears(bench, keys, **said)  # type: ignore[arg-type]  # what it says
    bench.store(keys)
    bench.store(output, parent=keys[-1])
    bench.space.finished(keys[-1], 1)
    bench.finish_all()
    return decided


def on_host(bench: Bench, keys: list[BlockKey]) -> int:
    return sum(slot is not None for slot in bench.space.host_pool.find_all(keys))


def metric(bench: Bench, name: str, **labels: str) -> float:
    return bench.metrics.value(f"kvbm_{name}_total", **labels)
