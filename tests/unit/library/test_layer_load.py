"""Loads layer by layer: two requests that begin alike in one, and no copy that goes on after an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

from kvbm.library.layer_load import LayerLoad
from rigs.library import BLOCK_TOKENS, LAYERS, LocalHouse, SharedHouse, content, new_cache

TOKENS = list(range(6 * BLOCK_TOKENS))


@pytest.fixture(params=[LocalHouse, SharedHouse])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalHouse | SharedHouse]:
    house: LocalHouse | SharedHouse = request.param(tmp_path)
    yield house
    house.close()


def test_hits_that_share_slots_are_loaded_in_one(house: LocalHouse | SharedHouse) -> None:
    with house.open() as manager:
        cache, target = new_cache(1), new_cache(2)
        noise = content(target, [10])
        manager.offload(TOKENS, cache, range(6))
        with manager.match(TOKENS) as one, manager.match(TOKENS[: 2 * BLOCK_TOKENS]) as two:
            load = manager.onboard_by_layer([(one, range(10, 16)), (two, [20, 21])], target)
            assert load is not None
            load.copy(["layer.0"])
            assert torch.equal(target["layer.0"][10:16], cache["layer.0"][:6])
            assert torch.equal(target["layer.0"][20:22], cache["layer.0"][:2])
            assert torch.equal(content(target, [10])[1], noise[1]), "the next layer is not there yet"
            load.copy([f"layer.{i}" for i in range(1, LAYERS)])
            assert load.end()
            assert manager.onboard_by_layer([(one, range(10, 17))], target) is None, "more than was found"
            assert manager.onboard_by_layer([], target) is None
        assert torch.equal(content(target, [*range(10, 16), 20, 21]), content(cache, [*range(6), 0, 1]))


def test_an_error_is_raised_when_no_copy_is_under_way_any_more() -> None:
    class Copying:
        def __init__(self, fails: bool) -> None:
            self.fails, self.over = fails, False

        def wait(self) -> None:
            self.over = True
            if self.fails:
                raise RuntimeError("device-side error")

    begun: list[Copying] = []

    class Copier:
        def begin_load(self, pairs: Any, layer: str) -> Copying:
            if layer == "refused":
                raise RuntimeError("out of range")
            begun.append(Copying(layer == "fails"))
            return begun[-1]

    told: list[bool] = []
    copier: Any = Copier()
    load = LayerLoad(copier, [(0, 0)], lambda: True, told.append)
    with pytest.raises(RuntimeError, match="device-side"):
        load.copy(["fails", "good"])
    with pytest.raises(RuntimeError, match="out of range"):
        load.copy(["good", "refused"])
    assert [each.over for each in begun] == [True, True, True]
    assert not load.end(whole=False)
    assert told == [False]
