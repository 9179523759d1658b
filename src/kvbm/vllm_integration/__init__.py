"""vLLM: the only package that imports it. Importing this package alone does not."""

from __future__ import annotations

from importlib import import_module

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector", "PdConnectorMetadata"]


def __getattr__(name: str) -> object:
    """The connectors by their short import path, imported on first use."""
    if name in __all__:
        from kvbm.vllm_integration import connector

        return getattr(connector, name)
    if name in ("dynamo_connector", "pd_connector"):  # modules, under the original's short paths
        return import_module(f"kvbm.vllm_integration.connector.{name}")
    raise AttributeError(f"module 'kvbm.vllm_integration' has no attribute {name!r}")
