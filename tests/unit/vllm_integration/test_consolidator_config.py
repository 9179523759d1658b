"""What Dynamo asks of `consolidator_config`, with configurations in vLLM's form."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.errors import SettingsError
from kvbm.vllm_integration import consolidator_config
from kvbm.vllm_integration.consolidator_config import (
    PORTS_MAX,
    get_consolidator_endpoints,
    get_consolidator_mode,
    is_truthy,
    kept_consolidator,
    should_enable_consolidator,
)

BASE = "DYN_KVBM_LEADER_ZMQ_PUB_PORT"
SWITCH = "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR"


def config(
    connector: str = "DynamoConnector",
    children: tuple[str, ...] = (),
    caching: bool = True,
    events: bool = True,
    ranks: int = 1,
    endpoint: str = "tcp://*:20080",
) -> Any:
    extra = {"connectors": [{"kv_connector": each} for each in children]} if children else {}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        kv_events_config=SimpleNamespace(
            enable_kv_cache_events=events, endpoint=endpoint, replay_endpoint=None
        ),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        additional_config={},
    )


@pytest.fixture(autouse=True)
def _own_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(consolidator_config, "_reserved", [])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv(BASE, str(probe.getsockname()[1] - 1000))


def base() -> int:
    return int(consolidator_config.process_environment()[BASE])


@pytest.mark.parametrize(
    "served",
    [
        config(),
        config("PdConnector", ("DynamoConnector", "NixlConnector")),
        config("MultiConnector", ("DynamoConnector", "NixlConnector")),
    ],
)
def test_on_where_kvbm_caches_and_the_engine_publishes(served: Any) -> None:
    assert should_enable_consolidator(served)


@pytest.mark.parametrize(
    "other",
    [
        config("NixlConnector"),
        config("PdConnector", ("LMCacheConnectorV1", "NixlConnector")),
        config(caching=False),
        config(events=False),
        config(ranks=2),
        SimpleNamespace(kv_transfer_config=None),
    ],
)
def test_off_everywhere_else(other: Any) -> None:
    assert not should_enable_consolidator(other)
    assert get_consolidator_endpoints(other) is None


@pytest.mark.parametrize(("word", "on"), [("false", False), ("0", False), ("", True), (" TRUE ", True)])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, word: str, on: bool) -> None:
    monkeypatch.setenv(SWITCH, word)
    assert should_enable_consolidator(config()) is on


@pytest.mark.parametrize("connector", ["PdConnector", "MultiConnector"])
def test_settings_of_one_of_several_connectors(connector: str) -> None:
    of_several = config(connector, ("DynamoConnector", "NixlConnector"))
    port = base() + 1
    (first, _) = of_several.kv_transfer_config.kv_connector_extra_config["connectors"]
    first["kv_connector_extra_config"] = {"kvbm": {"leader_pub_port": port}}
    endpoints = get_consolidator_endpoints(of_several)
    assert endpoints is not None
    assert int(endpoints[1].rpartition(":")[2]) > port + 999
    first["kv_connector_extra_config"] = {"kvbm": {"consolidator": False}}
    assert not should_enable_consolidator(of_several)


def test_the_three_addresses() -> None:
    port = base() + 1000
    assert get_consolidator_endpoints(config()) == (
        "tcp://127.0.0.1:20080",
        f"tcp://0.0.0.0:{port}",
        f"tcp://127.0.0.1:{port}",
    )


def test_a_second_worker_of_the_machine_gets_another_port() -> None:
    first, second = (get_consolidator_endpoints(config()) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[1:] != second[1:]


def test_a_port_that_somebody_listens_at_is_passed_over() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", base() + 1000))
        other.listen()
        endpoints = get_consolidator_endpoints(config())
    assert endpoints is not None
    assert endpoints[1] != f"tcp://0.0.0.0:{base() + 1000}"


def test_without_a_port_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consolidator_config, "PORTS_MAX", 1)
    assert get_consolidator_endpoints(config())
    with pytest.raises(SettingsError, match=BASE):
        get_consolidator_endpoints(config())
    assert PORTS_MAX > 1


def test_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_consolidator_mode() == "dedup"
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "Passthrough")
    assert get_consolidator_mode() == "passthrough"


@pytest.mark.parametrize(
    ("text", "on"), [(" On ", True), ("1", True), ("yes", True), ("2", False), (None, False)]
)
def test_words_for_on(text: str | None, on: bool) -> None:
    assert is_truthy(text) is on


def test_an_engine_that_was_promised_none_keeps_none() -> None:
    assert kept_consolidator(config(), consolidator_config.load_settings({}).settings) is None
