"""The mover's jobs, its reports of them, and how far each job has got."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvbm.step_plan import LoadPlan, StepReport, StorePlan
from kvbm.transfer import Copying
from kvbm.worker.layers import LayerGate
from kvbm.worker.mapping import Mark

log = logging.getLogger("kvbm.worker")

PIECE_BLOCKS = 16
"""Blocks of a load that are copied as one: small, so that the first blocks are copied while the rest is on its way."""

PIECES_UNDER_WAY = 2
"""While one piece is copied the next one is begun, so that the link is never idle between them."""


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


class Piece(NamedTuple):
    """A run of a load's blocks that is being copied: `[copied, end)` of its plan when it was begun."""

    start: int
    end: int
    copying: Copying


@dataclass(slots=True)
class LoadJob:
    """A load in progress: of its plan's pairs `copied` are on the device, `begun` are copied or being copied, and
    `ready` may be. `broken`: a piece that was begun did not end as it should.

    With `layers` all pairs are copied layer by layer, and the engine's thread waits at that gate.
    """

    plan: LoadPlan
    after: Mark | None
    ready: int
    started_s: float
    last_progress_s: float
    copied: int = 0
    begun: int = 0
    under_way: deque[Piece] = field(default_factory=deque)
    broken: bool = False
    layers: LayerGate | None = None
    copying_s: float | None = None
    """When the first copy began."""

    def finished(self, copied: int, now_s: float) -> FinishedLoad:
        """The report of a load of which so many leading blocks arrived."""
        return FinishedLoad(
            request=self.plan.request,
            failed=self.plan.device_blocks[copied:],
            seconds=now_s - self.started_s,
            layerwise=self.plan.layerwise,
            copied=(self.copying_s, now_s) if self.plan.traced and self.copying_s is not None else None,
        )

    @property
    def may_begin(self) -> bool:
        """There is a piece to copy and room to begin it."""
        return self.begun < self.ready and len(self.under_way) < PIECES_UNDER_WAY

    def begin_piece(self) -> bool:
        """Begin the next piece; False when a slot of it no longer holds the promised block. Raises as `begin_load`."""
        plan, after = self.plan, self.after
        assert after is not None
        start, end = self.begun, min(self.begun + PIECE_BLOCKS, self.ready)
        wanted = end - start
        mapping = after.mapping
        end = start + mapping.intact(plan.slots[start:end], plan.generations[start:end])
        if end > start:
            pairs = list(zip(plan.device_blocks[start:end], plan.slots[start:end], strict=True))
            self.under_way.append(Piece(start, end, mapping.copier.begin_load(pairs, after.event)))
            self.begun = end
        return end - start == wanted

    def end_piece(self) -> bool:
        """Wait for the oldest piece; False when a slot of it changed hands meanwhile. Raises as `Copying.wait`."""
        piece, plan, after = self.under_way.popleft(), self.plan, self.after
        assert after is not None and not self.broken
        self.broken = True
        piece.copying.wait()
        # A slot that changed hands while we copied may have given us anything.
        slots, expected = plan.slots[piece.start : piece.end], plan.generations[piece.start : piece.end]
        intact = after.mapping.intact(slots, expected)
        self.copied += intact
        self.broken = intact < len(slots)
        return not self.broken

    def copy_by_layer(self, gate: LayerGate) -> None:
        """Copy the whole load, one layer after the other, each announced at the gate as its copy begins.

        On return, also by an exception as copies raise, nothing is under way, and `copied` blocks have arrived.
        """
        plan, after = self.plan, self.after
        assert after is not None and self.ready == len(plan.slots)
        mapping = after.mapping
        if mapping.intact(plan.slots, plan.generations) < len(plan.slots):
            return
        pairs = list(zip(plan.device_blocks, plan.slots, strict=True))
        begun: list[Copying] = []
        try:
            for layer in mapping.layers:
                if gate.abandoned:
                    return
                begun.append(mapping.copier.begin_load(pairs, after.event, layer))
                gate.open(layer, begun[-1])
            begun[-1].wait()
            self.copied = mapping.intact(plan.slots, plan.generations)
        finally:
            for copying in begun:
                wait_for_end(copying)


def wait_for_end(copying: Copying) -> None:
    """Wait for a copy whose result is not used: it must only stop touching the device."""
    try:
        copying.wait()
    except Exception as error:
        log.debug("a copy failed whose result is not used: %s", error)
