"""Engines for tests under SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.testing.tiny_model import make_model
from rigs.sglang.engine_process import Nursery
from rigs.sglang.keepers import Files, Manager, keeper
from rigs.sglang.scenarios import Stage

Keep = Callable[..., Any]


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "nursery.log")
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny", "float32")


@pytest.fixture
def stage(nursery: Nursery, model: Path, tmp_path: Path) -> Stage:
    return Stage(nursery, model, tmp_path)


@pytest.fixture(scope="session")
def reference(nursery: Nursery, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an engine with its device pool alone answers."""
    return Stage(nursery, model, tmp_path_factory.mktemp("reference")).reference()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Makes a keeper of KV, by the way to it."""
    made: list[Files | Manager] = []

    def make(way: str, **options: Any) -> Files | Manager:
        made.append(keeper(way, tmp_path / f"{way}-{len(made)}", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
