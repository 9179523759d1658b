"""The layout that `DYN_KVBM_KV_LAYOUT=block` asks vLLM for, by the card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM has no choice of layouts before 0.29")

from vllm.platforms.interface import DeviceCapability

from kvbm.vllm_integration.connector import DynamoConnector, dynamo_connector


@pytest.mark.parametrize(
    ("capability", "layout"),
    [((9, 0), "BLNHC"), ((10, 0), "BLHNC"), ((10, 3), "BLHNC"), ((12, 0), "BLNHC"), (None, "BLNHC")],
)
def test_flashinfer_reads_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, layout: str
) -> None:
    """On capability 10 it takes LBHNC and BLHNC alone, and vLLM drops every other wish."""
    found = None if capability is None else DeviceCapability(*capability)
    monkeypatch.setattr(
        dynamo_connector, "current_platform", SimpleNamespace(get_device_capability=lambda: found)
    )
    monkeypatch.setenv("DYN_KVBM_KV_LAYOUT", "block")
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=None))
    assert DynamoConnector.get_required_kvcache_layout(config) == layout
    monkeypatch.delenv("DYN_KVBM_KV_LAYOUT")
    assert DynamoConnector.get_required_kvcache_layout(config) is None
