"""Which module imports which: the rules that need no list of packages. The others are contracts in pyproject.toml."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from rigs.checkout import PROJECT, ROOT
from rigs.sources import (
    SOURCES,
    Violations,
    assert_none,
    functions,
    imports,
    module_name,
    python_files,
    violations,
)

ENGINES = {"vllm": "vllm_integration", "tensorrt_llm": "trtllm_integration", "sglang": "sglang_integration"}
NOT_DECLARED = {"torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", *ENGINES}
"""Comes with an engine; never a dependency of ours."""
ENTRY_POINTS = {"kvbm", "kvbm.cli.main", "openkvbm.entry"}
"""Modules that the outside names: the package, the console script, the engine's plug-in."""
PUBLIC_PACKAGES = (
    "kvbm.testing",
    "kvbm.vllm_integration.connector",
    "kvbm.vllm_integration.hints",
    "kvbm.trtllm_integration.connector",
    "kvbm.sglang_integration.storage",
    "kvbm.sglang_integration.linker",
)
"""Import paths for users and for other people's tests, below which nothing of ours needs to lead."""
SLOW_TO_IMPORT = {*NOT_DECLARED, "numpy"}
"""Imported where they are needed, not when a process starts."""
OPTIONAL = (
    "kvbm/demo/",
    "kvbm/cli/top_app.py",
    "kvbm/observe/otel.py",
    "kvbm/present/axes.py",
    "kvbm/sim/scale/picture.py",
    "kvbm/tiers/remote/drivers/",
    "kvbm/tiers/remote/sealing.py",
    "kvbm/fleet/",
)
"""Modules that draw, trace or reach beyond this machine may import packages of an extra: a user who asks for that gets
its name."""
IS_PROGRAM = 'if __name__ == "__main__":'
"""In a module that is run with `python -m`."""
IMPORT_NAMES = {
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}


def named_modules(source: str) -> set[str]:
    """Modules of ours that a source names in a string, to start or to load them by name."""
    return set(re.findall(r"[\"'](kvbm(?:\.\w+)+)[\"':]", source))


def commands(sources: dict[str, str]) -> set[str]:
    """Modules that the command line loads by name: a table there lists them."""
    for node in ast.parse(sources.get("kvbm/cli/main.py", "")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "COMMANDS"
            and node.value is not None
        ):
            return {f"kvbm.cli.{name}" for name in ast.literal_eval(node.value)}
    return set()


def dead_modules(sources: dict[str, str]) -> list[str]:
    """Modules that nothing leads to, starting from the entry points and the public import paths."""
    files = {module_name(path): source for path, source in sources.items()}
    pending = [name for name in files if name in ENTRY_POINTS or name.startswith(PUBLIC_PACKAGES)]
    pending += [name for name, source in files.items() if name.endswith("__main__") or IS_PROGRAM in source]
    pending += commands(sources)
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in files or name in reached:
            continue
        reached.add(name)
        pending += [
            name.rpartition(".")[0],
            *imports(files[name], with_types=True),
            *named_modules(files[name]),
        ]
    return sorted(files.keys() - reached)


