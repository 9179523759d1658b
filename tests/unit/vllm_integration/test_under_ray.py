"""Under Ray: which ranks are heard, and a line where variables are lost."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvbm.vllm_integration.under_ray import (
    NEWER_EXECUTOR,
    PREFIXES_VARIABLE,
    lost_variables,
    unheard_stages,
)

OURS = {"DYN_KVBM_CPU_CACHE_GB": "4"}


class RayDistributedExecutor:
    """Named as vLLM's older executor, which is all that is looked at."""


class Derived(RayDistributedExecutor):
    """Somebody's own."""


class RayExecutorV2:
    """Named as the newer one."""


def engine(**parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, **parallel}),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=None),
    )


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's variables, of a release that has the newer executor and takes it."""
    vllm, found = ModuleType("vllm"), SimpleNamespace(**{NEWER_EXECUTOR: True})
    vllm.envs = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return found


def test_stages_are_heard_under_the_newer_executor_and_without_ray(envs: Any) -> None:
    assert unheard_stages(engine(pipeline_parallel_size=2, distributed_executor_backend="ray")) == ""
    assert unheard_stages(engine(pipeline_parallel_size=2, distributed_executor_backend=RayExecutorV2)) == ""
    setattr(envs, NEWER_EXECUTOR, False)
    assert unheard_stages(engine(pipeline_parallel_size=2, distributed_executor_backend="mp")) == ""
    assert unheard_stages(engine(pipeline_parallel_size=1, distributed_executor_backend="ray")) == ""


def test_stages_are_not_heard_under_the_older_executor(envs: Any) -> None:
    refused = unheard_stages(engine(pipeline_parallel_size=2, distributed_executor_backend=Derived))
    assert refused.startswith("pipeline_parallel_size=2 under vLLM's older Ray executor")
    setattr(envs, NEWER_EXECUTOR, False)
    assert unheard_stages(engine(pipeline_parallel_size=2, distributed_executor_backend="ray")) == refused
    delattr(envs, NEWER_EXECUTOR)
    assert unheard_stages(engine(pipeline_parallel_size=2, distributed_executor_backend="ray")) == refused


def test_the_older_executor_carries_variables_by_their_prefixes(envs: Any) -> None:
    assert lost_variables(engine(distributed_executor_backend="ray"), OURS) == ""
    setattr(envs, NEWER_EXECUTOR, False)
    older = engine(distributed_executor_backend="ray")
    assert "does not carry DYN_KVBM_* to the ranks: set VLLM_RAY_EXTRA_" in lost_variables(older, OURS)
    assert lost_variables(older, {}) == ""
    assert lost_variables(older, {**OURS, PREFIXES_VARIABLE: "FOO_, DYN_"}) == ""
    assert lost_variables(older, {**OURS, PREFIXES_VARIABLE: "FOO_,,"}) != ""


def test_data_parallel_engines_under_ray_say_that_nothing_came(envs: Any) -> None:
    assert envs
    engines = engine(distributed_executor_backend="mp", data_parallel_backend="ray")
    assert "carried no DYN_KVBM_* to this engine" in lost_variables(engines, {})
    assert lost_variables(engines, OURS) == ""
    assert lost_variables(engines, {PREFIXES_VARIABLE: "DYN_KVBM_"}) == ""
    engines.kv_transfer_config.kv_connector_extra_config = {"kvbm": {"host_bytes": "4GB"}}
    assert lost_variables(engines, {}) == ""
