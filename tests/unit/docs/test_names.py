"""All names in the documents exist: variables, metrics, files, modules and their parts, commands and their flags."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.observe.metric_kinds import MetricKind
from kvbm.observe.metric_table import TABLE
from kvbm.policy import registry
from kvbm.policy.registry import PolicyRegistry
from kvbm.settings import FIELDS
from kvbm.settings.ineffective import INEFFECTIVE, OTHER_VARIABLES, REMOVED
from kvbm.settings.schema import FILE_VARIABLE, PREFIX
from rigs.checkout import ROOT
from rigs.command_tree import commands
from rigs.sources import SOURCES, assert_none, module_name, parse, python_files

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")

OTHERS_FLAGS = {
    "--enable-hierarchical-cache",
    "--enable-unified-cache-external-linker",
    "--hicache-ratio",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
    "--hicache-storage-prefetch-policy",
    "--unified-cache-external-linker-backend",
    "--unified-cache-external-linker-config",
    "--lora-paths",
    "--jit-monitor-mode",
    "--no-async-scheduling",
    "--kv-events-config",
    "--middleware",
    "--otlp-traces-endpoint",
    "--basetemp",
    "--help",
    "--version",
}
"""Flags of vLLM, SGLang and pytest, and those that every command has."""
OTHERS_FILES = ("vllm/", "dynamo/", "/", "kvbm.toml")
"""Beginnings of paths that are not in this checkout: others', and those of users."""
CODE_FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")

Finder = Callable[[str, Path], Iterator[str]]
"""(text of a document, its path) → the names in it that nothing has."""


# ---- what there is


MODULES: dict[str, ast.Module] = {module_name(path): parse(source) for path, source in SOURCES.items()}
"""The modules of the package by dotted name."""
TOOLS = python_files("benchmarks", "examples", "scripts")
"""The programs of the checkout beside the package."""


@functools.cache
def code() -> str:
    """Everything that is run or configures a run, as one text."""
    files = (*python_files(*CODE_FOLDERS), ROOT / "Makefile", ROOT / "pyproject.toml")
    return "\n".join(path.read_text() for path in files)


@functools.cache
def strings() -> set[str]:
    """Every string of the code that is one word, the flags that typer makes of the programs' arguments, and the
    groups of entry points."""
    trees = [parse(path.read_text()) for path in TOOLS]
    nodes = [node for tree in (*MODULES.values(), *trees) for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    flags = {f"--{node.arg.replace('_', '-')}" for node in nodes if isinstance(node, ast.arg)}
    groups = {
        value.entry_point_group for value in vars(registry).values() if isinstance(value, PolicyRegistry)
    }
    return {text for text in texts if " " not in text} | flags | groups


@functools.cache
def definitions(module: str) -> frozenset[str]:
    """The names that a module defines or imports at its top level, and lazily."""
    tree = MODULES[module]
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    found = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    if "__getattr__" in found:
        found |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value}
    return frozenset(found)


@functools.cache
def members() -> dict[str, set[str]]:
    """Classes of the package and what each has, with its bases of the package; equal names are taken together."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for tree in MODULES.values():
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            found = own.setdefault(owner.name, set())
            bases.setdefault(owner.name, set()).update(
                ast.unparse(base).split(".")[-1] for base in owner.bases
            )
            for node in ast.walk(owner):
                if isinstance(node, ast.FunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.AnnAssign | ast.Assign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    found |= {ast.unparse(target).split(".")[-1] for target in targets}

    def with_bases(name: str) -> set[str]:
        return own.get(name, set()).union(*(with_bases(base) for base in bases.get(name, ()) if base != name))

    return {name: with_bases(name) for name in own}


# ---- what a document names


def spans(text: str) -> list[str]:
    """Code within lines: what stands between single backticks."""
    return re.findall(
        r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def command_lines(text: str) -> list[str]:
    """The spans, and the lines of the blocks of code, where a line that ends in a backslash goes on."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return spans(text) + [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]


def unknown_variables(text: str, path: Path) -> Iterator[str]:
    """Environment variables that nothing reads."""
    known = {setting.variable for setting in FIELDS.values()} | {FILE_VARIABLE, *OTHER_VARIABLES}
    known |= {row.variable.rstrip("*") for row in INEFFECTIVE}
    if path.name == "settings.md":
        known |= {row.variable for row in REMOVED}
    begun = tuple(row.variable.rstrip("*") for row in INEFFECTIVE if row.variable.endswith("*"))
    for name in re.findall(r"\bDYN_(?:KVBM|MEMORY|RUNTIME|LOG|FATBIN)\w*", text):
        if name not in known and not name.startswith(begun) and not PREFIX.startswith(name):
            yield name
    for name in re.findall(r"`(KVBM_[A-Z_]+)\b", text):
        if not re.search(rf"\b{name}\b", code()):
            yield name


