"""vLLM's CPU platform for Ray's executors; see `ray_nodes`."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuUnderRay(CpuPlatform):
    """The CPU's, and what Ray counts its devices by."""

    ray_device_key: str = "GPU"
