"""A rank's half of the connector, where it cannot read what vLLM gives it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="a rank's KV is torch tensors; torch is not installed")

from kvbm.errors import KvbmError
from kvbm.settings import Settings
from kvbm.vllm_integration import worker_side


def test_tensors_that_cannot_be_told_apart_are_no_reason_not_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(*_: object) -> None:
        raise KvbmError("blocks of one layer lie on blocks of another")

    monkeypatch.setattr(worker_side.DeviceCache, "from_tensors", unreadable)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_rank=0),
    )
    full = type("FullAttentionSpec", (), {"block_size": 16})
    caches = SimpleNamespace(num_blocks=4, kv_cache_groups=[SimpleNamespace(kv_cache_spec=full())])
    side = worker_side.WorkerSide(config, caches, Settings(runtime_dir=str(tmp_path)), {})
    with caplog.at_level(logging.WARNING, "kvbm"):
        side.register({"layer": None})  # type: ignore[dict-item]  # a stub
    assert [record.getMessage() for record in caplog.records] == [
        "KVBM is off for this engine: blocks of one layer lie on blocks of another"
    ]
    assert side.worker is None