def unknown_metrics(text: str, path: Path) -> Iterator[str]:
    """Series that are in no table of metrics. Other words that begin so must be strings of the code."""
    known = {metric.name for metric in TABLE}
    known |= {
        f"{metric.name}_{part}"
        for metric in TABLE
        if metric.kind is MetricKind.HISTOGRAM
        for part in ("bucket", "sum", "count")
    }
    engine = (ROOT / "src/kvbm/vllm_integration/stats.py").read_text()
    for prefix, name in re.findall(r"`(vllm:)?(kvbm_[a-z0-9_]+)", text):
        if prefix:
            bare = name.removeprefix("kvbm_").removesuffix("_total")
            found = f'"{bare}"' in engine or f'"vllm:kvbm_{bare}"' in engine
        else:
            found = name in known or name in strings()
        if not found:
            yield prefix + name


def unknown_files(text: str, path: Path) -> Iterator[str]:
    """Files and folders that are not in the checkout; `{a,b}` and `*` stand for several."""
    for span in spans(text):
        if not re.fullmatch(r"[\w./*{},-]+(?:\.(?:py|md|toml)|/)", span) or span.startswith(OTHERS_FILES):
            continue
        for name in expanded(span):
            pattern, places = name.rstrip("/"), [ROOT, ROOT / "src", ROOT / "src/kvbm", path.parent]
            if "/" not in name and name.endswith(".py"):
                pattern, places = f"**/{name}", [ROOT / folder for folder in CODE_FOLDERS]
            if not any(next(place.glob(pattern), None) for place in places):
                yield name


def expanded(pattern: str) -> list[str]:
    """The names that braces stand for."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    ends = [pattern[: match.start()] + part.strip() + pattern[match.end() :] for part in match[1].split(",")]
    return [name for end in ends for name in expanded(end)]


def unknown_names(text: str, path: Path) -> Iterator[str]:
    """Dotted names: `kvbm.…`, `Class.member`, `module.Class` and `folder/module.Class`."""
    for span in spans(text):
        name = span.removesuffix("()")
        if re.fullmatch(r"kvbm(\.\w+)+", name):
            if not resolves(name) and name not in strings():
                yield name
        elif match := re.fullmatch(r"([A-Z]\w+)\.(\w+)", name):
            if match[1] in members() and match[2] not in members()[match[1]]:
                yield name
        elif match := re.fullmatch(r"([a-z_/]+)\.([A-Z]\w+)", name):
            stem = match[1].replace("/", ".")
            homes = [module for module in MODULES if f".{module}".endswith(f".{stem}")]
            if homes and not any(match[2] in definitions(module) for module in homes):
                yield name


def resolves(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    module, rest = name, []
    while module not in MODULES:
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    if not rest:
        return True
    return rest[0] in definitions(module) and (
        len(rest) == 1 or rest[0] not in members() or rest[1] in members()[rest[0]]
    )


def unknown_commands(text: str, path: Path) -> Iterator[str]:
    """Calls of `kvbm`, `make` and `python -m` that name a command, a flag, a target or a module that there is not."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in command_lines(text):
        if match := re.match(r"(?:\$ )?(?:DYN_\S+=\S+ )*kvbm ([a-z]+)\b(.*)", line):
            yield from unknown_parts(match[1], match[2].partition("#")[0].split())
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", line):
            if target not in targets:
                yield f"make {target}"
        for module in re.findall(r"\bpython3? -m ((?:kvbm|benchmarks)[\w.]*)", line):
            file = module.replace(".", "/")
            if not any((ROOT / f).exists() for f in (f"src/{file}.py", f"{file}.py", f"{file}/__main__.py")):
                yield f"python -m {module}"
    for flag in re.findall(r"`(--[a-z][a-z-]+)", text):
        known = {flag for flags in commands().values() for flag in flags}
        # argparse makes `--no-x` of a switch `--x`.
        if flag not in known | OTHERS_FLAGS and not {flag, flag.replace("--no-", "--", 1)} & strings():
            yield flag


def unknown_parts(name: str, words: list[str]) -> Iterator[str]:
    """The parts of one call that are not there: the command, a sub-command, a flag."""
    if name not in commands():
        yield f"kvbm {name}"
        return
    called = [name]
    if any(known.startswith(f"{name} ") for known in commands()) and words and not words[0].startswith("-"):
        called = [f"{name} {part}" for part in words[0].split("|")]
    for command in called:
        if command not in commands():
            yield f"kvbm {command}"
            continue
        for word in words:
            flag = word.partition("=")[0].strip("[]")
            if flag.startswith("--") and len(flag) > 2 and flag not in commands()[command]:
                yield f"kvbm {command} {flag}"


