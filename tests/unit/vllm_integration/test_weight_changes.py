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

    def loading_requests(self) -> list[str]:
        return []

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
        self.scheduler, self.batch_queue = SimpleNamespace(requests={}), None
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


MIB = 1 << 20
EMBEDDING_BYTES = 151_936 * 1024 * 2
"""Of Qwen3-0.6B in bf16: 311 MB."""


def expected_sample(weight: torch.Tensor) -> list[int]:
    """The bytes of the tensor's elements in order, the first and the last among them, read out of a plain copy."""
    plain = weight.contiguous().view(-1).view(torch.uint8)
    count = min(weight_changes.SAMPLED_BYTES, len(plain))
    return [int(plain[number * (len(plain) - 1) // max(1, count - 1)]) for number in range(count)]


def numbered(size: int) -> torch.Tensor:
    """Bytes that differ from their neighbours everywhere."""
    return torch.arange(size, dtype=torch.int32).mul_(-1640531527).bitwise_right_shift_(24).to(torch.uint8)


@pytest.mark.parametrize(
    "size", [0, 1, 63, 64, 65, 32 * MIB - 1, 32 * MIB, 32 * MIB + 1, 64 * MIB, EMBEDDING_BYTES]
)
def test_a_weight_of_any_size_is_sampled_up_to_its_last_byte(size: int) -> None:
    weight = numbered(size)
    assert weight_changes._sample_bytes(weight).tolist() == expected_sample(weight)
    if size:
        before = weight_changes._sample_bytes(weight).tolist()
        weight[-1] ^= 1
        assert weight_changes._sample_bytes(weight).tolist() != before


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_a_weight_that_is_not_contiguous_is_sampled_by_its_own_elements(dtype: torch.dtype) -> None:
    """vLLM keeps FP8 linears transposed; others are slices of a larger tensor."""
    whole = numbered(64 * 96 * dtype.itemsize).view(dtype).view(64, 96)
    for weight in (whole.t(), whole[5:50, 7:90], whole.t()[3:, 1::2], whole.view(8, 8, 96).permute(2, 0, 1)):
        assert not weight.is_contiguous()
        assert weight_changes._sample_bytes(weight).tolist() == expected_sample(weight)


def test_an_fp8_weight_of_32_mib_that_is_kept_transposed_is_compared() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(
        numbered(32 * MIB).view(torch.float8_e4m3fn).view(8192, 4096).t(), False
    )
    before = weight_changes._sample(model)
    model.weight.data.view(torch.uint8)[4095, 8191] ^= 1
    assert weight_changes._sample(model) != before


def test_weights_without_bytes_do_not_keep_the_others_from_being_compared() -> None:
    """Weights that vLLM has not allocated (meta) or keeps sparse are compared as objects."""
    model = torch.nn.Linear(8, 8)
    model.register_buffer("later", torch.empty(4, device="meta"))
    model.register_buffer("rare", torch.eye(4).to_sparse())
    before = weight_changes._sample(model)
    assert weight_changes._sample(model) == before
    model.weight.data[7, 7] += 1.0
    assert weight_changes._sample(model) != before


@pytest.mark.swallows("^TypeError: cannot create weak reference")
def test_weights_that_cannot_be_sampled_count_as_changed_and_are_one_warning(
    core: Core, listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_changes, "_warned", False)
    core.worker.get_model = lambda: None  # type: ignore[assignment, method-assign, return-value]
    for _ in range(2):
        assert core.reset_prefix_cache()
    assert listener.heard == ["changed", "changed"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be sampled (TypeError: " in caplog.text


@pytest.mark.swallows("^RuntimeError: CUDA error: an illegal memory access")
def test_a_weight_whose_bytes_cannot_be_read_counts_as_changed_and_is_one_warning(
    core: Core, listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample without it would call an update of it no change."""

    def fail(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(weight_changes, "_warned", False)
    monkeypatch.setattr(weight_changes, "_sample_bytes", fail)
    for _ in range(2):
        assert core.reset_prefix_cache()
    assert listener.heard == ["changed", "changed"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (
        "cannot be sampled (RuntimeError: CUDA error: an illegal memory access was encountered)"
        in caplog.text
    )
