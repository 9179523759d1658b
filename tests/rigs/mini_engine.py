"""`examples/mini_engine.py` as a module, and prompts for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from rigs.checkout import ROOT

EXAMPLE = ROOT / "examples" / "mini_engine.py"


def by_path(path: Path) -> Any:
    """The example as a module, imported the way a benchmark does it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


mini = by_path(EXAMPLE)


def serve(engine: Any, prompts: list[list[int]], max_tokens: int = 20, batch: int = 4) -> list[list[int]]:
    """The tokens that an engine generates for each prompt."""
    requests = [mini.Request(prompt, max_tokens) for prompt in prompts]
    engine.serve(requests, batch)
    return [request.output for request in requests]


def numbers(seed: int, count: int) -> list[int]:
    """So many random tokens."""
    return torch.randint(3, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
