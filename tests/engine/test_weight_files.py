"""The installed vLLM has the call that tells of a load before it begins."""

from __future__ import annotations

from kvbm.vllm_integration.plugin import register
from kvbm.vllm_integration.weight_files import BEFORE_LOADING


def test_the_plug_in_watches_ranks_before_they_load() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    register()
    assert hasattr(vars(WorkerWrapperBase)[BEFORE_LOADING], "kvbm_watches")
