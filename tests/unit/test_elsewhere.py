"""Names of the original: those that mean something are here, the others say where to go."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from kvbm import utils
from kvbm.elsewhere import WAYS
from rigs.checkout import ROOT


@pytest.mark.parametrize("path", WAYS)
def test_a_name_that_is_not_here_names_the_way(path: str) -> None:
    package, _, name = path.rpartition(".")
    with pytest.raises(ImportError, match="NVIDIA's kvbm is not in this package") as refused:
        exec(f"from {package} import {name}")  # as others import it
    assert WAYS[path] in str(refused.value)
    assert refused.value.name == path
    assert "\n" not in str(refused.value)


def test_the_guide_lists_them_all() -> None:
    table = (ROOT / "docs" / "guides" / "from-dynamo.md").read_text()
    for path in WAYS:
        assert f"`{path}`" in table, path


def test_modules_of_the_original_without_a_meaning_are_in_the_list() -> None:
    refusing = {
        ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
        for file in (ROOT / "src" / "kvbm").rglob("*.py")
        if "refuse(__name__)" in file.read_text()
    }
    assert refusing == {path for path in WAYS if path.rpartition(".")[2].islower()}


def test_another_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(import_module("kvbm"), "KvbmFollower")


def test_annotate_changes_nothing_without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)

    def function() -> int:
        return 7

    assert utils.annotate(function) is function
    assert utils.annotate("a range", color="red")(function) is function
    assert utils.nvtx_annotate(function) is function
    assert utils.nvtx_annotate(category="copies")(function) is function


def test_annotate_is_that_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[dict[str, str]]()
    stand_in = SimpleNamespace(annotate=lambda **said: seen.append(said) or (lambda function: function))
    monkeypatch.setitem(sys.modules, "nvtx", stand_in)

    @utils.nvtx_annotate(category="copies")
    def function() -> None: ...

    name = f"{test_annotate_is_that_of_nvtx.__name__}.<locals>.function"
    assert seen == [{"message": name, "color": "green", "domain": "kvbm", "category": "copies"}]


@pytest.mark.parametrize(("said", "enabled"), [("", False), ("1", True), ("true", True), ("off", False)])
def test_whether_the_runtime_is_joined(monkeypatch: pytest.MonkeyPatch, said: str, enabled: bool) -> None:
    monkeypatch.setenv("DYN_RUNTIME_ENABLED_KVBM", said)
    assert utils.is_dyn_runtime_enabled() is enabled
