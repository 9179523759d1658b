"""What differs where an engine's ranks, or its core, are actors of Ray: who is heard, and which variables arrive.

vLLM has two executors for Ray. The newer one, which 0.32 takes by itself, gives its ranks all variables of the
engine's core that the ranks' node has not set. The older one, and Ray as what starts data-parallel engines, carry over
variables by their prefixes, and ours is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "DYN_KVBM_"
PREFIXES_VARIABLE = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
NEWER_EXECUTOR = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def unheard_stages(vllm_config: Any) -> str:
    """Why not all ranks of this engine are heard, in one line; empty where they are.

    The older executor passes on what the last stage of a pipeline reports, and of the stages before nothing: no load
    and no store would ever be done on all ranks.
    """
    parallel = vllm_config.parallel_config
    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    if stages == 1 or not older_executor(parallel):
        return ""
    return (
        f"pipeline_parallel_size={stages} under vLLM's older Ray executor, which drops what the first stages "
        f"report; accepted is 1, or the newer executor ({NEWER_EXECUTOR}=1)"
    )


def lost_variables(vllm_config: Any, environment: Mapping[str, str]) -> str:
    """A warning, in one line, where variables of ours do not come to the ranks or did not come to this process.

    Settings in the connector's configuration come everywhere.
    """
    parallel = vllm_config.parallel_config
    carried = environment.get(PREFIXES_VARIABLE, "").split(",")
    if any(prefix.strip() and PREFIX.startswith(prefix.strip()) for prefix in carried):
        return ""
    ours = any(name.startswith(PREFIX) for name in environment)
    remedy = f"set {PREFIXES_VARIABLE}={PREFIX}, or set them where `ray start` runs"
    if older_executor(parallel) and ours:
        return f"vLLM's older Ray executor does not carry {PREFIX}* to the ranks: {remedy}"
    configured = (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("kvbm")
    if getattr(parallel, "data_parallel_backend", "mp") == "ray" and not ours and not configured:
        return f"data_parallel_backend=ray carried no {PREFIX}* to this engine: {remedy}"
    return ""


def older_executor(parallel: Any) -> bool:
    """Whether the ranks are under the older of the two executors."""
    backend = getattr(parallel, "distributed_executor_backend", None)
    if isinstance(backend, type):
        return any(base.__name__ == "RayDistributedExecutor" for base in backend.__mro__)
    if backend != "ray":
        return False
    from vllm import envs

    # Releases without the newer one do not know the variable.
    return not getattr(envs, NEWER_EXECUTOR, False)
