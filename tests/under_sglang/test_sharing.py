"""One manager below several engines, tenants, models and versions of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.sglang.keepers import WAYS, Manager, change_weights, copy_of, wait_until_settled, wait_until_stored
from rigs.sglang.modes import plain
from rigs.sglang.prompts import HIT_TOKENS, PAGES, PROMPTS, different, prompts, texts
from rigs.sglang.scenarios import Stage, wait_until_found
from under_sglang.conftest import Keep

Reference = list[list[int]]
EVERYTHING = PROMPTS * HIT_TOKENS
VALUES = "model.layers.0.self_attn.v_proj.weight"


@pytest.mark.parametrize("way", WAYS)
def test_what_one_engine_wrote_another_finds(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    """Both run at once."""
    kept: Manager = keep(way, disk=False)
    with stage.on(kept) as first, stage.on(kept) as second:
        assert different(first.generate(prompts()), reference) == 0
        wait_until_stored(kept, PROMPTS * PAGES)
        wait_until_found(second, reference)
        first.end()
        second.end()


@pytest.mark.parametrize("way", ["storage", "generic"])
def test_pages_of_another_form_are_never_taken_for_ones_own(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    """Stored by the zero-copy calls in one layout; read by either calls in each layout."""
    kept: Manager = keep("storage", disk=False)
    with stage.on(kept) as engine:
        engine.generate(prompts())
        wait_until_stored(kept, PROMPTS * PAGES)
        engine.end()
    kept.name = way
    found = {}
    for layout in ("page_first_direct", "layer_first"):
        with stage.on(kept, hicache_mem_layout=layout) as engine:
            answers = engine.generate(prompts())
            assert different(answers, reference) == 0
            found[layout] = sum(answer.cached for answer in answers)
            engine.end()
    assert found["layer_first"] == 0
    assert found["page_first_direct"] == (EVERYTHING if way == "storage" else 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_tenants_do_not_meet(stage: Stage, keep: Keep, reference: Reference, way: str, field: str) -> None:
    kept: Manager = keep(way, disk=False)
    with stage.on(kept) as engine:
        assert different(engine.generate(prompts(), **{field: "a"}), reference) == 0
        wait_until_stored(kept, PROMPTS * PAGES)
        found = {}
        for tenant in ("b", "a"):
            assert engine.call("flush")
            answers = engine.generate(prompts(), **{field: tenant})
            assert different(answers, reference) == 0
            found[tenant] = sum(answer.cached for answer in answers)
        assert found == {"b": 0, "a": EVERYTHING}
        engine.end()


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_change_in_memory(
    stage: Stage, keep: Keep, reference: Reference, tmp_path: Path, way: str
) -> None:
    """From a file and from tensors, while the engine runs; nothing of before is found after that."""
    other = copy_of(stage.model, tmp_path / "other")
    change_weights(other)
    scaled = {"weight": VALUES, "factor": -1.5, "path": str(stage.model)}
    expected = {"from a file": stage.reference(other)}
    with stage.engine(plain(stage.model)) as engine:
        assert engine.call("scale_weight", **scaled)[0]
        expected["from tensors"] = texts(engine.generate(prompts()))
        engine.end()
    assert len({str(reference), *map(str, expected.values())}) == 3
    kept: Manager = keep(way, disk=False)
    for source, change in (
        ("from a file", ("load_weights", {"path": str(other)})),
        ("from tensors", ("scale_weight", scaled)),
    ):
        with stage.on(kept) as engine:
            assert different(engine.generate(prompts()), reference) == 0
            wait_until_settled(kept)
            name, arguments = change
            assert engine.call(name, **arguments)[0]
            answers = engine.generate(prompts())
            assert (different(answers, expected[source]), sum(a.cached for a in answers)) == (0, 0), source
            wait_until_settled(kept)
            assert engine.call("flush")
            answers = engine.generate(prompts())
            assert different(answers, expected[source]) == 0
            engine.end()
    with stage.on(kept) as engine:
        wait_until_found(engine, reference)
        engine.end()
