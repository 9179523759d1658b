"""Which engines share bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvbm.errors import KvbmError
from kvbm.layout import Namespace
from kvbm.trtllm_integration.engine_facts import EngineFacts
from kvbm.trtllm_integration.namespace import _plain, engine_namespace

FACTS = EngineFacts(
    engine="e",
    rank=0,
    rank_count=1,
    tensor_rank=0,
    tensor_ranks=1,
    stage=0,
    stages=1,
    block_tokens=32,
    request_tokens=0,
    model="m",
)


@pytest.fixture(autouse=True)
def old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.engine_start.engine_start_s", lambda: 1e12)


def model(folder: Path, content: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(content)
    return str(folder)


class Space:
    """Namespaces of engines whose files lie in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = model(folder / "model")

    def of(
        self, release: str = "1.3.0rc1", facts: EngineFacts = FACTS, layout: str = "l", **arguments: Any
    ) -> Namespace:
        named = {"model": self.model, "kv_cache_config": SimpleNamespace(dtype="auto"), **arguments}
        return engine_namespace(
            SimpleNamespace(**named), facts, layout, False, release, str(self.folder / "run")
        )


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path)


def test_equal_engines_share(space: Space, tmp_path: Path) -> None:
    one = space.of()
    assert one.fingerprint == space.of().fingerprint
    assert not one.ephemeral
    elsewhere = model(tmp_path / "elsewhere")
    assert space.of(model=elsewhere).fingerprint == one.fingerprint, "where the files lie makes no difference"


def test_other_weights_at_the_same_path_never_hit(space: Space) -> None:
    before = space.of()
    model(Path(space.model), b"others!")
    assert space.of().fingerprint != before.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"release": "1.3.0rc2"},
        {"layout": "other"},
        {"dtype": "bfloat16"},
        {"attn_backend": "FLASHINFER"},
        {"quant_config": SimpleNamespace(quant_algo="FP8")},
        {"speculative_config": SimpleNamespace(decoding_type="MTP")},
        {"kv_cache_config": SimpleNamespace(dtype="fp8")},
        {"facts": msgspec.structs.replace(FACTS, tensor_ranks=2)},
        {"facts": msgspec.structs.replace(FACTS, stages=2)},
        {"facts": msgspec.structs.replace(FACTS, block_tokens=64)},
    ],
)
def test_what_computes_otherwise_does_not(space: Space, change: dict[str, Any]) -> None:
    assert space.of(**change).fingerprint != space.of().fingerprint


def test_arguments_without_a_text_of_their_own_are_the_same_in_every_process(space: Space) -> None:
    def made() -> Any:
        return SimpleNamespace(a=1, b="x")

    assert space.of(lora_config=made()).fingerprint == space.of(lora_config=made()).fingerprint


@pytest.mark.parametrize("arguments", [{"model": "/nowhere/at/all"}, {"load_format": "dummy"}])
def test_weights_without_a_name_are_this_engines_alone(
    space: Space, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        named = space.of(**arguments)
    assert named.ephemeral
    assert "are kept for this engine only" in caplog.text
    other = msgspec.structs.replace(FACTS, engine="f")
    assert space.of(facts=other, **arguments).fingerprint != named.fingerprint


def test_several_ranks_have_no_name_for_such_weights(space: Space) -> None:
    facts = msgspec.structs.replace(FACTS, rank_count=2, tensor_ranks=2)
    with pytest.raises(KvbmError, match="its 2 ranks have no name for them"):
        space.of(facts=facts, load_format="dummy")


def test_weights_that_may_have_changed_while_they_were_loaded(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.engine_start.engine_start_s", lambda: 0.0)
    assert space.of().ephemeral


def test_an_argument_is_the_same_text_in_every_process() -> None:
    """Sets have another order, and objects another address, in each process."""

    class Opaque:
        __slots__ = ()

    def made(*names: str) -> SimpleNamespace:
        return SimpleNamespace(kinds=set(names), deep=[Opaque(), {"b": 1, "a": (2, None)}])

    assert _plain(made("x", "y", "z")) == _plain(made("z", "y", "x"))
    assert _plain(made("x")) != _plain(made("y"))
