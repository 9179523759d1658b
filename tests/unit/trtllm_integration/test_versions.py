"""Which TensorRT-LLM this was written from, and what is said of any other."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvbm.trtllm_integration.versions import TESTED, signature_notice, version_notice
from rigs.trtllm import package


@pytest.fixture(autouse=True)
def no_package_is_left() -> Iterator[None]:
    yield
    package.remove()


@pytest.mark.parametrize("version", ["1.2.0rc2", "1.2.0rc8.post1", "1.2.0", "1.2.1", "1.3.0rc1", "1.3.0rc29"])
def test_releases_that_were_read(version: str) -> None:
    assert version_notice(version) == ""


@pytest.mark.parametrize("version", ["1.2.0rc1", "1.1.0", "1.3.0rc30", "1.3.0", "2.0.0", "a checkout"])
def test_another_release_is_one_warning(version: str) -> None:
    line = version_notice(version)
    assert version in line and TESTED in line
    assert "\n" not in line


def test_without_the_package_the_import_says_so_in_one_line() -> None:
    program = "import kvbm.trtllm_integration.connector"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kvbm.trtllm_integration needs tensorrt_llm, 1.2.0rc2 to 1.3.0rc29")


def test_the_package_itself_imports_without_it() -> None:
    importlib.import_module("kvbm.trtllm_integration")


@pytest.mark.parametrize("version", [package.OLDEST, package.NEWEST])
def test_the_interface_is_implemented(version: str) -> None:
    pytest.importorskip("torch")
    package.install(version)
    module = importlib.import_module("kvbm.trtllm_integration.connector")
    interface = importlib.import_module("kvbm.trtllm_integration.interface")
    ours = (module.DynamoKVBMConnectorLeader, module.DynamoKVBMConnectorWorker)
    theirs = (interface.KvCacheConnectorScheduler, interface.KvCacheConnectorWorker)
    assert signature_notice(zip(theirs, ours, strict=True)) == ""
    assert not any(each.__abstractmethods__ for each in ours)
    assert not any(each.supports_attention_dp for each in ours)
    for name in ("request_reset", "cancel_load", "register_kv_cache_layout"):
        assert any(name in vars(each) for each in ours), "also where the base class lacks it"


class Base:
    """An interface of a later release."""

    def start(self, stream: object) -> None: ...

    def stop(self, why: str, when: int) -> None: ...

    def renamed(self, request: object) -> None: ...

    def added(self) -> None: ...


class Ours(Base):
    """What we have of it."""

    def start(self, stream: object, more: int = 0) -> None: ...

    def stop(self, why: str) -> None: ...

    def renamed(self, asked: object) -> None: ...


def test_differences_are_named_in_one_line() -> None:
    line = signature_notice([(Base, Ours)])
    assert "\n" not in line
    assert "Base.added is not implemented" in line
    assert "Base.stop(why, when), here (why)" in line
    assert "Base.renamed(request), here (asked)" in line
    assert "start" not in line
