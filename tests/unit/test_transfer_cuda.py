"""The CUDA copier's order of work, on a CPU behind a stand-in for the driver: no GPU is needed.

What it cannot show is that work on streams really overlaps; what it does show is which bytes go where, that
batches are cut, and that nothing starts before the engine's event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvbm.errors import KvbmError
from kvbm.transfer import DeviceCache, cuda


class FakeEvent:
    def synchronize(self) -> None:
        """Nothing runs by itself here."""


class FakeStream:
    """Notes what a stream is asked to wait for."""

    waited: list[object]

    def __init__(self) -> None:
        self.waited = []

    def wait_stream(self, other: object) -> None:
        assert isinstance(other, FakeStream)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def synchronize(self) -> None:
        """Copies on a CPU have ended when they return."""


class FakeDriver:
    def __init__(self, refusal: int) -> None:
        self.refusal = refusal
        self.locked: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.refusal:
            self.locked.append(address)
        return self.refusal

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.locked.remove(address)


@pytest.fixture(params=[0, 712], ids=["page-locked", "refused"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(request.param)
    engine_stream = FakeStream()
    stand_in = SimpleNamespace(
        Stream=FakeStream,
        Event=FakeEvent,
        current_stream=lambda: engine_stream,
        cudart=lambda: fake,
        device=lambda device: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    real_empty, real_zeros = torch.empty, torch.zeros

    def unpinned_empty(*args: object, pin_memory: bool = False, **rest: object) -> torch.Tensor:
        return real_empty(*args, **rest)

    def cpu_zeros(*args: object, device: object = None, **rest: object) -> torch.Tensor:
        return real_zeros(*args, **rest)

    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch, "empty", unpinned_empty)
    monkeypatch.setattr(torch, "zeros", cpu_zeros)
    return fake


@pytest.fixture
def views() -> dict[str, torch.Tensor]:
    made = {f"layer.{index}": torch.rand(9, 2, 4, 6).transpose(1, 2) for index in range(3)}
    return {**made, "kv first": torch.rand(2, 9, 4, 2, 6)}


@pytest.fixture
def arena(views: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.full((11, 4096), 0xA5, dtype=torch.uint8)


@pytest.fixture
def copier(
    driver: FakeDriver, views: dict[str, torch.Tensor], arena: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[cuda.CudaCopier]:
    monkeypatch.setattr(cuda, "_STAGING_BYTES_MAX", 3 * 4096)
    made = cuda.CudaCopier(DeviceCache.from_tensors(views, 9), arena)
    yield made
    made.close()


def blocks_of(views: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Per block, the values of every layer."""
    return [
        [view[:, i].clone() if view.dim() == 5 else view[i].clone() for view in views.values()]
        for i in range(9)
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_round_trip_is_exact_over_several_batches(
    copier: cuda.CudaCopier, views: dict[str, torch.Tensor], arena: torch.Tensor
) -> None:
    stored = blocks_of(views)
    copier.store([(block, 9 - block) for block in range(8)])
    for view in views.values():
        view.random_()
    before = blocks_of(views)
    copier.load([(block, block + 2) for block in range(1, 8)])  # slot s holds block 9 - s
    after = blocks_of(views)
    for block in range(9):
        assert same(after[block], stored[7 - block] if 1 <= block < 8 else before[block]), block
    shard_bytes = DeviceCache.from_tensors(views, 9).shard_bytes
    assert bool((arena[:, shard_bytes:] == 0xA5).all())
    assert bool((arena[[0, 1, 10]] == 0xA5).all())


def test_a_slot_holds_the_same_bytes_as_on_a_cpu(
    copier: cuda.CudaCopier, views: dict[str, torch.Tensor], arena: torch.Tensor
) -> None:
    copier.store([(5, 3)])
    expected = b"".join(
        (view[:, 5].flatten() if view.dim() == 5 else view[5].transpose(0, 1).flatten()).numpy().tobytes()
        for view in views.values()
    )
    assert arena[3].numpy().tobytes()[: len(expected)] == expected


@pytest.mark.parametrize("direction", ["store", "load"])
def test_work_waits_for_the_mark_or_for_the_callers_stream(copier: cuda.CudaCopier, direction: str) -> None:
    mark = copier.mark()
    getattr(copier, direction)([(0, 0)], after=mark)
    assert copier._stream.waited == [mark]
    getattr(copier, direction)([(0, 0)])
    assert len(copier._stream.waited) == 2
    assert isinstance(copier._stream.waited[1], FakeEvent)


def test_a_pair_out_of_range_is_refused(copier: cuda.CudaCopier, arena: torch.Tensor) -> None:
    with pytest.raises(KvbmError, match="accepted are blocks 0 to 8"):
        copier.store([(9, 0)])
    assert bool((arena == 0xA5).all())


def test_page_locks_are_given_back_once(
    driver: FakeDriver, copier: cuda.CudaCopier, arena: torch.Tensor
) -> None:
    assert driver.locked == ([] if driver.refusal else [arena.data_ptr()])
    copier.close()
    copier.close()
    assert driver.locked == []


def test_a_refusal_is_logged_with_its_reason(
    driver: FakeDriver, views: dict[str, torch.Tensor], arena: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        cuda.CudaCopier(DeviceCache.from_tensors(views, 9), arena).close()
    assert ("CUDA error 712" in caplog.text) == bool(driver.refusal)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_copies_take_turns(copier: cuda.CudaCopier, direction: str) -> None:
    """Movers share the staging buffers, so one must be done with them before the next begins."""
    held: list[bool] = []
    copier._stream.synchronize = lambda: held.append(copier._lock.locked())  # type: ignore[method-assign]
    getattr(copier, direction)([(0, 0)])
    assert held == [True]
    assert not copier._lock.locked()
