"""Names of the original's package that mean nothing here, and where what they were for is done.

Code that imports one of them gets an ImportError that says it in a line. The modules under the original's paths
contain nothing else.
"""

from __future__ import annotations

from typing import NoReturn

_ENGINES = "engines load kvbm.vllm_integration.connector.DynamoConnector, which starts or finds a manager"
_LIBRARY = "programs use kvbm.BlockManager (docs/guides/embedding.md)"
_TIERS = f"tiers belong to a manager process: {_ENGINES}; {_LIBRARY}"
_VLLM = f"this was a part of the original's connector: {_ENGINES}"

WAYS = {
    "kvbm.KvbmLeader": _TIERS,
    "kvbm.KvbmWorker": _TIERS,
    "kvbm._core": f"nothing is compiled here. {_LIBRARY[0].upper()}{_LIBRARY[1:]}; for BlockManagerClient take "
    "`kvbm status` and `kvbm reset`, or Dynamo's endpoint `controller` (docs/guides/from-dynamo.md)",
    "kvbm.vllm_integration.connector_leader": _VLLM,
    "kvbm.vllm_integration.connector_worker": _VLLM,
    "kvbm.vllm_integration.rust": f"nothing is compiled here. {_ENGINES[0].upper()}{_ENGINES[1:]}; {_LIBRARY}",
    "kvbm.vllm_integration.kv_cache_manager": f"vLLM's own manager is not replaced: {_ENGINES}",
    "kvbm.vllm_integration.kv_cache_utils": f"vLLM's own manager is not replaced: {_ENGINES}",
}


def refuse(path: str) -> NoReturn:
    """Raise the ImportError of a name in `WAYS`."""
    raise ImportError(f"{path} of NVIDIA's kvbm is not in this package: {WAYS[path]}", name=path)
