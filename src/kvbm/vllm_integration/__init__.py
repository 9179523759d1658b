"""vLLM: the only package that imports it. Importing this package alone does not."""

from __future__ import annotations

__all__ = ["DynamoConnector", "DynamoConnectorMetadata"]


def __getattr__(name: str) -> object:
    """The connector by its short import path, imported on first use."""
    if name in __all__:
        from kvbm.vllm_integration import connector

        return getattr(connector, name)
    raise AttributeError(f"module 'kvbm.vllm_integration' has no attribute {name!r}")
