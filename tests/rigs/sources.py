"""The sources of the checkout, as the rules of style and of imports read them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from rigs.checkout import ROOT

Violations = Iterator[str]
Checker = Callable[[str, str], Violations]
"""(path relative to its root, source text) → what is wrong, one line each."""


parse = functools.cache(ast.parse)
"""Every check reads every file; a file is parsed once."""


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def python_files(*folders: str) -> list[Path]:
    """Every Python file below folders of the checkout."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def violations(checker: Checker, files: list[Path], root: Path) -> list[str]:
    """What a checker finds in files, named relative to `root`."""
    return [line for path in files for line in checker(path.relative_to(root).as_posix(), path.read_text())]


def assert_none(found: list[str]) -> None:
    """Fail with every violation, one a line."""
    assert not found, "\n".join(("", *found))


SOURCES = {path.relative_to(ROOT / "src").as_posix(): path.read_text() for path in python_files("src")}
"""File, relative to `src`, to its text."""


def module_name(path: str) -> str:
    """The dotted name of a file below `src`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, with_types: bool = False) -> Iterator[str]:
    """Dotted names that a source imports, at any depth; `from a import b` gives a and a.b.

    Imports that only a type checker sees are left out unless asked for.
    """
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not with_types:
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))
