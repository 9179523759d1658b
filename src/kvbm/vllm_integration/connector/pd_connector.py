"""`PdConnector`: a cache and NIXL in one engine, for prefill and decode apart, in the original's configuration.

vLLM's own `MultiConnector` does the work: the first connector that has tokens of a request loads them, all of them
store, and what NIXL says of a finished request goes to the other side. Here is only what the original promises beside
that: the first connector is a cache, the second one is NIXL.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)

CACHES = ("DynamoConnector", "LMCacheConnectorV1", "FlexKVConnectorV1")
TRANSPORTS = ("NixlConnector",)

PdConnectorMetadata = MultiKVConnectorMetadata
"""Under the original's name."""


class PdConnector(MultiConnector):
    """See the module. `kv_connector_extra_config.connectors` has two entries, each a `KVTransferConfig`.

    Raises ValueError for another number of them, TypeError for another kind of connector.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_connectors(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        super().__init__(vllm_config, role, kv_cache_config)


def check_connectors(extra_config: dict[str, Any]) -> None:
    """Whether these are a cache and NIXL, in this order. Raises as `PdConnector`."""
    names = [str(each.get("kv_connector")) for each in extra_config.get("connectors") or ()]
    if len(names) != 2:
        raise ValueError(
            f"PdConnector: connectors={names} cannot be used: two are needed, one of {', '.join(CACHES)}, then "
            f"{TRANSPORTS[0]}"
        )
    for which, name, accepted in zip(("first", "second"), names, (CACHES, TRANSPORTS), strict=True):
        if name not in accepted:
            raise TypeError(
                f"PdConnector: the {which} connector {name!r} cannot be used: {' or '.join(accepted)}"
            )
