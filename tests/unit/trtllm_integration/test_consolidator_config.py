"""Whether and where an engine's KV events are merged: the names that Dynamo's worker calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.settings import Settings
from kvbm.trtllm_integration.consolidator_config import (
    endpoints_of,
    get_consolidator_endpoints,
    kept_consolidator,
    should_enable_consolidator,
)

MODULE = "kvbm.trtllm_integration.connector"


@pytest.mark.parametrize(
    ("connector", "ours"),
    [
        ({"connector_module": MODULE}, True),
        ({"connector": "kvbm"}, True),
        (SimpleNamespace(connector_module=MODULE), True),
        (SimpleNamespace(connector_module=None, connector="kvbm"), True),
        ({"connector": "lmcache"}, False),
        (None, False),
    ],
)
def test_only_where_we_are_the_connector(connector: Any, ours: bool) -> None:
    assert should_enable_consolidator({"kv_connector_config": connector}) == ours


def test_a_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "0")
    assert not should_enable_consolidator({"kv_connector_config": {"connector": "kvbm"}})
    assert kept_consolidator(Settings(consolidator=False, trtllm_events_port=20081)) is None


def test_the_three_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ("tcp://127.0.0.1:20081", "tcp://0.0.0.0:57001", "tcp://127.0.0.1:57001")
    assert endpoints_of(Settings(trtllm_events_port=20081)) == expected
    monkeypatch.setenv("DYN_KVBM_TRTLLM_ZMQ_PORT", "20081")
    assert get_consolidator_endpoints() == expected


def test_without_the_engines_port_one_line_names_it(caplog: pytest.LogCaptureFixture) -> None:
    assert kept_consolidator(Settings()) is None
    (record,) = caplog.records
    assert "DYN_KVBM_TRTLLM_ZMQ_PORT=20081" in record.message
    assert "\n" not in record.message
