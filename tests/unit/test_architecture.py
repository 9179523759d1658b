"""The drawing of the house holds: no import circle, and ARCHITECTURE.md names what there is."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import pytest

import kvbm
from kvbm.cli.main import COMMANDS
from rigs.checkout import ROOT
from rigs.sources import SOURCES, assert_none, module_name

Graph = dict[str, set[str]]
"""Each module or package, and those that it imports."""

CODE = ROOT / "src" / "kvbm"
PAGE = ROOT / "ARCHITECTURE.md"
needs_page = pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no ARCHITECTURE.md")


# ---- imports


def imported_modules(source: str, modules: Set[str]) -> Iterator[str]:
    """The modules among `modules` that a source imports, at any depth and for types too.

    `from a import b` is an import of `a.b` where that is a module, otherwise of `a`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & modules or {node.module} & modules


def module_graph(sources: dict[str, str]) -> Graph:
    """Which of these files imports which."""
    modules = {module_name(path): source for path, source in sources.items()}
    return {name: {*imported_modules(source, modules.keys())} - {name} for name, source in modules.items()}


def package_graph(modules: Graph, depth: int) -> Graph:
    """The same among packages: every name is cut to its first parts. The root package stands for no part."""
    packages: Graph = {}
    for name, imported in modules.items():
        cut = {".".join(other.split(".")[:depth]) for other in imported if "." in other}
        packages.setdefault(".".join(name.split(".")[:depth]), set()).update(cut)
    return {name: imported - {name} for name, imported in packages.items()}


def circle(graph: Graph) -> list[str]:
    """One import circle, from a name back to that name; empty where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [*reversed(error.args[1])]
    return []


MODULES = module_graph(SOURCES)


def test_no_module_is_imported_by_what_it_imports() -> None:
    assert_none(circle(MODULES))


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_package_is_imported_by_what_it_imports(depth: int) -> None:
    assert_none(circle(package_graph(MODULES, depth)))


CIRCLE = {
    "kvbm/manager/space.py": "from kvbm.manager import pool\n",
    "kvbm/manager/pool.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvbm.manager.leases\n",
    "kvbm/manager/leases.py": "def lease() -> None:\n    from kvbm.manager.space import Space\n",
    "kvbm/manager/__init__.py": "",
}


def test_a_circle_is_found() -> None:
    """Through an import for types, and one in a function."""
    found = circle(module_graph(CIRCLE))
    assert sorted(set(found)) == ["kvbm.manager.leases", "kvbm.manager.pool", "kvbm.manager.space"]
    assert found[0] == found[-1]


def test_a_circle_of_packages_is_found() -> None:
    sources = {
        "kvbm/sim/replay/tier.py": "",
        "kvbm/sim/replay/replay.py": "from kvbm.sim.serving.engine import serve\n",
        "kvbm/sim/serving/engine.py": "from kvbm.sim.replay import tier\n",
    }
    modules = module_graph(sources)
    assert circle(modules) == []
    assert circle(package_graph(modules, 2)) == []
    assert sorted(set(circle(package_graph(modules, 3)))) == ["kvbm.sim.replay", "kvbm.sim.serving"]


# ---- ARCHITECTURE.md


def table(page: str, heading: str) -> list[tuple[str, str]]:
    """The rows of the first table below a heading."""
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(where.strip(), what.strip()) for where, what in rows[2:]]


def quoted(cell: str) -> list[str]:
    """The texts in code quotes."""
    return re.findall(r"`([^`]+)`", cell)


def exists(name: str, homes: Iterable[Path] = (CODE,)) -> bool:
    """Whether a quoted name is a path, a module, a command or a make target that is there."""
    word, _, rest = name.partition(" ")
    if word == "make":
        return f"\n{rest}:" in (ROOT / "Makefile").read_text()
    if word == "kvbm":
        return rest.split(" ")[0] in {"", *COMMANDS}
    if word.startswith("kvbm."):
        dotted = word.partition(".")[2]
        return dotted in kvbm.__all__ or is_module(CODE / dotted.replace(".", "/"))
    if "/" in word or "." in word:
        return any(folder.joinpath(word).exists() for folder in (ROOT, CODE, *homes))
    return any(path.stem == word for home in homes for path in (home, *home.rglob("*")))


def is_module(path: Path) -> bool:
    """Whether a package or a module has this path, which has no suffix."""
    return path.is_dir() or path.with_suffix(".py").is_file()


def absent(page: str) -> Iterator[str]:
    """Names in the two tables of the page that stand for nothing."""
    for where, what in table(page, "Packages"):
        homes = [folder / name.strip("/") for name in quoted(where) for folder in (CODE, CODE.parent)]
        yield from (f"Packages: {name}" for name in quoted(where) if not is_home(name))
        yield from (f"Packages, {where}: {name}" for name in quoted(what) if not exists(name, homes))
    for what, where in table(page, "Where does a change go?"):
        yield from (f"{what}: {name}" for name in quoted(where) if not exists(name))


def is_home(name: str) -> bool:
    """Whether a name of the first column is a package with a slash, or a module without one."""
    for folder in (CODE, CODE.parent):
        path = folder / name.strip("/")
        if path.is_dir() if name.endswith("/") else path.with_suffix(".py").is_file():
            return True
    return False


def unnamed(page: str, code: Path = CODE) -> Iterator[str]:
    """Modules and packages of the first level that have no row, and packages below that are not named in theirs."""
    rows = {
        name.strip("/"): f"{where} {what}"
        for where, what in table(page, "Packages")
        for name in quoted(where)
    }
    for path in sorted(code.iterdir()):
        if path.stem not in rows and (path.suffix == ".py" or path.is_dir()) and path.name[0] != "_":
            yield path.name
    for init in sorted(code.rglob("*/*/__init__.py")):
        package = init.parent.relative_to(code)
        words = {part for name in quoted(rows.get(package.parts[0], "")) for part in name.split("/")}
        if package.name not in words:
            yield package.as_posix()


@needs_page
def test_everything_that_the_map_names_is_there() -> None:
    assert_none([*absent(PAGE.read_text())])


@needs_page
def test_every_package_is_on_the_map() -> None:
    assert_none([*unnamed(PAGE.read_text())])


DRAWN = """
## Packages

| where | what |
| --- | --- |
| `manager/` `tiers/` | `pool`, `nixl/agent.py`, `nothing_of_that_name` |
| `absent/` `policy` | |

## Where does a change go?

| to change | open |
| --- | --- |
| a | `policy/`, `policy/absent.py`, `kvbm.testing.oracle`, `kvbm.testing.absent` |
| b | `kvbm simulate`, `kvbm absent`, `make demo`, `make absent` |
"""


@needs_page
def test_names_that_stand_for_nothing_are_found() -> None:
    assert [line.rpartition(": ")[2] for line in absent(DRAWN)] == [
        "nothing_of_that_name",
        "absent/",
        "policy",
        "policy/absent.py",
        "kvbm.testing.absent",
        "kvbm absent",
        "make absent",
    ]


def test_what_is_not_on_the_map_is_found() -> None:
    missing = [*unnamed(DRAWN)]
    assert {"leader", "block.py", "tiers/disk", "sim/traces/formats"} <= {*missing}
    assert not {"manager", "tiers", "policy", "tiers/nixl", "__init__.py"} & {*missing}