def declared(requirements: list[str]) -> set[str]:
    """Import names of a list of requirements."""
    names = {re.split(r"[\s<>=!;\[~]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def third_party(source: str) -> set[str]:
    """Top-level packages that are neither the standard library's nor ours."""
    names = {name.split(".")[0] for name in imports(source)}
    return names - set(sys.stdlib_module_names) - {"kvbm", "openkvbm", "tomllib"}


BASE = declared(PROJECT["dependencies"])
EXTRAS = {name for extra in PROJECT["optional-dependencies"].values() for name in declared(extra)}


def test_every_module_is_used() -> None:
    assert_none(dead_modules(SOURCES))


def imported_tests(path: str, source: str) -> Violations:
    """Imports from a test module: what tests share lies in `tests/rigs`."""
    for name in imports(source, with_types=True):
        if any(part.startswith("test_") for part in name.split(".")):
            yield f"{path}: {name}; what tests share lies in tests/rigs"


def test_no_test_imports_from_a_test() -> None:
    assert_none(violations(imported_tests, python_files("tests", "scripts", "benchmarks"), ROOT))


def test_every_command_has_its_module() -> None:
    assert_none(sorted(commands(SOURCES) - set(map(module_name, SOURCES))))


def test_policy_imports_only_block() -> None:
    wrong = [
        f"{path}: {name}"
        for path, source in SOURCES.items()
        if path.startswith("kvbm/policy/")
        for name in imports(source)
        if name.startswith("kvbm") and not name.startswith(("kvbm.block", "kvbm.policy"))
    ]
    assert_none(wrong)


def test_the_simulator_knows_only_the_managers_pool_and_its_queue_to_disk() -> None:
    known = {"kvbm.manager.pool", "kvbm.manager.offload"}
    for path, source in SOURCES.items():
        if path.startswith("kvbm/sim/"):
            found = {name for name in imports(source, with_types=True) if name.startswith("kvbm.manager")}
            modules = {".".join(name.split(".")[:3]) for name in found}
            assert modules <= known, f"{path} imports {modules - known}"


def test_an_engine_is_imported_only_in_its_integration() -> None:
    wrong = [
        f"{path}: {engine}"
        for path, source in SOURCES.items()
        for engine in third_party(source) & set(ENGINES)
        if not path.startswith(f"kvbm/{ENGINES[engine]}/")
    ]
    assert_none(wrong)


def test_every_import_is_declared() -> None:
    wrong = [
        f"{path}: {name}"
        for path, source in SOURCES.items()
        for name in third_party(source)
        - BASE
        - NOT_DECLARED
        - (EXTRAS if path.startswith(OPTIONAL) else set())
        if not (path.startswith("kvbm/testing/") and name in EXTRAS)
    ]
    assert_none(wrong)


def test_every_dependency_is_imported() -> None:
    used = set().union(*(third_party(source) for source in SOURCES.values()))
    assert_none(sorted(BASE - used - {"tomli"}))


def test_entry_points_exist() -> None:
    targets = [*PROJECT["scripts"].values()]
    targets += [target for group in PROJECT["entry-points"].values() for target in group.values()]
    for target in targets:
        module, _, function = target.partition(":")
        source = SOURCES.get(module.replace(".", "/") + ".py", "")
        assert any(node.name == function for node in functions(source)), target


@pytest.mark.parametrize("module", ["kvbm", "kvbm.manager.process", "kvbm.cli.main"])
def test_no_heavy_import_at_start(module: str) -> None:
    """Starting the manager or the command line must not pull in torch, numpy or an engine."""
    probe = f"import sys, {module}; print(*{SLOW_TO_IMPORT!r} & sys.modules.keys())"
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []


@pytest.mark.parametrize(
    "source",
    [
        "from unit.leader.test_modes import Engine\n",
        "from unit.leader import test_modes as modes\n",
        "def test() -> None:\n    import unit.test_tidy\n",
    ],
)
def test_an_import_from_a_test_is_found(source: str) -> None:
    assert list(imported_tests("tests/unit/leader/test_keys.py", source))


def test_an_import_from_a_rig_is_allowed() -> None:
    source = "from kvbm.testing import oracle\nfrom rigs.leader import Bench\nimport pytest\n"
    assert list(imported_tests("tests/unit/leader/test_keys.py", source)) == []


def test_a_dead_module_is_found() -> None:
    sources = {
        "kvbm/__init__.py": "import kvbm.live\n",
        "kvbm/live.py": "",
        "kvbm/dead.py": "import kvbm.also_dead\n",
        "kvbm/also_dead.py": "import kvbm.dead\n",
    }
    assert dead_modules(sources) == ["kvbm.also_dead", "kvbm.dead"]


def test_commands_live() -> None:
    table = "COMMANDS: dict[str, str] = {'top': 'Show traffic.'}\n"
    sources = {
        "kvbm/cli/main.py": table,
        "kvbm/cli/top.py": "",
        "kvbm/cli/__init__.py": "",
        "kvbm/__init__.py": "",
    }
    assert dead_modules(sources) == []


def test_a_module_named_in_a_string_lives() -> None:
    sources = {"kvbm/__init__.py": "command = ['-m', 'kvbm.started']\n", "kvbm/started.py": ""}
    assert dead_modules(sources) == []


def test_imports_for_type_checking_do_not_count() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import xxhash\n"
    )
    assert third_party(source) == {"xxhash"}


def test_a_lazy_import_counts() -> None:
    assert third_party("def f():\n    from vllm.config import VllmConfig\n") == {"vllm"}


def test_a_file_has_a_module_name() -> None:
    assert module_name("kvbm/cli/main.py") == "kvbm.cli.main"
    assert module_name("kvbm/cli/__init__.py") == "kvbm.cli"
