"""The write budget of the disk tier, and what is counted of writes and hits."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.block import BlockKey, Tier
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.write_budget import DAY_S, WriteBudget
from rigs.space import KEYS, LAYOUT, ME, OTHER, Bench

SIZE = LAYOUT.block_bytes


def on_disk(bench: Bench) -> list[BlockKey]:
    """In the order in which they got there."""
    return [entry.key for entry in sorted(bench.medium.entries.values(), key=lambda entry: entry.sequence)]


def skipped(bench: Bench, reason: str) -> float:
    return bench.metrics.value("kvbm_skipped_offloads_total", reason=reason)


def budget(blocks: int, inner: AdmissionPolicy | None = None) -> WriteBudget:
    return WriteBudget(inner or DiskFilterOff(), blocks * SIZE, SIZE, 100.0)


class DiskFilterOff:
    """Everything may enter."""

    def offered(self, key: BlockKey, now_s: float) -> bool:
        return True

    def hit(self, key: BlockKey, now_s: float) -> None:
        return None


def test_no_more_is_written_than_the_budget_allows(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=8, admission=budget(72))  # three blocks at once
    bench.store(KEYS[:8])
    bench.finish_all()
    bench.store(OTHER[:8])
    bench.finish_all()
    assert on_disk(bench) == KEYS[:3], "the beginning of the chain"
    assert skipped(bench, "budget") > 0
    bench.clock.advance(DAY_S / 24)
    bench.store(KEYS[20:28])
    bench.finish_all()
    bench.store(KEYS[30:38])
    bench.finish_all()
    assert len(on_disk(bench)) in (5, 6)


def test_what_was_not_written_costs_nothing(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, admission=budget(96))  # four blocks at once
    bench.tier.throttled = True
    bench.store(OTHER[:4])
    bench.space.pump()
    bench.space.clear("host")
    bench.tier.throttled = False
    bench.finish_all()
    assert (on_disk(bench), skipped(bench, "evicted")) == ([], 4)
    bench.store(KEYS[:4])
    bench.finish_all()
    assert len(on_disk(bench)) == 4


def test_a_budget_holds_for_a_staging_area_too(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=8, staging=True, admission=budget(48))  # two blocks at once
    bench.store(KEYS[:4])
    bench.finish_all()
    assert on_disk(bench) == KEYS[:2]
    assert bench.space.host_pool.counts().leased == 0
    assert min(bench.store(OTHER[:8])) >= 0, "what was refused is in nobody's way"


def test_bytes_written_and_bytes_hit_are_counted(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.only_on_disk(KEYS[:4])
    bench.space.lookup(ME, 1, KEYS[:2], 0)
    assert bench.metrics.value("kvbm_hit_bytes_total", tier=Tier.DISK.name.lower()) == 2 * SIZE
    assert bench.metrics.value("kvbm_transfer_bytes_total", source="host", target="disk") == 4 * SIZE
