"""The module that `kv_connector_module_path` names: `kvbm.vllm_integration.connector`."""

from kvbm.vllm_integration.connector.dynamo_connector import DynamoConnector, DynamoConnectorMetadata
from kvbm.vllm_integration.plugin import register

# MultiConnector looks its children up by name when it rebuilds their statistics.
register()

__all__ = ["DynamoConnector", "DynamoConnectorMetadata"]
