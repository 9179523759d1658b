"""The module that `kv_connector_config` names: `kvbm.trtllm_integration.connector`."""

from kvbm.trtllm_integration.versions import absent

try:
    from kvbm.trtllm_integration.dynamo_connector import DynamoKVBMConnectorLeader, DynamoKVBMConnectorWorker
except ImportError as error:
    if (error.name or "").partition(".")[0] != "tensorrt_llm":
        raise
    raise absent(error) from None

__all__ = ["DynamoKVBMConnectorLeader", "DynamoKVBMConnectorWorker"]
