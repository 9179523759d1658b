"""The mover's jobs, its reports of them, and how far each job has got."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import msgspec

from kvbm.step_plan import LoadPlan, StepReport, StorePlan
from kvbm.transfer import Copying
from kvbm.worker.layers import LayerGate
from kvbm.worker.mapping import Mark


class FinishedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load that ended. `failed` has the device blocks that do not hold their bytes.

    `copied`, of a traced one, is when its first copy began and its last ended, on its rank's clock.
    """

    request: str
    failed: tuple[int, ...]
    seconds: float
    layerwise: bool = False
    copied: tuple[float, float] | None = None


class FinishedStore(msgspec.Struct, frozen=True, kw_only=True):
    """A store that ended, with the positions in its plan that were not copied."""

    store: int
    failed: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class StoreJob:
    """Stores of one step, after the device has reached `after`; `begun` is set when `copies` has all that will be.

    The engine's thread sets `abandoned` when it waits no longer: from then on it may overwrite the device blocks.
    """

    plans: tuple[StorePlan, ...]
    after: Mark | None
    begun: threading.Event = field(default_factory=threading.Event)
    copies: dict[int, Copying] = field(default_factory=dict)
    abandoned: bool = False

    def hold(self, store: int) -> None:
        """Nothing that the engine's thread gives the device from now on overtakes the copies of that store."""
        copying = self.copies.get(store)
        if copying is not None and self.after is not None:
            self.after.hold(copying)

    def wait(self, store: int) -> None:
        """Wait for the copies of that store, by the engine's thread. Raises as `Copying.wait` does."""
        copying = self.copies.get(store)
        if copying is not None:
            copying.wait()


@dataclass(slots=True)
class ReportJob:
    """What the engine's thread has to tell the leader through the manager."""

    report: StepReport


@dataclass(slots=True)
class DrainJob:
    """`done` is set when nothing that was put in before touches the device."""

    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class StoreUnderWay:
    """One plan of a job, being copied."""

    plan: StorePlan
    job: StoreJob
    copying: Copying
    started_s: float


@dataclass(slots=True)
class LoadJob:
    """A load in progress: of its plan's pairs `copied` are on the device, `begun` are copied or being copied in so many
    `pieces`, `ready` may be, and `goal` will be.

    `closed`: no more of it is begun. `broken`: a piece that was begun did not arrive, and none behind it counts.
    With `layers` all pairs are copied layer by layer, and the engine's thread waits at that gate.
    """

    plan: LoadPlan
    after: Mark | None
    ready: int
    started_s: float
    last_progress_s: float
    copied: int = 0
    begun: int = 0
    goal: int = -1
    pieces: int = 0
    closed: bool = False
    broken: bool = False
    layers: LayerGate | None = None
    copying_s: float | None = None
    """When the first copy began."""

    def __post_init__(self) -> None:
        if self.goal < 0:
            self.goal = len(self.plan.slots)

    @property
    def may_begin(self) -> bool:
        """There is a piece to copy."""
        return self.begun < min(self.ready, self.goal) and not (self.closed or self.broken)

    @property
    def ended(self) -> bool:
        """It is over as soon as no piece of it is under way."""
        return self.closed or self.broken or self.copied >= self.goal

    def finished(self, copied: int, now_s: float) -> FinishedLoad:
        """The report of a load of which so many leading blocks arrived."""
        return FinishedLoad(
            request=self.plan.request,
            failed=self.plan.device_blocks[copied:],
            seconds=now_s - self.started_s,
            layerwise=self.plan.layerwise,
            copied=(self.copying_s, now_s) if self.plan.traced and self.copying_s is not None else None,
        )
