"""The disk below simulated host memory: which blocks are offered to it, which are admitted, which get written.

The manager's own `Offloader` decides and queues, with its admission policies; only the disk itself is simulated. Not
simulated are failing disks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvbm.block import Outcome, SlotIndex
from kvbm.errors import SettingsError
from kvbm.manager.offload import Offloader
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy, WriteBudget, admission_policies, make_admission
from kvbm.policy.admission.write_budget import BLOCKS_PER_DAY_MIN
from kvbm.settings import Settings
from kvbm.sim.serving.events import Events
from kvbm.sim.serving.machine import Link
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.tiers.contract import BlockEnd, Completion

WRITES_IN_FLIGHT_MAX = Settings().max_concurrent_transfers * Settings().max_transfer_batch_size


@dataclass(frozen=True, slots=True)
class DiskRules:
    """Which blocks are written to disk, and how many bytes a day: the settings of the manager."""

    admission: str = "filter"
    budget_bytes_per_day: int | None = None

    def check(self) -> None:
        """`SettingsError` for unknown names."""
        if self.admission not in (known := admission_policies()):
            raise SettingsError("--admission", self.admission, f"one of {', '.join(known)}")

    def admission_policy(self, slot_count: int, block_bytes: int) -> AdmissionPolicy:
        """The admission policy of a disk of so many slots. `SettingsError` where it cannot be made."""
        try:
            admission = make_admission(self.admission, slot_count, 0.0)
        except ValueError as error:
            raise SettingsError("--admission", self.admission, f"one that can be made ({error})") from error
        if self.budget_bytes_per_day is None:
            return admission
        least = BLOCKS_PER_DAY_MIN * block_bytes
        if self.budget_bytes_per_day < least:
            accepted = f"at least {least:,} bytes, {BLOCKS_PER_DAY_MIN} blocks"
            raise SettingsError("--write-budget", self.budget_bytes_per_day, accepted)
        return WriteBudget(admission, self.budget_bytes_per_day, block_bytes)


class SimulatedDisk:
    """A disk below host memory: the manager's queue of blocks to be written, over a link in simulated time."""

    fault = trouble = ""
    run_blocks_max = 1
    room = 1
    """It takes whatever the queue sends, block by block: how long that takes is the link's part."""

    def __init__(
        self,
        host: SimulatedTier,
        pool: SimulatedTier,
        admission: AdmissionPolicy,
        link: Link,
        block_bytes: int,
        events: Events,
        in_flight_max: int = WRITES_IN_FLIGHT_MAX,
    ) -> None:
        self._host = host
        self._link = link
        self._block_bytes = block_bytes
        self._events = events
        self._metrics = Metrics()
        self._offloader: Offloader[int] = Offloader(
            host,
            pool,
            self,
            admission,
            self._metrics,
            lambda: events.now_s,
            count(1),
            in_flight_max,
        )

    @property
    def queued_count(self) -> int:
        """Blocks that wait for the disk, or are being written."""
        return self._offloader.queued_count

    @property
    def skipped_blocks(self) -> int:
        """Blocks that were admitted and not written."""
        name = "kvbm_skipped_offloads_total"
        return int(
            sum(self._metrics.value(name, reason=reason) for reason in ("evicted", "full", "queue_full"))
        )

    def stored(self, blocks: Sequence[int], start: int) -> None:
        """`blocks[start:]` of a chain came into host memory from the device, as far as there was room."""
        stored = [i for i in range(start, len(blocks)) if self._host.holds(blocks[i])]
        parents = [blocks[i - 1] if i else None for i in stored]
        self._offloader.committed([blocks[i] for i in stored], parents)
        self._advance()

    def used(self, blocks: Sequence[int], stop: int) -> None:
        """The first `stop` blocks of a chain, which are cached, were asked for again."""
        self._offloader.used(blocks[:stop], None)
        self._advance()

    def write_run(
        self, job_id: int, keys: Sequence[int], parent: int | None, source: SlotIndex, target: SlotIndex
    ) -> Outcome:
        """As `offload.BlockWriter`."""
        self._events.at(self._link.send(self._events.now_s, self._block_bytes), self._written, job_id)
        return Outcome.PENDING

    def _written(self, now_s: float, job_id: int) -> None:
        written = Completion.of(job_id, [BlockEnd(Outcome.HIT)], self._block_bytes)
        self._offloader.completed(written)
        self._advance()

    def _advance(self) -> None:
        while self._offloader.pump():
            pass
