"""vLLM's plug-in: makes the connector known by name, in every process of vLLM, and watches for ranks that load weights.

Called by `openkvbm.entry`, the `vllm.general_plugins` entry point, once it knows whose files these are.
"""

from __future__ import annotations

import logging

from kvbm.strict import record_swallowed
from kvbm.vllm_integration.versions import unsupported

log = logging.getLogger("kvbm.vllm")


def register() -> None:
    """Register the names with vLLM. General plugins are loaded several times in a process: a known name is no error.

    A vLLM that is too old for connectors may still serve without KVBM: one warning, and no error.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        log.warning("%s", unsupported(error))
        return
    for name in ("DynamoConnector", "PdConnector"):
        try:
            KVConnectorFactory.register_connector(name, "kvbm.vllm_integration.connector", name)
        except ValueError:
            pass  # registered by an earlier load
    try:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from kvbm.vllm_integration.weight_files import begin_before_loading

        begin_before_loading(WorkerWrapperBase)
    except Exception as error:  # vLLM may run without us, and its classes differ between releases
        record_swallowed(error)
        log.debug("weights are digested after they are loaded", exc_info=True)
