"""Whether an engine's KV events are consolidated, and where: the names that Dynamo's vLLM worker calls.

It stores what `get_consolidator_endpoints` returns in `additional_config["consolidator_endpoints"]` and lets its router
listen at the third one; the connector of that engine then keeps a consolidator running.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, cast

from kvbm.client.kept_process import KeptProcess
from kvbm.errors import SettingsError
from kvbm.events import consolidator
from kvbm.events.kept import keep_consolidator
from kvbm.runtime_dir import make_runtime_dir, open_lock
from kvbm.settings import CONSOLIDATOR_PORT_OFFSET, PORT_MAX, Settings, load_settings, process_environment
from kvbm.utils import get_consolidator_mode as get_consolidator_mode
from kvbm.utils import is_truthy as is_truthy
from kvbm.vllm_integration.kv_events import events_wanted

log = logging.getLogger("kvbm.consolidator")

ADDITIONAL = "consolidator_endpoints"
"""Where Dynamo keeps the three addresses in vLLM's `additional_config`."""
CONNECTOR = "DynamoConnector"
PORTS_MAX = 16
"""So many ports are tried, one after the other."""

Endpoints = tuple[str, str, str]
"""The engine's events; where the consolidator listens; where routers of this machine connect."""

# Locks of the ports that this process has given away: another worker of this machine must not be given the same one.
_reserved: list[int] = []


def should_enable_consolidator(vllm_config: Any) -> bool:
    """Whether this engine's events are to be consolidated: KVBM is its connector, it caches prefixes and publishes
    events, and `DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR` is not off. With several data-parallel ranks they are not:
    each rank has a stream of its own, and routers read those."""
    if _our_extra_config(getattr(vllm_config, "kv_transfer_config", None)) is None:
        return False
    if not getattr(getattr(vllm_config, "cache_config", None), "enable_prefix_caching", False):
        return False
    settings = _settings(vllm_config)
    if not events_wanted(vllm_config) or not settings.consolidator:
        return False
    ranks = int(getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_size", 1) or 1)
    if ranks > 1:
        log.info("KV events are not consolidated: %d data-parallel ranks publish a stream each", ranks)
    return ranks == 1


def get_consolidator_endpoints(vllm_config: Any) -> Endpoints | None:
    """The three addresses, or None without a consolidator. Raises ValueError where there is no port to be had."""
    if not should_enable_consolidator(vllm_config):
        return None
    settings = _settings(vllm_config)
    log.info("KV Event Consolidator auto-enabled (KVBM connector + prefix caching detected)")
    engine = local_address(str(vllm_config.kv_events_config.endpoint))
    port = _reserve(settings)
    endpoints = (engine, f"tcp://0.0.0.0:{port}", f"tcp://127.0.0.1:{port}")
    log.info(
        "Consolidator endpoints: vllm=%s, output_bind=%s, output_connect=%s (derived from KVBM port %d)",
        *endpoints,
        settings.leader_pub_port,
    )
    return endpoints


def kept_consolidator(vllm_config: Any, settings: Settings) -> KeptProcess | None:
    """The consolidator of an engine that was promised one, running; None for the others.

    Without the process serving goes on, and routers stay without this engine's events.
    """
    additional = getattr(vllm_config, "additional_config", None)
    endpoints = additional.get(ADDITIONAL) if isinstance(additional, Mapping) else None
    if not endpoints:
        return None
    engine, output, _ = cast(Endpoints, tuple(endpoints))
    replay = getattr(getattr(vllm_config, "kv_events_config", None), "replay_endpoint", None)
    options = consolidator.Options(
        engine=engine,
        output=output,
        mode=settings.consolidator_mode,
        replay=local_address(replay) if replay else "",
        log_level=settings.log_level,
    )

    return keep_consolidator(options)


def local_address(endpoint: str) -> str:
    """Where to connect for what is bound at `endpoint`."""
    return endpoint.replace("*", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")


def _settings(vllm_config: Any) -> Settings:
    extra = _our_extra_config(vllm_config.kv_transfer_config) or {}
    return load_settings(process_environment(), extra_config=extra.get("kvbm")).settings


def _our_extra_config(transfer: Any) -> Mapping[str, Any] | None:
    """KVBM's own `kv_connector_extra_config`, where it is the connector, alone or as one of `PdConnector`'s or
    `MultiConnector`'s; None where it is not."""
    name, extra = (
        getattr(transfer, "kv_connector", None),
        getattr(transfer, "kv_connector_extra_config", None),
    )
    if name in ("PdConnector", "MultiConnector"):
        for each in (extra or {}).get("connectors") or ():
            if each.get("kv_connector") == CONNECTOR:
                return each.get("kv_connector_extra_config") or {}
    return extra or {} if name == CONNECTOR else None


def _reserve(settings: Settings) -> int:
    """The first port from the one that the settings name on that nobody has; this process keeps it for its engine."""
    first = settings.leader_pub_port + CONSOLIDATOR_PORT_OFFSET
    make_runtime_dir(settings.runtime_dir)
    ports = range(first, min(first + PORTS_MAX, PORT_MAX + 1))
    for port in ports:
        lock = open_lock(os.path.join(settings.runtime_dir, f"consolidator-{port}.lock"))
        with contextlib.suppress(OSError):  # another process has the port: the next one is tried
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
            _reserved.append(lock)
            return port
        os.close(lock)
    accepted = (
        f"a port whose {CONSOLIDATOR_PORT_OFFSET} higher one is free, or one of the {PORTS_MAX} from there on"
    )
    raise SettingsError("DYN_KVBM_LEADER_ZMQ_PUB_PORT", str(settings.leader_pub_port), accepted)
