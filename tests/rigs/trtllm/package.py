"""`tensorrt_llm` as far as a connector imports it: the two base classes and their data, written from its documentation.

`install(version)` puts it in place. `1.3.0rc29` has the interface in a folder, with layouts, `request_reset` and
`cancel_load`; `1.2.0rc2` has it in a module and knows none of those.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

NEWEST, OLDEST = "1.3.0rc29", "1.2.0rc2"


@dataclass
class RequestData:
    """A request in one iteration: what came since the last one."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """The requests of one iteration."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


class KvCacheConnectorWorker(ABC):
    """The rank's half that a connector derives from."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    """The scheduler's half that a connector derives from."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def wait_for_initialization(self) -> None:
        return


class NewestWorker(KvCacheConnectorWorker):
    """What later releases add."""

    def register_kv_cache_layout(self, layout: Any) -> None:
        raise NotImplementedError


class NewestScheduler(KvCacheConnectorScheduler):
    """What later releases add."""

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        raise NotImplementedError

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        raise NotImplementedError

    def request_reset(self, request: Any) -> None:
        return

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        return


def install(version: str = NEWEST) -> list[str]:
    """Put the package of that release in place; returns the names of its modules."""
    names = {"tensorrt_llm": {"__version__": version}, "tensorrt_llm._torch": {}}
    names["tensorrt_llm._torch.pyexecutor"] = {}
    newest = version != OLDEST
    bases = {
        "KvCacheConnectorWorker": NewestWorker if newest else KvCacheConnectorWorker,
        "KvCacheConnectorScheduler": NewestScheduler if newest else KvCacheConnectorScheduler,
        "SchedulerOutput": SchedulerOutput,
        "RequestData": RequestData,
    }
    if newest:
        names["tensorrt_llm._torch.pyexecutor.connectors"] = {}
        names["tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"] = bases
    else:
        names["tensorrt_llm._torch.pyexecutor.kv_cache_connector"] = bases
    for name, content in names.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        sys.modules[name] = module
    return list(names)


def remove() -> None:
    """Take the package, and those of our modules that are made of it, out again."""
    ours = {f"kvbm.trtllm_integration.{name}" for name in ("connector", "dynamo_connector", "interface")}
    for name in list(sys.modules):
        if name.partition(".")[0] == "tensorrt_llm" or name in ours:
            del sys.modules[name]
