"""The watch over vLLM's calls, on classes that stand for vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="weights are torch tensors; torch is not installed")

import torch

from kvbm.vllm_integration import weight_changes


class Listener:
    """The calls that a leader's side gets."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.pins = 0

    def weights_changed(self) -> None:
        self.heard.append("changed")

    def weights_named(self, version: str) -> None:
        self.heard.append(version)

    def give_up_pins(self) -> bool:
        had, self.pins = self.pins > 0, 0
        return had


class Worker:
    """A rank with a model."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.model.register_buffer("k_scale", torch.ones(1))
        self.slept: list[str] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    def update_weights(self, seen: list[int]) -> None:
        seen.append(weight_changes.updates_seen())

    def sleep(self) -> None:
        self.slept.append("asleep")


class Core:
    """An engine core with one rank."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.resets = 0
        self.in_use: Callable[[], bool] = lambda: False
        self.model_executor: Any = SimpleNamespace(collective_rpc=self._run, sleeping_tags=set())

    def _run(self, method: Any, timeout: float | None = None) -> list[Any]:
        return [method(self.worker)]

    def collective_rpc(self, method: Any) -> list[Any]:
        return self._run(method)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.resets += 1
        if self.in_use() and reset_running_requests:
            raise RuntimeError("as vLLM does")
        return not self.in_use()

    def set_weight_version(self, weight_version: str) -> None:
        pass


class Side:
    """The call that a rank's side gets before memory goes."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def quiesce(self) -> None:
        self._noted.append("quiet")


def copied(kind: type) -> Any:
    """The class anew: watching changes a class for good."""
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, kind.__bases__, own)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def core(listener: Listener) -> Core:
    """Watched as vLLM's is, and sampled at its start."""
    kind = copied(Core)
    weight_changes.listen(listener, kind)
    made: Core = kind()
    weight_changes.weights_moved(made.worker)
    return made


def write(worker: Worker) -> None:
    worker.model.weight.data[3] += 1.0


def rescale(worker: Worker) -> None:
    worker.model.k_scale.fill_(0.5)


def look(worker: Worker) -> int:
    return 5


def test_a_call_that_changes_weights_is_heard_of_and_one_that_looks_is_not(
    core: Core, listener: Listener
) -> None:
    assert core.collective_rpc(look) == [5]
    assert listener.heard == []
    for change in (write, rescale):
        core.collective_rpc(change)
        assert listener.heard.pop() == "changed"
        core.collective_rpc(look)
        assert listener.heard == [], "it is compared with what was there before"


def test_a_call_that_fails_may_have_changed_anything(core: Core, listener: Listener) -> None:
    def fail(worker: Worker) -> None:
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        core.collective_rpc(fail)
    assert listener.heard == ["changed"]


def test_weights_that_sleep_are_not_read(core: Core, listener: Listener) -> None:
    core.model_executor.sleeping_tags = {"weights"}
    core.worker.get_model = None  # type: ignore[assignment, method-assign]
    core.collective_rpc(look)
    assert listener.heard == ["changed"]


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_is_not_refused_for_what_is_still_to_be_copied(
    core: Core, listener: Listener, running: bool
) -> None:
    core.in_use, listener.pins = lambda: listener.pins > 0, 2
    assert core.reset_prefix_cache(running)
    assert (core.resets, listener.pins) == (1 if running else 2, 0)
    core.in_use = lambda: True  # requests of the engine
    assert not core.reset_prefix_cache()
    assert core.resets == (2 if running else 3), "nothing was given up: it is not asked again"


def test_a_write_past_every_call_is_found_by_the_reset_that_follows(core: Core, listener: Listener) -> None:
    write(core.worker)
    assert core.reset_prefix_cache()
    assert listener.heard == ["changed"]
    assert core.reset_prefix_cache()
    assert listener.heard == ["changed"], "a plain reset is none"


def test_a_version_is_passed_on(core: Core, listener: Listener) -> None:
    core.set_weight_version("step-7")
    assert listener.heard == ["step-7"]


def test_an_update_counts_from_its_first_moment() -> None:
    """Steps may run beside it, with weights that are half-written."""
    kind, side = copied(Worker), Side([])
    weight_changes.count_updates(side, kind)
    before, seen = weight_changes.updates_seen(), list[int]()
    kind().update_weights(seen)
    assert before < seen[0] < weight_changes.updates_seen()


def test_copies_end_before_the_memory_goes() -> None:
    kind = copied(Worker)
    worker = kind()
    side = Side(worker.slept)
    weight_changes.count_updates(side, kind)
    worker.sleep()
    assert worker.slept == ["quiet", "asleep"]


def test_a_method_is_wrapped_once_and_only_where_it_is_defined() -> None:
    class Base:
        def sleep(self) -> str:
            return "base"

    class Special(Base):
        pass

    noted: list[str] = []
    side = Side(noted)
    weight_changes.count_updates(side, Special)
    assert "sleep" not in vars(Special)
    weight_changes.count_updates(side, Base)
    once = Base.sleep
    weight_changes.count_updates(side, Base)
    assert Base.sleep is once
    assert Special().sleep() == "base"
    assert noted == ["quiet"]
