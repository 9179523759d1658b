"""Managers on real sockets and ranks attached to them, closed in the right order at the end of each test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbm.layout import BlockLayout
from rigs.admin import Node
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.manager import ManagerBench

if TYPE_CHECKING:
    from rigs.libcuda.library import Libcuda
    from rigs.libcuda.torch_cuda import TorchCuda
    from rigs.mover import Rank


def no_defects(caplog: pytest.LogCaptureFixture) -> None:
    """What our code survives though it should not happen, it logs as an error."""
    records = caplog.get_records("setup") + caplog.get_records("call")
    assert [record.getMessage() for record in records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def media() -> Iterator[list[FakeMedium]]:
    """Closed after the managers that use them."""
    media: list[FakeMedium] = []
    yield media
    for medium in media:
        medium.close()


@pytest.fixture
def below(media: list[FakeMedium], monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    """What a manager opens when it opens its disk tier. It completes by hand."""
    media.append(FakeMedium(BlockLayout(block_tokens=4, shard_bytes=4096), 40))
    tier = FakeTier(media[0], pending_limit=40)
    monkeypatch.setattr("kvbm.manager.assembly.open_disk_tier", lambda *args, **options: tier)
    return tier


@pytest.fixture
def make_manager(tmp_path: Path, media: list[FakeMedium]) -> Iterator[Callable[..., ManagerBench]]:
    """Makes managers; their law is checked at the end."""
    benches: list[ManagerBench] = []

    def make(namespaces: int = 1, **options: Any) -> ManagerBench:
        directory = tmp_path / str(len(benches))
        directory.mkdir()
        benches.append(ManagerBench(directory, namespaces, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.check()
        bench.close()


@pytest.fixture
def manager(
    make_manager: Callable[..., ManagerBench], caplog: pytest.LogCaptureFixture
) -> Iterator[ManagerBench]:
    """A manager that must not meet a defect of its own."""
    yield make_manager()
    no_defects(caplog)


@pytest.fixture
def make_rank(tmp_path: Path, media: list[FakeMedium]) -> Iterator[Callable[..., Rank]]:
    """Makes ranks that are attached and serve."""
    from rigs.mover import Rank

    ranks: list[Rank] = []

    def make(**settings: Any) -> Rank:
        ranks.append(Rank(tmp_path, **settings))
        ranks[-1].attach()
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


@pytest.fixture
def rank(make_rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> Iterator[Rank]:
    """A rank whose mover must not meet a defect of its own."""
    yield make_rank()
    no_defects(caplog)


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Runtime directories for managers that are processes of the command."""
    nodes: list[Node] = []

    def make(**settings: object) -> Node:
        nodes.append(Node(tmp_path, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture(scope="session")
def libcuda_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the CUDA driver, compiled once in a session: that takes a second."""
    from rigs.libcuda import build

    if reason := build.missing_reason():
        pytest.skip(reason)
    return build.build_library(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def torch_cuda(libcuda_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchCuda]:
    """A CUDA device without a card, under the real `CudaDriver` and `TorchDevice`; it must have no violations."""
    from rigs.libcuda.library import Libcuda
    from rigs.libcuda.torch_cuda import TorchCuda, make_replacements

    cuda = TorchCuda(Libcuda(libcuda_path))
    for name, value in make_replacements(cuda).items():
        monkeypatch.setattr(name, value)
    yield cuda
    violations = cuda.libcuda.violations
    cuda.libcuda.reset()
    assert violations == []


@pytest.fixture
def libcuda(torch_cuda: TorchCuda) -> Libcuda:
    """The driver of that device."""
    return torch_cuda.libcuda
