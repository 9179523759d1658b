"""Weights that change inside the engine's process: a transfer engine that makes them from a number, and plain swaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.engine_child import Answers, Child, Engine
from engine.workload import Request

BACKEND = "numbered"


def register(child: Child) -> None:
    """Make the transfer engine known to vLLM, once in a process."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class Nothing(WeightTransferInitInfo):
        pass

    @dataclass
    class Number(WeightTransferUpdateInfo):
        number: int = 0

    class Numbered(WeightTransferEngine):  # type: ignore[type-arg]
        """The weights that a trainer would send are made here, from a number."""

        init_info_cls, update_info_cls = Nothing, Number

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            overwrite(self.model, update_info.number)

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Numbered)


def overwrite(model: torch.nn.Module, number: int) -> None:
    """Move the embedding and the norms to another place, which depends on the number alone.

    A CPU keeps the matrices of linear layers packed, where nothing can be written.
    """
    generator = torch.Generator().manual_seed(number)
    for name, weight in model.named_parameters():
        noise = torch.empty(weight.shape).normal_(0.0, 1.0, generator=generator)
        if "embed_tokens" in name:
            weight.data.copy_(noise)
        elif weight.dim() == 1 and ".layers." in name and weight.numel():
            weight.data.copy_(1.5 + 0.3 * noise)


def swap(child: Child, number: int) -> None:
    """What frameworks do that vLLM has no word for: a function of theirs, run in the ranks."""
    _engine(child).llm.collective_rpc(_swap_in_rank, args=(number,))


def _swap_in_rank(worker: Any, number: int) -> None:
    overwrite(worker.get_model(), number)


def sleep(child: Child) -> None:
    """vLLM's sleep; on a CPU it keeps its memory, and resets its caches as elsewhere."""
    _engine(child).llm.sleep(level=1)


def wake(child: Child) -> None:
    _engine(child).llm.wake_up()


def update(child: Child, number: int, version: str = "") -> None:
    """A trainer's update, as `AsyncLLM` carries it out; with a version, it is named afterwards."""
    llm = _engine(child).llm
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"number": number}})
    llm.collective_rpc("finish_weight_update")
    if version:
        _engine(child).core.engine_core.engine_core.set_weight_version(version)


def update_unseen(child: Child, number: int) -> None:
    """The same in the rank alone, past the engine core, as background threads of a transfer engine do."""
    worker = _engine(child).core.model_executor.driver_worker.worker
    worker.start_weight_update()
    worker.update_weights({"number": number})
    worker.finish_weight_update()


def write_past_everything(child: Child, number: int) -> None:
    """As trainers in the engine's own process do: straight into the model, past every call of vLLM."""
    overwrite(_engine(child).core.model_executor.driver_worker.worker.get_model(), number)


def reset_device(child: Child) -> bool:
    """vLLM's own reset of its prefix cache, as users call it."""
    return bool(_engine(child).core.reset_prefix_cache())


def look_around(child: Child) -> None:
    """A call to the ranks that changes nothing."""
    _engine(child).llm.collective_rpc(_nothing)


def _nothing(worker: Any) -> int:
    return 1


def update_between(child: Child, requests: Sequence[Request], number: int) -> Answers:
    """Answer the requests, and update the weights when half of them are answered: some run, some wait."""
    updated = False

    def between(engine: Engine, finished: int) -> None:
        nonlocal updated
        if finished >= len(requests) // 2 and not updated:
            updated = True
            update(child, number)

    return _engine(child).run(requests, between=between)


def _engine(child: Child) -> Engine:
    assert child.engine is not None, "no engine was started"
    return child.engine
