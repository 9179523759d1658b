"""The project's rules of style, as tests. Each check is a plain function, and each is shown to find what it forbids."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

from rigs.checkout import ROOT
from rigs.sources import Checker, Violations, assert_none, functions, parse, python_files, violations

CODE_FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples")

FILE_LINES_MAX = 420
FUNCTION_LINES_MAX = {"src": 70, "scripts": 70, "benchmarks": 70, "examples": 70, "tests": 90}
DECISION_WORDS_MAX = 150
DRAWER_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
NAMED_BY_OTHERS = ("kvbm/utils.py",)
"""Import paths of the original that code outside uses."""
TALKING_PACKAGES = ("kvbm/cli/", "kvbm/demo/")
"""Where printing is the job."""
VARIABLE_PACKAGES = ("kvbm/settings/", "kvbm/cli/", "kvbm/demo/", "kvbm/vllm_integration/")
"""Where users' variables are spelled out."""
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
OTHER_WORDS = {
    "swap": "offload or onboard",
    "spill": "offload",
    "demote": "offload",
    "promote": "onboard",
    "coordinator": "manager",
    "evictee": "victim",
    "pincount": "lease",
}
"""Words that would say a second time what the design's words say."""
SLEEPS = {
    "tests/rigs/faulty_blobs.py": "a slow store is one of the faults that it injects",
    "tests/rigs/manager_probe.py": "looks at other processes, which signal nothing to a test, again and again",
    "tests/engine/engine_child.py": "the pace of an engine that has nothing to do",
    "tests/engine/engine_process.py": "a process that hangs gets time to write its stack",
    "tests/engine/handover.py": "the pace of an engine whose blocks are under way",
    "tests/engine/reach.py": "a slow copy is the fault that the test is about",
    "tests/process/test_finder.py": "the finder gets the sleep that engines give it",
    "tests/process/test_manager.py": "the finder gets the sleep that engines give it",
}
"""Tests that may sleep, and why."""
VAGUE_PARAMETERS = {"idx": "…_index", "num": "…_count", "sz": "…_bytes", "tmp": "a name"}


def long_files(path: str, source: str) -> Violations:
    """Files longer than a reader keeps in mind."""
    count = source.count("\n")
    if count > FILE_LINES_MAX:
        yield f"{path}: {count} lines, at most {FILE_LINES_MAX}"


