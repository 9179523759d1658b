"""Programs with several groups: what comes back is what left, at a boundary that every group can serve, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

import kvbm
from kvbm.errors import SettingsError
from kvbm.grouping import Grouping
from kvbm.groups import Group, GroupKind
from kvbm.manager.space import Space
from rigs import library
from rigs.library import BLOCK_TOKENS, SHARD_BYTES, LocalHouse, SharedHouse, content, prompt

DEVICE_BLOCKS = library.DEVICE_BLOCKS
GROUPS = (Group(), Group(kind=GroupKind.WINDOW, reach=2), Group(kind=GroupKind.STATE))
GROUPING = Grouping(GROUPS)
LAYOUT = kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=SHARD_BYTES, groups=GROUPS)


@pytest.fixture(params=[LocalHouse, SharedHouse])
def house(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalHouse | SharedHouse]:
    monkeypatch.setattr(library, "layout", lambda: LAYOUT)
    house: LocalHouse | SharedHouse = request.param(tmp_path)
    yield house
    house.close()


def computed(tokens: list[int], group: int, block: int) -> torch.Tensor:
    """Of each group another content, all of the same tokens."""
    return library.computed([group, *tokens[: (block + 1) * BLOCK_TOKENS]], block)


def fill(cache: dict[str, torch.Tensor], tokens: list[int], tables: list[list[int | None]]) -> None:
    for group, table in enumerate(tables):
        for block, device_block in enumerate(table):
            if device_block is not None:
                for name, layer in zip(cache, computed(tokens, group, block), strict=True):
                    cache[name][device_block] = layer[0]


def tables_for(
    free: Iterator[int], end: int, keep: Callable[[int, int], bool] = lambda group, block: True
) -> list[list[int | None]]:
    """Tables that reach `end`, with what a device would still have of windows and states."""
    needed = [set(group.needed(end)) for group in GROUPS]
    return [
        [next(free) if block in needed[number] and keep(number, block) else None for block in range(end)]
        for number in range(len(GROUPS))
    ]


def test_random_prompts_come_back_as_they_left_or_not_at_all(house: LocalHouse | SharedHouse) -> None:
    rng = random.Random(11)
    cache = library.new_cache(1)
    families = [prompt(rng, 6) for _ in range(8)]
    hits, misses = 0, 0
    with house.open(host=60 * 4096, disk="1MB") as manager:
        kept: set[tuple[int, ...]] = set()
        for _ in range(150):
            tokens = rng.choice(families)[: BLOCK_TOKENS * rng.randint(1, 6)]
            blocks, device = len(tokens) // BLOCK_TOKENS, rng.sample(range(DEVICE_BLOCKS), DEVICE_BLOCKS)
            skip = rng.choice((0, 0, rng.randint(0, blocks)))
            with manager.match(tokens, skip=skip) as hit:
                boundary = skip + hit.blocks
                if hit.blocks:
                    assert (
                        tuple(tokens[: boundary * BLOCK_TOKENS]) in kept
                    )  # a boundary that was kept, no other
                    free = iter(device)
                    tables: list[list[int | None]] = [
                        [next(free) if block in needed else None for block in range(boundary)]
                        for needed in hit.needed
                    ]
                    arrived = hit.onboard(cache, tables)
                    assert arrived in (0, hit.blocks)
                    hits += arrived > 0
                    for group, block in GROUPING.run(boundary, skip) if arrived else ():
                        device_block = tables[group][block]
                        assert device_block is not None
                        assert torch.equal(content(cache, [device_block]), computed(tokens, group, block))
                else:
                    misses += 1
            tables = tables_for(iter(device), blocks)
            fill(cache, tokens, tables)
            manager.offload(tokens, cache, tables)
            kept.add(tuple(tokens))
            house.with_space(Space.check)
    assert hits > 40
    assert misses > 5


def test_a_tail_with_a_hole_is_no_boundary(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = library.new_cache(2), prompt(random.Random(3), 5)
    with house.open() as manager:
        lacking = tables_for(iter(range(32)), 5, keep=lambda group, block: (group, block) != (1, 4))
        fill(cache, tokens, lacking)
        assert manager.offload(tokens, cache, lacking) == 5
        with manager.match(tokens) as hit:
            assert (hit.blocks, hit.needed) == (0, (range(0), range(0), range(0)))
        whole = tables_for(iter(range(32)), 5)
        fill(cache, tokens, whole)
        assert manager.offload(tokens, cache, whole) == 2 + 1
        with manager.match(tokens) as hit:
            assert (hit.blocks, hit.tokens, hit.host) == (5, 5 * BLOCK_TOKENS, 5)
            assert hit.needed == (range(5), range(3, 5), range(4, 5))
            assert hit.onboard(cache, whole) == 5
        assert manager.metrics.value("kvbm_matched_tokens") == 5 * BLOCK_TOKENS


def test_tables_that_cannot_be_used_are_refused_in_one_line(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = library.new_cache(2), prompt(random.Random(3), 3)
    with house.open() as manager:
        tables = tables_for(iter(range(32)), 3)
        manager.offload(tokens, cache, tables)
        with pytest.raises(SettingsError, match="3 groups"):
            manager.offload(tokens, cache, tables[:2])
        with pytest.raises(SettingsError, match="3 groups"):
            manager.offload(tokens, cache, [1, 2, 3])
        with manager.match(tokens) as hit, pytest.raises(SettingsError, match="block 2 of group 1"):
            hit.onboard(cache, [tables[0], [None] * 3, tables[2]])
        house.with_space(Space.check)
