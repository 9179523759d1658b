"""CPUs with AMX and without: vLLM packs bf16 KV otherwise on each, and caches prefixes of latent attention on one. KV
in 8 bits it has on those with AMX or AVX-512 alone.

Tests ask `HAS_AMX` and `HAS_FP8_KV`. `KVBM_TESTS_AMX=no` makes one kind of CPU into the other, for engines within one
process: all of vLLM asks torch, which then says no. The other way there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

_HIDDEN = os.environ.get("KVBM_TESTS_AMX") == "no"
_FLAGS = Path("/proc/cpuinfo").read_text().split()
HAS_AMX = not _HIDDEN and "amx_tile" in _FLAGS
HAS_FP8_KV = HAS_AMX or "avx512f" in _FLAGS


def hide_if_asked() -> None:
    """In an engine's process, before an engine is started."""
    if _HIDDEN:
        import torch

        torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]
