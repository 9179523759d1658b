"""Stacks for tests under NVIDIA's Dynamo."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm.testing.tiny_model import make_model
from rigs.dynamo import Start, ask, prompts, starter


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "tiny", "float32")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    return starter(model, tmp_path)


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What one worker without KVBM answers to the first prompt of every seed that is used here."""
    with starter(model, tmp_path_factory.mktemp("reference"))("agg.sh", {"backend": 1}) as stack:
        return {seed: ask(stack, prompts(seed, 1)[0]) for seed in range(4)}