def long_functions(path: str, source: str) -> Violations:
    """Functions longer than a screen."""
    limit = FUNCTION_LINES_MAX.get(path.split("/")[0], 70)
    for function in functions(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > limit:
            yield f"{path}:{function.lineno}: {function.name} has {lines} lines, at most {limit}"


def long_decisions(path: str, source: str) -> Violations:
    """Decisions that say more than what was decided, why, and what it costs."""
    words = [word for word in source.split() if any(letter.isalnum() for letter in word)]
    if len(words) > DECISION_WORDS_MAX:
        yield f"{path}: {len(words)} words, at most {DECISION_WORDS_MAX}"


def drawer_modules(path: str, source: str) -> Violations:
    """Modules named for what does not fit elsewhere."""
    for part in Path(path).with_suffix("").parts:
        if part in DRAWER_NAMES and path not in NAMED_BY_OTHERS:
            yield f"{path}: '{part}' says nothing; name it for what is in it"


def missing_docstrings(path: str, source: str) -> Violations:
    """Public modules, classes and functions without a docstring; for methods see `undocumented_methods`."""
    tree = parse(source)
    if source.strip() and ast.get_docstring(tree) is None:
        yield f"{path}: no module docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            if ast.get_docstring(node) is None:
                yield f"{path}:{node.lineno}: {node.name} has no docstring"
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Contract"):
                yield from undocumented_methods(path, node)


def undocumented_methods(path: str, owner: ast.ClassDef) -> Violations:
    """Public methods that explain themselves nowhere.

    A method of one statement is its own explanation, and one that an interface of ours documents, or that a
    derived class overrides, is explained there.
    """
    explained = interface_methods() if not owner.bases or is_interface(owner) else None
    for node in owner.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name[0] == "_":
            continue
        if ast.get_docstring(node) is not None or explained is None or node.name in explained:
            continue
        if len(node.body) > 1 or is_interface(owner):
            yield f"{path}:{node.lineno}: {owner.name}.{node.name} has no docstring"


def is_interface(owner: ast.ClassDef) -> bool:
    """Whether a class is a protocol or an abstract class."""
    return any(ast.unparse(base).split(".")[-1] in {"Protocol", "ABC"} for base in owner.bases)


@functools.cache
def interface_methods() -> frozenset[str]:
    """Names of the methods that the package's protocols and abstract classes document."""
    return frozenset(
        method.name
        for path in python_files("src")
        for owner in ast.walk(parse(path.read_text()))
        if isinstance(owner, ast.ClassDef) and is_interface(owner)
        for method in owner.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    )


def unfinished_marks(path: str, source: str) -> Violations:
    """Marks of unfinished work."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b", line):
            yield f"{path}:{number}: {line.strip()}"


def prints(path: str, source: str) -> Violations:
    """Printing outside the packages that talk to a person, and outside a process's own `main`."""
    if path.startswith(TALKING_PACKAGES):
        return
    for statement in parse(source).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "main":
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{path}:{node.lineno}: print; use a logger"


def environment_reads(path: str, source: str) -> Violations:
    """The process environment outside `settings`, which has `process_environment()` for those who pass it on."""
    if path.startswith("kvbm/settings/"):
        return
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"}:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for name in {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}:
                yield f"{path}:{node.lineno}: from os import {name}"


def variable_names(path: str, source: str) -> Violations:
    """Environment variables in words of the code: `kvbm.settings.variable` knows them, and a caller of the library set
    something else. Docstrings may name them."""
    if path.startswith(VARIABLE_PACKAGES):
        return
    tree = parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for name in re.findall(r"DYN_KVBM_\w+", node.value):
                yield f"{path}:{node.lineno}: {name}"


def unpickling(path: str, source: str) -> Violations:
    """Modules that can run code hidden in data."""
    for node in ast.walk(parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            if name.split(".")[0] in UNPICKLERS:
                yield f"{path}:{node.lineno}: {name}"


def maybe_booleans(path: str, source: str) -> Violations:
    """Functions that answer `bool | None`: an enum says what the third case is. Engines fix their own signatures."""
    if "_integration/" in path:
        return
    for function in functions(source):
        answer = ast.unparse(function.returns).replace(" ", "") if function.returns else ""
        if answer in {"bool|None", "None|bool", "Optional[bool]"}:
            yield f"{path}:{function.lineno}: {function.name} -> {answer}"


def other_words(path: str, source: str) -> Violations:
    """Names of classes, functions and parameters that leave the design's vocabulary, or say nothing."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for word in re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", node.name).lower()):
                if word in OTHER_WORDS:
                    yield f"{path}:{node.lineno}: '{node.name}': the word is {OTHER_WORDS[word]}"
        if isinstance(node, ast.arg) and node.arg in VAGUE_PARAMETERS:
            yield f"{path}:{node.lineno}: parameter '{node.arg}': say {VAGUE_PARAMETERS[node.arg]}"


def machine_paths(path: str, source: str) -> Violations:
    """Paths of one person's machine, and hosts of package registries."""
    folders = "|".join(("root", "home", "Users", "wo" + "rk", "fa" + "rm", "opt/wheels", "opt/pypi"))
    hosts = "|".join(re.escape(".".join(parts)) for parts in (
        ("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"), ("npmjs", "org"),
        ("deb", "debian", "org"),
    ))  # fmt: skip
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(rf"(?<![\w.}}])/(?:{folders})/\w|{hosts}", line):
            yield f"{path}:{number}: {line.strip()[:100]}"


def sleeps(path: str, source: str) -> Violations:
    """Sleeping where a gate or a clock of the test's own could stand."""
    for node in ast.walk(parse(source)):
        if path not in SLEEPS and isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep":
            yield f"{path}:{node.lineno}: time.sleep; use a gate or ManualClock, or name the file in SLEEPS"
        if isinstance(node, ast.ImportFrom) and node.module == "time" and node.names[0].name == "sleep":
            yield f"{path}:{node.lineno}: from time import sleep; write time.sleep"


LIBRARY_CHECKS: list[Checker] = [
    drawer_modules, missing_docstrings, unfinished_marks, prints, environment_reads, variable_names, unpickling,
    maybe_booleans, other_words,
]  # fmt: skip


@pytest.mark.parametrize("checker", LIBRARY_CHECKS, ids=lambda checker: checker.__name__)
def test_the_library_has_no(checker: Checker) -> None:
    assert_none(violations(checker, python_files("src"), ROOT / "src"))


@pytest.mark.parametrize("checker", [long_files, long_functions], ids=lambda checker: checker.__name__)
def test_the_checkout_has_no(checker: Checker) -> None:
    assert_none(violations(checker, python_files(*CODE_FOLDERS), ROOT))


def test_each_decision_has_its_number() -> None:
    found = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    assert [path.name[:4] for path in found] == [f"{number:04}" for number in range(1, len(found) + 1)]
    assert [path.read_text()[:7] for path in found] == [f"# {path.name[:4]} " for path in found]


def test_decisions_are_short() -> None:
    assert_none(violations(long_decisions, sorted((ROOT / "docs/decisions").glob("*.md")), ROOT))


def test_no_test_sleeps() -> None:
    assert_none(violations(sleeps, python_files("tests"), ROOT))


def test_every_file_that_may_sleep_does() -> None:
    idle = [path for path in SLEEPS if "time.sleep" not in (ROOT / path).read_text()]
    assert_none([f"{path} sleeps no more: take it out of SLEEPS" for path in idle])


def files_of_the_checkout() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    texts = {".py", ".md", ".toml", ".cfg", ".ini", ".yml", ".yaml", ".json", ".sh", ".html", ".txt", ""}
    files = [f for f in files_of_the_checkout() if f.suffix in texts and f.is_file()]
    assert_none(violations(machine_paths, files, ROOT))


def test_no_file_is_a_link() -> None:
    """A link holds a path of the machine it was made on."""
    assert [f.name for f in files_of_the_checkout() if f.is_symlink()] == []


LONG_FUNCTION = "def walk():\n" + "    step()\n" * 70


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (long_files, "src/kvbm/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
        (long_functions, "src/kvbm/a.py", LONG_FUNCTION),
        (long_decisions, "docs/decisions/0001-a.md", "word " * (DECISION_WORDS_MAX + 1)),
        (drawer_modules, "kvbm/manager/utils.py", ""),
        (drawer_modules, "kvbm/helpers/pool.py", ""),
        (missing_docstrings, "kvbm/a.py", '"""Doc."""\ndef load(): ...\n'),
        (
            missing_docstrings,
            "kvbm/a.py",
            '"""Doc."""\nclass Pool:\n    """Doc."""\n    def frob(self):\n        x()\n        y()\n',
        ),
        (
            missing_docstrings,
            "kvbm/a.py",
            '"""Doc."""\nclass Tier(Protocol):\n    """Doc."""\n    def frob(self): ...\n',
        ),
        (missing_docstrings, "kvbm/a.py", "x = 1\n"),
        (unfinished_marks, "kvbm/a.py", "# TO" + "DO: finish\n"),
        (prints, "kvbm/manager/a.py", "print('x')\n"),
        (environment_reads, "kvbm/manager/a.py", "import os\nos.environ['X']\n"),
        (environment_reads, "kvbm/manager/a.py", "from os import getenv\n"),
        (variable_names, "kvbm/tiers/a.py", "raise SettingsError('DYN_KVBM_DISK_CACHE_GB', 0, '')\n"),
        (variable_names, "kvbm/tiers/a.py", "line = f'lower DYN_KVBM_DISK_CACHE_GB={size}'\n"),
        (unpickling, "kvbm/a.py", "def f():\n    import pickle\n"),
        (unpickling, "kvbm/a.py", "from cloudpickle import loads\n"),
        (maybe_booleans, "kvbm/a.py", "def get() -> bool | None: ...\n"),
        (other_words, "kvbm/a.py", "def swap_in(): ...\n"),
        (other_words, "kvbm/a.py", "class BlockSpiller:\n    def spill(self): ...\n"),
        (other_words, "kvbm/a.py", "def read(idx): ...\n"),
        (sleeps, "tests/unit/test_a.py", "import time\ntime.sleep(0.1)\n"),
        (sleeps, "tests/unit/test_a.py", "finder.establish(hello, 1.0, time.sleep)\n"),
        (sleeps, "tests/rigs/manager_probe.py", "from time import sleep\n"),
        (machine_paths, "README.md", "see /ho" + "me/me/kvbm\n"),
        (machine_paths, "Makefile", "pip install -i https://py" + "pi.org/simple\n"),
    ],
)
def test_a_violation_is_found(checker: Checker, path: str, source: str) -> None:
    assert list(checker(path, source))


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (long_functions, "src/kvbm/a.py", LONG_FUNCTION.rsplit("    ", 1)[0]),
        (missing_docstrings, "kvbm/a.py", '"""Doc."""\nclass _Pool:\n    def load(self): ...\n'),
        (
            missing_docstrings,
            "kvbm/a.py",
            '"""Doc."""\nclass Pool(Base):\n    """Doc."""\n    def load(self): ...\n',
        ),
        (prints, "kvbm/cli/a.py", "print('x')\n"),
        (prints, "kvbm/manager/a.py", "def main():\n    print('x')\n"),
        (environment_reads, "kvbm/settings/load.py", "import os\nos.environ['X']\n"),
        (variable_names, "kvbm/cli/a.py", "x = 'DYN_KVBM_MANAGER'\n"),
        (variable_names, "kvbm/a.py", 'def f():\n    """What DYN_KVBM_MANAGER names."""\n'),
        (maybe_booleans, "kvbm/vllm_integration/a.py", "def reset_cache() -> bool | None: ...\n"),
        (other_words, "kvbm/a.py", "def onboard(block_index): ...\n"),
        (machine_paths, "README.md", "GET /metrics, /tmp/x, src/work/list.py\n"),
    ],
)
def test_what_is_allowed_is_not_reported(checker: Checker, path: str, source: str) -> None:
    assert list(checker(path, source)) == []
