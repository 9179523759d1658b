"""vLLM's plug-in: makes the connectors known by name, in every process of vLLM.

Called by `openkvbm.entry`, the `vllm.general_plugins` entry point, once it knows whose files these are.
"""

from __future__ import annotations

CONNECTORS = ("DynamoConnector",)


def register() -> None:
    """Register the names with vLLM. General plugins are loaded several times in a process: a known name is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in CONNECTORS:
        try:
            KVConnectorFactory.register_connector(name, "kvbm.vllm_integration.connector", name)
        except ValueError:
            continue  # registered by an earlier load