FINDERS: list[Finder] = [
    unknown_variables, unknown_metrics, unknown_files, unknown_names, unknown_commands,
]  # fmt: skip


OF_ANY_PAGE = (unknown_variables, unknown_files)
OTHERS_PAGES = [ROOT / "docs/guides/from-dynamo.md"]
"""Pages that name what another software has, and nothing has here."""


# ---- the documents


def documents() -> list[Path]:
    """The pages for readers; the list of changes names what once was."""
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    return pages + sorted((ROOT / "docs").rglob("*.md"))


def prose(tree: ast.Module) -> str:
    """The docstrings of a module, those of its constants too."""
    return "\n\n".join(
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@pytest.mark.parametrize("finder", FINDERS, ids=lambda finder: finder.__name__)
def test_what_the_pages_name_exists(finder: Finder) -> None:
    pages = [path for path in documents() if finder in OF_ANY_PAGE or path not in OTHERS_PAGES]
    assert_none([line for path in pages for line in missing(finder, path, path.read_text())])


@pytest.mark.parametrize("finder", FINDERS, ids=lambda finder: finder.__name__)
def test_what_the_docstrings_name_exists(finder: Finder) -> None:
    files = python_files("src", "tests/rigs")
    assert_none([line for path in files for line in missing(finder, path, prose(parse(path.read_text())))])


def missing(finder: Finder, path: Path, text: str) -> list[str]:
    """The names that are not there, each with the file that names it."""
    return [f"{path.relative_to(ROOT)}: {name}" for name in finder(text, path)]


@pytest.mark.parametrize(
    ("finder", "text", "name"),
    [
        (unknown_variables, "set DYN_KVBM_CPU_CACHE to 4", "DYN_KVBM_CPU_CACHE"),
        (unknown_variables, "`KVBM_NO_SUCH" + "_THING=1`", "KVBM_NO_SUCH" + "_THING"),
        (unknown_metrics, "`kvbm_evicted_blocks`", "kvbm_evicted_blocks"),
        (unknown_metrics, "`vllm:kvbm_lost_total`", "vllm:kvbm_lost_total"),
        (unknown_files, "`tiers/disk_medium.py`", "tiers/disk_medium.py"),
        (unknown_files, "`tiers/{host,tape}.py`", "tiers/tape.py"),
        (unknown_files, "`coordinator/`", "coordinator/"),
        (unknown_files, "`no_such_module.py`", "no_such_module.py"),
        (unknown_names, "`kvbm.testing.tape_contract`", "kvbm.testing.tape_contract"),
        (unknown_names, "`kvbm.Blocks`", "kvbm.Blocks"),
        (unknown_names, "`BlockManager.upload`", "BlockManager.upload"),
        (unknown_names, "`settings/schema.Row`", "settings/schema.Row"),
        (unknown_commands, "`kvbm statues`", "kvbm statues"),
        (unknown_commands, "`kvbm disk ls|wipe DIR`", "kvbm disk wipe"),
        (
            unknown_commands,
            "```\nkvbm manager \\\n  --host-memory 4GB --tape 1TB\n```",
            "kvbm manager --tape",
        ),
        (unknown_commands, "`make tests`", "make tests"),
        (unknown_commands, "`python -m kvbm.settings.page`", "python -m kvbm.settings.page"),
        (unknown_commands, "`--host-memories`", "--host-memories"),
    ],
)
def test_a_name_that_nothing_has_is_found(finder: Finder, text: str, name: str) -> None:
    assert list(finder(text, ROOT / "README.md")) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "`DYN_KVBM_CPU_CACHE_GB=4`, DYN_KVBM_…, DYN_KVBM_*, `DYN_KVBM_OBJECT_BUCKET`, `DYN_LOG`, `DYN_SYSTEM_PORT`",
        '`kvbm_transfer_seconds_bucket`, `kvbm_pool_blocks{state="filling"}`, `vllm:kvbm_unloaded_blocks_total`',
        "`tiers/{host,contract}.py`, `tests/unit/*/test_pool.py`, `policy/`, `protocol.py`, `vllm/v1/worker.py`",
        "`kvbm.BlockManager`, `kvbm.eviction_policies`, `Settings.host_on`, `VllmConfig.anything`",
        "`settings/schema.Settings`, `schema.Settings`, `request.Anything`",
        '`kvbm disk ls|verify|clear DIR`, `make test ARGS="-x"`, `kvbm manager --no-disk-persist --disk=4GB`',
        "```\nDYN_KVBM_CPU_CACHE_GB=20 kvbm config show --json  # all of it\n```",
    ],
)
def test_a_name_that_exists_is_not_reported(text: str) -> None:
    for finder in FINDERS:
        assert list(finder(text, ROOT / "README.md")) == []
