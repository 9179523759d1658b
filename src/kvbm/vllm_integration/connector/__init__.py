"""The module that `kv_connector_module_path` names: `kvbm.vllm_integration.connector`."""

from kvbm.vllm_integration.plugin import register
from kvbm.vllm_integration.versions import refuse_old, unsupported

refuse_old()
try:
    from kvbm.vllm_integration.connector.dynamo_connector import DynamoConnector, DynamoConnectorMetadata
    from kvbm.vllm_integration.connector.pd_connector import PdConnector, PdConnectorMetadata
except ImportError as error:
    if (error.name or "").partition(".")[0] != "vllm":
        raise
    raise unsupported(error) from None

# MultiConnector looks its children up by name when it rebuilds their statistics.
register()

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector", "PdConnectorMetadata"]
