"""Other models and shapes: two ranks, latent attention, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rigs.sglang.keepers import WAYS, Manager, wait_until_settled, wait_until_stored
from rigs.sglang.models import make_adapter, make_latent_model
from rigs.sglang.modes import plain
from rigs.sglang.prompts import PAGES, PROMPTS, different, prompts, texts
from rigs.sglang.scenarios import Stage, wait_until_found
from under_sglang.conftest import Keep

Reference = list[list[int]]
ONE_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latent_model(tmp_path_factory.mktemp("latent") / "model")


def _stored_and_found(
    stage: Stage, kept: Manager, arguments: dict[str, Any], variables: dict[str, str], expected: Reference
) -> None:
    """One engine computes and stores, and the next finds it."""
    with stage.engine(arguments, variables) as engine:
        answers = engine.generate(prompts())
        assert (different(answers, expected), sum(answer.cached for answer in answers)) == (0, 0)
        wait_until_stored(kept, PROMPTS * PAGES)
        wait_until_settled(kept)
        engine.end()
    with stage.engine(arguments, variables) as engine:
        wait_until_found(engine, expected)
        engine.end()


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks(stage: Stage, keep: Keep, reference: Reference, way: str) -> None:
    """Each keeps its heads. One rank's pages are not taken by an engine of one rank."""
    kept: Manager = keep(way, disk=False)
    variables = kept.variables() | ONE_CORE_EACH
    _stored_and_found(stage, kept, kept.arguments(stage.model, tp_size=2), variables, reference)
    with stage.on(kept) as engine:
        answers = engine.generate(prompts())
        assert (different(answers, reference), sum(answer.cached for answer in answers)) == (0, 0)
        engine.end()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_latent_attention(stage: Stage, keep: Keep, latent: Path, way: str, ranks: int) -> None:
    """All ranks hold the same rows, and they are kept once."""
    expected = stage.reference(latent)
    kept: Manager = keep(way, disk=False)
    variables = kept.variables() | (ONE_CORE_EACH if ranks > 1 else {})
    _stored_and_found(stage, kept, kept.arguments(latent, tp_size=ranks), variables, expected)
    assert kept.stored() <= PROMPTS * (PAGES + 1)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_do_not_meet(
    stage: Stage, keep: Keep, reference: Reference, tmp_path: Path, way: str
) -> None:
    """Two adapters and the model without one; after a restart each finds its own."""
    adapters = {
        name: str(make_adapter(tmp_path / name, stage.model, seed)) for name, seed in (("a", 1), ("b", 2))
    }
    more = {"lora_paths": adapters, "lora_backend": "torch_native", "disable_radix_cache": False}
    with stage.engine(plain(stage.model, **more)) as engine:
        expected = {name: texts(engine.generate(prompts(), lora_path=name)) for name in adapters}
        engine.end()
    assert len({str(reference), *map(str, expected.values())}) == 3
    kept: Manager = keep(way, disk=False)
    with stage.on(kept, **more) as engine:
        for name in (*adapters, None):
            assert engine.call("flush")
            answers = engine.generate(prompts(), lora_path=name)
            assert different(answers, expected.get(name or "", reference)) == 0, name
            assert sum(answer.cached for answer in answers) == 0, name
            wait_until_settled(kept)
        engine.end()
    with stage.on(kept, **more) as engine:
        for name in (*adapters, None):
            wait_until_found(engine, expected.get(name or "", reference), lora_path=name)
        engine.end()
