"""The digest of running weights: it is made again after a change, and not again and again where it cannot be made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="weights are torch tensors; torch is not installed")

import torch

from kvbm.sglang_integration.weights import (
    CHANGES,
    MODEL_RUNNER,
    SCHEDULER,
    SCHEDULER_UPDATER,
    Meeting,
    RunningWeights,
    WeightsWatch,
    digest_of,
)

DEADLINE_S = 30.0
OWN, OTHER = bytes([1]) * 32, bytes([2]) * 32


class Store:
    """torch's store, as far as a meeting uses it."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.broken = False

    def set(self, name: str, value: str) -> None:
        if self.broken:
            raise RuntimeError("the store has gone")
        self.kept[name] = value.encode()

    def check(self, names: Sequence[str]) -> bool:
        return set(names) <= self.kept.keys()

    def get(self, name: str) -> bytes:
        return self.kept[name]

    def delete_key(self, name: str) -> bool:
        return self.kept.pop(name, None) is not None


def ended(weights: RunningWeights) -> bytes | None:
    """The identity once the thread that digests has ended."""
    weights.wait(DEADLINE_S)
    return weights.identity()


def test_all_ranks_meet_and_one_that_is_late_is_waited_for() -> None:
    store, watch = Store(), WeightsWatch()
    first = RunningWeights("w", watch, lambda: OWN, Meeting(store, 0, 2))
    second = RunningWeights("w", watch, lambda: OTHER, Meeting(store, 1, 2))
    alone = RunningWeights("w", watch, lambda: OWN, None)
    assert ended(first) is None, "the other rank has not come"
    found = ended(second)
    assert found is not None
    assert first.identity() is None, "it asks nobody by itself"
    assert first.look() == found == first.identity()
    assert ended(alone) not in (None, found)
    assert ended(RunningWeights("w", watch, lambda: OWN, None, b"adapter")) != alone.identity()


def test_an_update_in_the_middle_of_a_digest_makes_it_void() -> None:
    watch, begun, go_on = WeightsWatch(), threading.Event(), threading.Event()
    digests = iter((OWN, OTHER))

    def take() -> bytes:
        digest = next(digests)
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return digest

    weights = RunningWeights("w", watch, take, None)
    assert weights.identity() is None
    assert begun.wait(DEADLINE_S)
    watch.begin()
    assert weights.identity() is None
    watch.end()
    go_on.set()
    weights.wait(DEADLINE_S)
    found = ended(weights)
    assert found == ended(RunningWeights("w", watch, lambda: OTHER, None))


@pytest.mark.swallows("^RuntimeError: (out of memory|the store has gone)$")
@pytest.mark.parametrize("where", ["tensors", "store"])
def test_weights_that_cannot_be_read_are_not_read_again_until_they_change(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch, store, takes = WeightsWatch(), Store(), list[int]()
    broken = store.broken = True

    def take() -> bytes:
        takes.append(1)
        if broken and where == "tensors":
            raise RuntimeError("out of memory")
        return OWN

    weights = RunningWeights("w", watch, take, Meeting(store, 0, 1))
    for _ in range(5):
        assert ended(weights) is None
    assert len(takes) == 1
    assert sum("could not be read" in record.getMessage() for record in caplog.records) == 1
    broken = store.broken = False
    watch.begin()
    watch.end()
    assert ended(weights) is not None


def test_changes_inside_changes_are_one_and_emptied_caches_count_when_they_are_over() -> None:
    watch = WeightsWatch()
    assert watch.now.unmixed
    watch.begin()
    watch.begin()
    watch.end()
    assert not watch.now.stable
    watch.end()
    assert (watch.now.stable, watch.now.unmixed) == (True, False)
    watch.emptied()
    assert watch.now.unmixed
    watch.begin()
    watch.emptied()  # as SGLang does where it gives its memory back
    assert not watch.now.unmixed
    watch.end()
    assert watch.now.unmixed
    watch.begin()
    watch.end()
    assert not watch.now.unmixed


def test_a_bit_a_name_and_a_type_each_make_another_digest() -> None:
    def model(name: str = "w", dtype: torch.dtype = torch.int32, bit: int = 0) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer(name, torch.tensor([bit, 0, 0], dtype=torch.int32).view(dtype))
        return module

    found = [digest_of([each]) for each in (model(), model("v"), model(dtype=torch.float32), model(bit=1))]
    assert len(set(found)) == 4
    assert digest_of([model()]) == found[0]


class Updater:
    """As SGLang's: of a model runner, and of the scheduler."""

    def __init__(self, watch: WeightsWatch) -> None:
        self.watch = watch
        self.seen: list[bool] = []

    def look(self, *_: object) -> None:
        self.seen.append(self.watch.now.stable)

    begin_weight_update = end_weight_update = look
    load_weights_from_distributed = receive_weights_from_distributed = look
    update_weights_from_disk = update_weights_from_ipc = update_weights_from_tensor = look
    release_memory_occupation = resume_memory_occupation = look

    def flush_cache(self) -> bool:
        return True


def test_sglangs_functions_are_watched() -> None:
    """Each change, the time between a release of the weights and their return, and who runs a model."""
    watch = WeightsWatch()
    places = [*CHANGES, SCHEDULER_UPDATER, SCHEDULER, MODEL_RUNNER]
    kinds = {place: type(place[1], (Updater,), dict(vars(Updater))) for place in places}
    watch.install(lambda module, name: kinds[module, name])
    watch.install(lambda module, name: pytest.fail("wrapped twice"))
    worker, scheduler = kinds[next(iter(CHANGES))](watch), kinds[SCHEDULER](watch)
    worker.update_weights_from_tensor()
    assert (worker.seen, watch.now.stable, watch.now.unmixed) == ([False], True, False)
    scheduler.flush_cache()
    assert watch.now.unmixed
    memory = kinds[SCHEDULER_UPDATER](watch)
    memory.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert watch.now.unmixed, "the weights stay"
    memory.release_memory_occupation(SimpleNamespace(tags=None))
    scheduler.flush_cache()
    assert not watch.now.stable, "there is nothing to read"
    memory.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert not watch.now.stable
    memory.resume_memory_occupation(SimpleNamespace(tags=["weights"]))
    assert watch.now.unmixed, "its caches were emptied in between"
    runner = kinds[MODEL_RUNNER](watch)
    assert list(watch.runners) == [runner]


def test_an_sglang_with_other_functions_is_not_wrapped_in_part() -> None:
    places = [*CHANGES, SCHEDULER_UPDATER, SCHEDULER, MODEL_RUNNER]
    kinds = {place: type(place[1], (Updater,), dict(vars(Updater))) for place in places}
    kinds[SCHEDULER_UPDATER] = type("Other", (), {})
    original = kinds[SCHEDULER].flush_cache
    with pytest.raises(AttributeError):
        WeightsWatch().install(lambda module, name: kinds[module, name])
    assert kinds[SCHEDULER].flush_cache is original
