"""Leaders with the manager that answers them, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rigs.leader import Bench


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**modes: Any) -> Bench:
        benches.append(Bench(**modes))
        return benches[-1]

    yield make
    for bench in benches:
        bench.leader.close()
        bench.manager.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
