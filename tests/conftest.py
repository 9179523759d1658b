"""The set-up of every test: marks by folder, and skips with a reason where an engine or torch is not installed.

What was skipped for want of hardware or a program is listed at the end of a run, by reason (`not_run`).

A test module just imports what it needs. Everything below `tests/engine` is marked `engine`, and is not even read
where vLLM is not installed; what is below `tests/under_dynamo` is marked `dynamo`, and needs NVIDIA's Dynamo; what is
below `tests/under_sglang` is marked `sglang`, and needs an environment with SGLang.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

import not_run

pytest.register_assert_rewrite("rigs")
from rigs.property_tests import register_profiles  # noqa: E402  # after its assertions are rewritten

pytest_plugins = ["rigs.fixtures", "rigs.swallowed"]

ENGINE_TESTS = Path(__file__).parent / "engine"
DYNAMO_TESTS = Path(__file__).parent / "under_dynamo"
SGLANG_TESTS = Path(__file__).parent / "under_sglang"
SGLANG_TIMEOUT_S = 300
"""A test starts several engines, one after the other."""
MILLIONS_OF_KEYS = "test_memory_stays_bounded"
"""A test of the contract kits that takes long for each policy, and again for each thing around policies."""
PROPERTY_OF_A_KIT = "test_any_order_of_calls"
"""A property test that hypothesis does not mark as one."""
OPTIONAL = {
    "huggingface_hub",
    "matplotlib",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
}
"""Not dependencies: the tests that need one of them are skipped where it is not installed."""

for name, value in (("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")):
    os.environ.setdefault(name, value)  # tests fetch nothing and report nothing
register_profiles()


class OptionalModule(pytest.Module):
    """A test module that is skipped, with the reason, when what it needs is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """As pytest does it, except that an optional package that is missing is no error."""
        if ENGINE_TESTS in self.path.parents and importlib.util.find_spec("vllm") is None:
            pytest.skip("vllm is not installed", allow_module_level=True)
        if DYNAMO_TESTS in self.path.parents and importlib.util.find_spec("dynamo") is None:
            pytest.skip("ai-dynamo is not installed (make dynamo-test)", allow_module_level=True)
        if SGLANG_TESTS in self.path.parents and (reason := _why_no_sglang()):
            pytest.skip(reason, allow_module_level=True)
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            if missing is None or missing.split(".")[0] not in OPTIONAL:
                raise
        pytest.skip(f"{missing} is not installed", allow_module_level=True)


def _why_no_sglang() -> str:
    from rigs.sglang import installation  # `rigs` is registered for pytest's assertions first.

    return installation.missing()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Every test module is one of ours."""
    return OptionalModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder; an engine test that is not marked quick is slow.

    An engine's own threads and destructors may warn; ours may not.
    """
    for item in items:
        if item.name.startswith(PROPERTY_OF_A_KIT):
            item.add_marker(pytest.mark.hypothesis)
        if item.name.startswith(MILLIONS_OF_KEYS):
            item.add_marker(pytest.mark.slow)
        if DYNAMO_TESTS in item.path.parents:
            item.add_marker(pytest.mark.dynamo)
        if SGLANG_TESTS in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(SGLANG_TIMEOUT_S))
        if ENGINE_TESTS in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("quick") is None:
                item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"))
            item.add_marker(
                pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning")
            )


def pytest_collection_finish() -> None:
    """Keep the collected tests, which live to the end, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that look for leaks at the interpreter's end must not find the collected tests."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """The last thing before the totals."""
    yield
    if lines := not_run.lines(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("not run on this machine")
        for line in lines:
            terminalreporter.line(line)
