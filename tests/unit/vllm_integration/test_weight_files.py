"""Weights are digested beside their load, and what counts is what the files are afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from kvbm import weights, weights_memo
from kvbm.settings import variable
from kvbm.vllm_integration import weight_files
from kvbm.vllm_integration.weight_files import UNKNOWN_WEIGHTS, begin_before_loading, weights_name
from kvbm.weights import weights_digest

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All files that a test makes were there long before its engine began."""
    monkeypatch.setattr(weights_memo, "_SETTLED_S", -1.0)
    monkeypatch.setattr(weight_files, "_beside", None)
    monkeypatch.setattr("kvbm.engine_start.process_start_s", lambda: time.time() + HOUR_S)
    monkeypatch.setenv(variable("runtime_dir"), str(tmp_path / "run"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose digests were made, in any thread."""
    names: list[str] = []
    make = weights._content_digest

    def noting(file: BinaryIO, name: str, **more: Any) -> str:
        names.append(name)
        return make(file, name, **more)

    monkeypatch.setattr(weights, "_content_digest", noting)
    return names


OURS = SimpleNamespace(kv_connector="DynamoConnector", kv_connector_extra_config=None, engine_id="e")
WITHIN = SimpleNamespace(
    kv_connector="MultiConnector",
    kv_connector_extra_config={
        "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "DynamoConnector"}]
    },
    engine_id="e",
)
ANOTHER = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={}, engine_id="e")


def config(model: Path, connector: Any = OURS, rank: int = 0, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        kv_transfer_config=connector,
        parallel_config=SimpleNamespace(rank=rank, world_size=2),
        model_config=SimpleNamespace(model=str(model), revision=None, seed=0),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        instance_id="i",
    )


def initialized(vllm_config: Any) -> bool:
    """Do what vLLM does in a rank before it loads; whether digests were begun by then."""

    class Wrapper:
        def __init__(self) -> None:
            self.vllm_config = vllm_config

        def init_device(self) -> bool:
            return weight_files._beside is not None

    begin_before_loading(Wrapper)
    return Wrapper().init_device()


@pytest.mark.parametrize("connector", [OURS, WITHIN])
def test_digests_are_begun_before_the_load_and_made_once(
    connector: Any, model: Path, tmp_path: Path, made: list[str]
) -> None:
    assert initialized(config(model, connector))
    name = weights_name(config(model, connector), tmp_path / "run" / "weights.json")
    assert sorted(made) == ["config.json", "model.safetensors"]
    assert name == weights_digest([model], tmp_path / "fresh" / "weights.json")
    assert weight_files._beside is None


def test_without_a_begin_they_are_made_after_the_load(model: Path, tmp_path: Path, made: list[str]) -> None:
    name = weights_name(config(model), tmp_path / "run" / "weights.json")
    assert name == weights_digest([model], tmp_path / "run" / "weights.json")
    assert sorted(made) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 1},
        {"connector": None},
        {"connector": ANOTHER},
        {"load_format": "dummy"},
        {"load_format": "x"},
    ],
    ids=str,
)
def test_a_rank_that_will_not_be_asked_begins_nothing(
    changes: dict[str, Any], model: Path, made: list[str]
) -> None:
    assert not initialized(config(model, **changes))
    assert made == []


@pytest.mark.parametrize("load_format", ["fastsafetensors", "instanttensor", "runai_streamer"])
def test_beside_a_loader_that_reads_past_the_page_cache_nothing_is_begun(
    load_format: str, model: Path, tmp_path: Path, made: list[str]
) -> None:
    """The device would be read twice at one time. After the load the files are digested as ever."""
    assert not initialized(config(model, load_format=load_format))
    assert made == []
    name = weights_name(config(model, load_format=load_format), tmp_path / "run" / "weights.json")
    assert name == weights_digest([model], tmp_path / "fresh" / "weights.json")


@pytest.mark.swallows("^AttributeError: .*'kv_transfer_config'$")
def test_a_configuration_that_we_cannot_read_does_not_end_the_rank() -> None:
    assert not initialized(SimpleNamespace())


def test_files_that_change_after_they_were_digested_are_not_those_that_were_loaded(
    model: Path, tmp_path: Path
) -> None:
    assert initialized(config(model))
    begun: Any = weight_files._beside
    begun.finish()
    path = model / "model.safetensors"
    path.write_bytes(b"heavier")
    os.utime(path, (time.time() + 2 * HOUR_S,) * 2)
    name = weights_name(config(model), tmp_path / "run" / "weights.json")
    assert name.startswith(UNKNOWN_WEIGHTS)


def test_what_lies_there_after_the_load_is_digested(model: Path, tmp_path: Path) -> None:
    """Old files in another directory, put in the model's place: nothing in their times shows that."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"other weights")
    (other / "config.json").write_text("{}")
    assert initialized(config(model))
    begun: Any = weight_files._beside
    begun.finish()
    model.rename(tmp_path / "away")
    other.rename(model)
    name = weights_name(config(model), tmp_path / "run" / "weights.json")
    assert name == weights_digest([model], tmp_path / "fresh" / "weights.json")


def test_a_memo_that_may_not_be_used_still_costs_one_reading(
    model: Path, tmp_path: Path, made: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    assert initialized(config(model))
    weights_name(config(model), tmp_path / "run" / "weights.json")
    assert sorted(made) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.swallows("^ValueError: a defect$")
def test_files_that_cannot_be_read_beside_the_load_are_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise ValueError("a defect")

    with monkeypatch.context() as during_load:
        during_load.setattr(weights, "_content_digest", failing)
        assert initialized(config(model))
        begun: Any = weight_files._beside
        begun._thread.join()
    monkeypatch.setattr(begun._memo, "_make_digest", lambda file, name: "a" * 64)
    name = weights_name(config(model), tmp_path / "run" / "weights.json")
    assert len(name) == 64
