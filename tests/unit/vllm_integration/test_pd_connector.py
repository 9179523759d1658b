"""`PdConnector`: which connectors it takes, and that vLLM's own map of requests is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="it is vLLM's MultiConnector; vllm is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

import kvbm.vllm_integration
from kvbm.vllm_integration.connector import PdConnector, PdConnectorMetadata
from kvbm.vllm_integration.connector.pd_connector import check_connectors

CACHE = {"kv_connector": "DynamoConnector", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def test_the_originals_configuration_is_taken() -> None:
    module = {"kv_connector_module_path": "kvbm.vllm_integration.connector"}
    check_connectors({"connectors": [{**CACHE, **module}, NIXL]})
    check_connectors({"connectors": [{"kv_connector": "LMCacheConnectorV1"}, NIXL]})


@pytest.mark.parametrize(
    ("connectors", "error", "names"),
    [
        (None, ValueError, "connectors=[]"),
        ([CACHE], ValueError, "connectors=['DynamoConnector']"),
        ([CACHE, NIXL, NIXL], ValueError, "two are needed"),
        ([NIXL, CACHE], TypeError, "the first connector 'NixlConnector'"),
        ([CACHE, CACHE], TypeError, "the second connector 'DynamoConnector'"),
        ([{}, NIXL], TypeError, "the first connector 'None'"),
    ],
)
def test_other_connectors_are_refused_in_one_line(
    connectors: Any, error: type[Exception], names: str
) -> None:
    with pytest.raises(error) as raised:
        check_connectors({"connectors": connectors} if connectors is not None else {})
    assert names in str(raised.value)
    assert "\n" not in str(raised.value)


def test_vllm_knows_its_name_and_the_short_paths_lead_to_it() -> None:
    config = KVTransferConfig(kv_connector="PdConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is PdConnector
    assert kvbm.vllm_integration.PdConnector is PdConnector
    assert kvbm.vllm_integration.pd_connector.PdConnector is PdConnector
    assert kvbm.vllm_integration.PdConnectorMetadata is PdConnectorMetadata


class Child:
    """A connector that says how many tokens it has."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        self.tokens = {"DynamoConnector": 32, "NixlConnector": 0}[config.kv_transfer_config.kv_connector]
        self.allocated: list[int] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return self.tokens, self.tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.allocated.append(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (self.tokens,)


def test_the_cache_loads_and_nixl_hears_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = KVTransferConfig(
        kv_connector="PdConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [CACHE, NIXL]},
    )
    children = [
        (Child, SimpleNamespace(kv_transfer_config=KVTransferConfig(**each))) for each in (CACHE, NIXL)
    ]
    monkeypatch.setattr(
        MultiConnector, "_get_connector_classes_and_configs", classmethod(lambda cls, config: children)
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    made = PdConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[]))
    request = SimpleNamespace(request_id="r")
    assert made.get_num_new_matched_tokens(request, 0) == (32, True)
    made.update_state_after_alloc(request, SimpleNamespace(new_empty=lambda: None), 32)
    assert [child.allocated for child in made._connectors] == [[32], [0]]
    if hasattr(MultiConnector, "get_loaded_kv_cache_group_ids"):
        assert made.get_loaded_kv_cache_group_ids(request) == (32,)
