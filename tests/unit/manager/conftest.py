"""Spaces over a tier that completes by hand, checked and closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rigs.space import Bench


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield build
    for bench in benches:
        bench.space.check()
        bench.close()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()
