"""The images: what they install is all that the settings of a manager can lead to."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rigs.checkout import PROJECT, ROOT

DEPLOY = ROOT / "deploy"
pytestmark = pytest.mark.skipif(not DEPLOY.exists(), reason="a source distribution has no images")

IMAGES = ("kubernetes/Dockerfile", "compose/Dockerfile", "compose/Dockerfile.dynamo")
BY_SETTINGS = ("tiers/remote", "fleet")
"""Packages of ours that import others' packages once a setting asks for it: a store, certificates, etcd."""
LEFT_OUT = {"mooncake"}
"""Its packages are of one CUDA or none, and it has no passwords: whoever runs it makes an image of it."""


def installed(image: str) -> set[str]:
    """The distributions that the Dockerfile's line installs, in the names of pyproject.toml."""
    found = re.findall(
        r'^RUN pip install .*"?/opt/kvbm(?:\[([a-z,-]*)\])?"?$', (DEPLOY / image).read_text(), re.MULTILINE
    )
    assert len(found) == 1, f"{image} installs KVBM by one line"
    named = set(map(distribution, PROJECT["dependencies"]))
    waiting = [extra for extra in found[0].split(",") if extra]
    while waiting:
        for requirement in PROJECT["optional-dependencies"][waiting.pop()]:
            if requirement.startswith("openkvbm["):
                waiting += requirement[len("openkvbm[") : -1].split(",")
            else:
                named.add(distribution(requirement))
    return named


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower()


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Modules of others that our files there import at any time, each with the file."""
    for path in sorted((ROOT / "src" / "kvbm" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif _asks_for_a_package(node):
                assert isinstance(node, ast.Call) and isinstance(node.args[0], ast.Constant)
                names = [str(node.args[0].value)]
            else:
                continue
            for name in names:
                top = name.partition(".")[0]
                if top != "kvbm" and top not in sys.stdlib_module_names:
                    yield top, path.name


def _asks_for_a_package(node: ast.AST) -> bool:
    """A call of `import_module` or of our own word for it, with a name that is written there."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called in ("import_module", "_require_package")


@pytest.mark.slow
def test_the_rig_sees_what_is_imported_lazily() -> None:
    seen = {module for folder in BY_SETTINGS for module, _ in imported(folder)}
    assert {"obstore", "valkey", "cryptography", "etcd3gw", "botocore"} <= seen


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_a_setting_can_name_is_installed(image: str) -> None:
    there, owners = installed(image), packages_distributions()
    for folder in BY_SETTINGS:
        for module, file in imported(folder):
            if module in LEFT_OUT:
                continue
            of_module = {each.lower() for each in owners.get(module, [module])}
            assert of_module & there, f"{folder}/{file} imports {module}, which {image} does not install"


def test_every_image_is_looked_at() -> None:
    found = {str(Path(path).relative_to(DEPLOY)) for path in DEPLOY.rglob("Dockerfile*")}
    assert found == set(IMAGES)
