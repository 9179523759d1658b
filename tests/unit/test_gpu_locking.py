"""The benchmark of page locks beside steps, on a model of a card that refuses them: no defect, and no figure."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rigs.checkout import ROOT

torch = pytest.importorskip("torch", reason="the benchmark copies torch tensors; torch is not installed")


def test_where_locks_are_refused_steps_beside_them_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_locking import time_replays
    from gpu_rig import Rig, Trial
    from gpu_rows import Result
    from kvbm.transfer.cuda.copier import CudaCopier
    from rigs.cuda_model import DEADLINE_S, Model

    @contextmanager
    def refused(self: Rig, cache: Any, arena: Any, *_: object, **__: object) -> Iterator[CudaCopier]:
        model = Model()
        model.own(region.device for region in cache.regions)
        model.refuse_locks_from = 0
        copier = CudaCopier(cache, arena, "batch", model.driver, model.device)
        copier.locks.begin()
        assert copier.prepared(DEADLINE_S)  # it was refused before there was a step
        yield copier
        copier.close()

    monkeypatch.setattr(Rig, "copier", refused)
    monkeypatch.setattr(Rig, "methods", ["batch"])
    written = io.StringIO()
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr(written, "fileno", lambda: -1)
    time_replays(Trial(Result(written), rehearse=True))
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["left_out"] for line in lines if "left_out" in line] == ["decode steps beside page locks"]
    assert not any("check" in line for line in lines)
    told = [line["row"]["what"] for line in lines if "row" in line]
    assert told and all(what.startswith("decode step alone") for what in told)
