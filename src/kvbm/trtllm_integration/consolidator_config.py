"""Whether an engine's KV events are consolidated, and where: the names that Dynamo's TensorRT-LLM worker calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvbm.client.kept_process import KeptProcess
from kvbm.events import consolidator
from kvbm.events.kept import keep_consolidator
from kvbm.settings import CONSOLIDATOR_PORT_OFFSET, Settings, load_settings, process_environment, variable
from kvbm.utils import get_consolidator_mode as get_consolidator_mode
from kvbm.utils import is_truthy as is_truthy

log = logging.getLogger("kvbm.consolidator")

CONNECTOR_MODULE = "kvbm.trtllm_integration.connector"
Endpoints = tuple[str, str, str]
"""The engine's events; where the consolidator listens; where routers of this machine connect."""


def should_enable_consolidator(arg_map: Any) -> bool:
    """Whether the engine that is started with these arguments has KVBM as its connector, and events are merged."""
    connector = arg_map.get("kv_connector_config") if isinstance(arg_map, Mapping) else None
    if isinstance(connector, Mapping):
        named = connector.get("connector_module"), connector.get("connector")
    else:
        named = getattr(connector, "connector_module", None), getattr(connector, "connector", None)
    ours = CONNECTOR_MODULE in str(named[0] or "") or named[1] == "kvbm"
    return ours and load_settings(process_environment()).settings.consolidator


def get_consolidator_endpoints() -> Endpoints | None:
    """The three addresses; None, with a line, where the port of the engine's events is not set."""
    return endpoints_of(load_settings(process_environment()).settings)


def endpoints_of(settings: Settings) -> Endpoints | None:
    """The same, by these settings."""
    if settings.trtllm_events_port is None:
        log.error(
            "KV events are not consolidated: set the port on which the engine publishes them, as in "
            "`export %s=20081`; serving goes on",
            variable("trtllm_events_port"),
        )
        return None
    port = settings.leader_pub_port + CONSOLIDATOR_PORT_OFFSET
    engine = f"tcp://127.0.0.1:{settings.trtllm_events_port}"
    return engine, f"tcp://0.0.0.0:{port}", f"tcp://127.0.0.1:{port}"


def kept_consolidator(settings: Settings) -> KeptProcess | None:
    """The consolidator, running; None where it is off, or where there is no port, with a line."""
    endpoints = endpoints_of(settings) if settings.consolidator else None
    if endpoints is None:
        return None
    engine, output, _ = endpoints
    return keep_consolidator(
        consolidator.Options(
            engine=engine, output=output, mode=settings.consolidator_mode, log_level=settings.log_level
        )
    )
