"""The two base classes of TensorRT-LLM's connector interface, wherever this release has them, and its version."""

from __future__ import annotations

import tensorrt_llm

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ModuleNotFoundError:  # its path before the interface had a folder
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

__all__ = ["RELEASE", "KvCacheConnectorScheduler", "KvCacheConnectorWorker"]

RELEASE = str(getattr(tensorrt_llm, "__version__", "of no version"))
