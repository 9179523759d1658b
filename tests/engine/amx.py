"""CPUs with AMX and without: vLLM packs bf16 KV otherwise on each, and caches prefixes of latent attention on one.

Tests ask `HAS_AMX`. `KVBM_TESTS_AMX=no` makes one kind of CPU into the other, for engines within one process: all of
vLLM asks torch, which then says no. The other way there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

_HIDDEN = os.environ.get("KVBM_TESTS_AMX") == "no"
HAS_AMX = not _HIDDEN and "amx_tile" in Path("/proc/cpuinfo").read_text()


def hide_if_asked() -> None:
    """In an engine's process, before an engine is started."""
    if _HIDDEN:
        import torch

        torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]
