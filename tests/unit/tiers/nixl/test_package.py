"""NIXL comes for CUDA 12 or for CUDA 13: the one that fits torch is taken, and asked for where it is missing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.tiers.disk.block_io import DirectRefused
from kvbm.tiers.nixl.package import PACKAGES, cuda_of_torch, import_nixl, install_hint
from rigs.checkout import PROJECT

Distribution = Callable[..., None]

TORCH_2_9 = "nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'"
TORCH_2_11 = "nvidia-cudnn-cu13==9.19.0.56; platform_system == 'Linux'"


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """Installs metadata, found before those of this environment."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, version: str, *requires: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")

    return add


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs packages of NIXL's names; none are found otherwise."""
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name: str, text: str = "") -> None:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)

    yield add
    for name in PACKAGES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("version", "requires", "cuda"),
    [
        ("2.9.0", ["filelock", TORCH_2_9], 12),
        ("2.11.0", ["filelock", "cuda-bindings<14,>=13.0.3", TORCH_2_11], 13),
        ("2.13.0+cu130", [], 13),
        ("2.13.0+cu128", [TORCH_2_11], 12),
        ("2.13.0+cpu", [], 0),
        ("2.13.0+cpu", [TORCH_2_11], 13),
        ("2.3.0+cu118", [], 0),
        ("2.3.0", ["nvidia-cuda-runtime-cu11==11.8.89"], 0),
    ],
)
def test_torch_says_for_which_cuda_it_is(
    distribution: Distribution, version: str, requires: list[str], cuda: int
) -> None:
    distribution("torch", version, *requires)
    assert cuda_of_torch() == cuda


@pytest.mark.parametrize(
    ("name", "version", "cuda"),
    [
        ("nvidia-cuda-runtime", "13.0.96", 13),
        ("nvidia-cuda-runtime", "14.0.1", 0),
        ("nvidia-cuda-runtime-cu12", "12.8.90", 12),
    ],
)
def test_else_the_runtime_beside_it_does(
    distribution: Distribution, name: str, version: str, cuda: int
) -> None:
    distribution("torch", "2.9.0a0+nv25.10")
    distribution(name, version)
    assert cuda_of_torch() == cuda


def test_the_hint_names_the_extra_that_fits(distribution: Distribution, package: Callable[..., None]) -> None:
    with pytest.raises(DirectRefused, match=r"'openkvbm\[nixl-cu12\]' for CUDA 12, 'openkvbm\[nixl-cu13\]'"):
        import_nixl()
    distribution("torch", "2.11.0", TORCH_2_11)
    with pytest.raises(DirectRefused) as caught:
        import_nixl()
    assert str(caught.value) == "NIXL is not installed; pip install 'openkvbm[nixl-cu13]'"


def test_every_hint_names_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    for cuda in (12, 13):
        assert install_hint(cuda) == f"pip install 'openkvbm[nixl-cu{cuda}]'"
        assert [line.partition(">")[0] for line in extras[f"nixl-cu{cuda}"]] == [f"nixl-cu{cuda}"]
        assert f"nixl_cu{cuda}" in PACKAGES


@pytest.mark.parametrize(("requirement", "name"), [(TORCH_2_9, "nixl_cu12"), (TORCH_2_11, "nixl_cu13")])
def test_of_two_the_one_that_fits_is_taken(
    distribution: Distribution,
    package: Callable[..., None],
    requirement: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    distribution("torch", "2.11.0", requirement)
    for each in PACKAGES:
        package(each)
    assert import_nixl().__name__ == name
    assert caplog.records == []


def test_one_that_does_not_fit_is_taken_with_a_warning(
    distribution: Distribution, package: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    distribution("torch", "2.11.0", TORCH_2_11)
    package("nixl_cu12")
    assert import_nixl().__name__ == "nixl_cu12"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not for CUDA 13" in caplog.text
    assert "openkvbm[nixl-cu13]" in caplog.text


def test_one_that_cannot_be_imported_is_passed_over(package: Callable[..., None]) -> None:
    package("nixl_cu13", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    with pytest.raises(DirectRefused, match=r"^nixl_cu13 cannot be imported \(libcudart\.so\.13"):
        import_nixl()
    package("nixl_cu12")
    assert import_nixl().__name__ == "nixl_cu12"


def test_what_it_needs_and_does_not_find_is_named(package: Callable[..., None]) -> None:
    package("nixl_cu13", "import no_such_package")
    with pytest.raises(DirectRefused, match="no_such_package"):
        import_nixl()
