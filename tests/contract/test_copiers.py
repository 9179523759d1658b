"""The public copier contract: our copiers keep it, and it finds every kind of broken one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvbm.testing.copier_contract import CopierContract, CopierRig
from kvbm.testing.kv_views import LAYOUTS
from kvbm.transfer import CpuCopier, DeviceCache
from kvbm.transfer.copier import Copier, Copying, DeviceEvent, Over, Pairs
from kvbm.transfer.cuda.copier import CudaCopier, CudaCopying
from rigs.cuda_model import DEADLINE_S, Model

LATE_STEPS = 12


class TestCpuCopier(CopierContract):
    @pytest.fixture(autouse=True, params=[False, True], ids=["by-worker", "by-engine"])
    def caller(self, request: pytest.FixtureRequest) -> None:
        self._by_engine = request.param

    def make_copier(self, cache: DeviceCache, arena: torch.Tensor) -> Copier:
        return CpuCopier(cache, arena, by_engine=self._by_engine)


class OnTheModel(CopierContract):
    """On a model of a CUDA device, whose streams go on in any order that events allow."""

    method = "batch"
    copier_class = CudaCopier
    seed = 0

    @contextmanager
    def rig(self, layout: str) -> Iterator[CopierRig]:
        self.model = Model(self.seed)
        with super().rig(layout) as rig:
            yield rig
        assert self.model.complaints == []

    def make_copier(self, cache: DeviceCache, arena: torch.Tensor) -> Copier:
        self.model.own(region.device for region in cache.regions)
        copier = self.copier_class(cache, arena, self.method, self.model.driver, self.model.device)
        assert copier.prepared(DEADLINE_S)
        return copier

    def compute(self, work: Callable[[], object]) -> None:
        """It comes late: a copy that does not wait for it is begun before."""
        for _ in range(LATE_STEPS):
            self.model.engine.work(lambda: None)
        self.model.engine.work(work)

    def finish(self) -> None:
        self.model.drain()


class TestCudaCopier(OnTheModel):
    @pytest.fixture(autouse=True, params=["batch", "rows"])
    def way(self, request: pytest.FixtureRequest) -> None:
        self.method = request.param


# Broken ones


class ForgetsAPair(CpuCopier):
    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        return super().begin_store(pairs[:-1] if len(pairs) > 3 else pairs, after)


class WritesPastItsBlocks(CpuCopier):
    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        return super().begin_load([*pairs, *[(2, 8) for _ in pairs[3:4]]], after, layer)


class FillsTheSlot(CpuCopier):
    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        copying = super().begin_store(pairs, after)
        for _, slot in pairs:
            self._arena[slot, self._cache.shard_bytes :] = 0
        return copying


class LoadsAllLayersAtOnce(CpuCopier):
    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        return super().begin_load(pairs, after)


class CopiesBeforeItRefuses(CpuCopier):
    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        super().begin_store(pairs[:1], after)
        return super().begin_store(pairs, after)


class TakesAnyPair(CpuCopier):
    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        blocks, slots = self._cache.block_count, self._arena.shape[0]
        return super().begin_load(
            [p for p in pairs if 0 <= p[0] < blocks and 0 <= p[1] < slots], after, layer
        )


class ClosesOnce(CpuCopier):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        super().close()
        self.closed = True


class Unmarked(CudaCopier):
    """Copies begin although the engine has still work to do."""

    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> CudaCopying:
        return super().begin_store(pairs, self._store_stream.record())

    def begin_load(
        self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None
    ) -> CudaCopying:
        return super().begin_load(pairs, self._load_stream.record(), layer)


class HoldsNothing(CudaCopier):
    def hold(self, copying: Copying) -> None:
        """The engine goes on at once."""


class OverTooSoon(CudaCopier):
    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Any:
        super().begin_store(pairs, after)
        return Over()

    def hold(self, copying: Copying) -> None:
        """Nothing is under way, it says."""


class LeavesCopiesBehind(CudaCopier):
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._locks.close(unlock=False)
            self._locking.join()


ON_A_CPU = [
    ForgetsAPair,
    WritesPastItsBlocks,
    FillsTheSlot,
    LoadsAllLayersAtOnce,
    CopiesBeforeItRefuses,
    TakesAnyPair,
    ClosesOnce,
]
ON_THE_MODEL = [Unmarked, HoldsNothing, OverTooSoon, LeavesCopiesBehind]
SEEDS = range(16)


class OnACpu(CopierContract):
    def __init__(self, copier_class: type[CpuCopier]) -> None:
        self._class = copier_class

    def make_copier(self, cache: DeviceCache, arena: torch.Tensor) -> Copier:
        return self._class(cache, arena)


class OnTheModelWith(OnTheModel):
    def __init__(self, copier_class: type[CudaCopier], seed: int) -> None:
        self.copier_class, self.seed = copier_class, seed


ARGUMENTS: dict[str, list[Any]] = {
    "layout": ["LBNHC", "padded"],
    "begin": ["begin_store", "begin_load"],
    "pair": [(9, 0), (0, -1)],
}
"""Enough of them to tell a broken copier from a sound one."""


def broken_laws(contract: CopierContract) -> list[str]:
    """The tests of the contract that fail."""
    found = []
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if not name.startswith("test_"):
            continue
        calls: list[dict[str, Any]] = [{}]
        for argument in inspect.signature(test).parameters:
            calls = [{**call, argument: value} for call in calls for value in ARGUMENTS[argument]]
        for call in calls:
            try:
                test(**call)
            except (Exception, pytest.fail.Exception):
                found.append(name)
                break
    return found


@pytest.mark.parametrize("copier_class", ON_A_CPU)
def test_a_broken_copier_on_a_cpu_is_found(copier_class: type[CpuCopier]) -> None:
    assert broken_laws(OnACpu(copier_class))


@pytest.mark.parametrize("copier_class", ON_THE_MODEL)
def test_a_broken_copier_on_a_device_is_found(copier_class: type[CudaCopier]) -> None:
    assert any(broken_laws(OnTheModelWith(copier_class, seed)) for seed in SEEDS)


def test_the_sound_ones_that_they_come_from_are_not() -> None:
    assert broken_laws(OnACpu(CpuCopier)) == []
    assert [broken_laws(OnTheModelWith(CudaCopier, seed)) for seed in SEEDS] == [[]] * len(SEEDS)
    assert set(ARGUMENTS["layout"]) <= set(LAYOUTS)
