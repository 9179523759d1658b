"""The library against a dict oracle: what comes back is what left, from host memory, from disk, after a restart.

What both kinds of block managers promise is asked of both: of one that keeps its blocks itself, and of a client of a
shared manager.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

import kvbm
from kvbm.library.copiers import Copiers
from kvbm.manager.space import Space
from kvbm.transfer import CpuCopier, DeviceCache
from rigs.checkout import ROOT
from rigs.library import (
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    NAMESPACE,
    SHARD_BYTES,
    LocalHouse,
    SharedHouse,
    computed,
    content,
    layout,
    new_cache,
    prompt,
)


@pytest.fixture(params=[LocalHouse, SharedHouse])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalHouse | SharedHouse]:
    """Opens block managers."""
    house: LocalHouse | SharedHouse = request.param(tmp_path)
    yield house
    house.close()


def test_random_prompts_come_back_as_they_left_or_not_at_all(house: LocalHouse | SharedHouse) -> None:
    rng = random.Random(7)
    cache = new_cache(1)
    prompts = [prompt(rng, rng.randint(1, 6)) for _ in range(24)]
    hits = 0
    # Room for a third of the blocks on the host: evictions and disk loads are the rule.
    with house.open(host=28 * 4096, disk="4MB") as manager:
        for _ in range(120):
            tokens = rng.choice(prompts)
            blocks = len(tokens) // BLOCK_TOKENS
            given = rng.choice((tokens, kvbm.Chain(layout(), NAMESPACE, tokens)))
            target, skip = rng.sample(range(DEVICE_BLOCKS), blocks), rng.choice((0, rng.randint(0, blocks)))
            with manager.match(given, skip=skip) as hit:
                arrived = hit.onboard(cache, target[skip:])
                hits += arrived
                for i in range(skip, skip + arrived):
                    assert torch.equal(content(cache, [target[i]]), computed(tokens, i))
            for i in (*range(skip), *range(skip + arrived, blocks)):
                for name, layer in zip(cache, computed(tokens, i), strict=True):
                    cache[name][target[i]] = layer[0]
            manager.offload(given, cache, target)
            house.with_space(Space.check)
        assert manager.flush()
        assert house.metrics.value("kvbm_transfer_bytes_total", source="disk", target="host") > 0
    assert hits > 100


def test_what_is_closed_says_so_and_closing_twice_is_no_error(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = new_cache(1), list(range(2 * BLOCK_TOKENS))
    manager = house.open()
    manager.offload(tokens, cache, range(2))
    with manager.match(tokens) as hit:
        manager.close()
        with pytest.raises(kvbm.KvbmError, match="closed"):
            hit.onboard(cache, range(2, 4))
    manager.close()
    with pytest.raises(kvbm.KvbmError, match="closed"):
        manager.offload(tokens, cache, range(2))


def test_a_forked_process_may_not_use_its_parents(
    house: LocalHouse | SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same memory, and another idea of what is in it."""
    cache, tokens = new_cache(1), list(range(2 * BLOCK_TOKENS))
    with house.open() as manager:
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: 1)
            for call in (lambda: manager.offload(tokens, cache, range(2)), manager.clear, manager.close):
                with pytest.raises(kvbm.KvbmError, match="after the fork"):
                    call()
        assert manager.offload(tokens, cache, range(2)) == 2


def test_slots_are_given_back_when_no_copy_writes_to_them_any_more(
    house: LocalHouse | SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt ends the call, and not the threads that copy."""
    close, filling = CpuCopier.close, list[int]()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def closing(copier: CpuCopier) -> None:
        filling.append(house.with_space(lambda space: space.host_pool.counts().filling))
        close(copier)

    with house.open() as manager:
        with monkeypatch.context() as patch:
            patch.setattr(CpuCopier, "store", interrupted)
            patch.setattr(CpuCopier, "close", closing)
            with pytest.raises(KeyboardInterrupt):
                manager.offload(list(range(2 * BLOCK_TOKENS)), new_cache(1), range(2))
        manager.status()
        assert filling == [2]
        assert house.with_space(lambda space: space.host_pool.counts().filling) == 0


def test_another_manager_finds_what_an_earlier_one_left_on_disk(house: LocalHouse | SharedHouse) -> None:
    cache, tokens, blocks = new_cache(2), list(range(5 * BLOCK_TOKENS)), [4, 9, 0, 31, 7]
    before = content(cache, blocks)
    with house.open(host="1MB", disk="1MB") as manager:
        assert manager.offload(tokens, cache, blocks) == 5
    for layer in cache.values():
        layer.zero_()
    with house.open(host="1MB", disk="1MB") as manager:
        with manager.match(tokens) as hit:
            assert (hit.blocks, hit.host, hit.disk) == (5, 0, 5)
            assert manager.metrics.value("kvbm_matched_tokens") == 0, "it is found, and nobody loads it yet"
            assert manager.metrics.value("kvbm_onboard_blocks_d2d") == 0
            assert hit.onboard(cache, blocks) == 5
        assert manager.metrics.value("kvbm_matched_tokens") == 5 * BLOCK_TOKENS
        assert manager.metrics.value("kvbm_onboard_blocks_d2d") == 5
        assert manager.metrics.value("kvbm_onboard_blocks_h2d") == 0
        moved = manager.metrics.value("kvbm_transfer_bytes_total", source="host", target="device")
        assert moved == 5 * layout().shard_bytes
    assert torch.equal(content(cache, blocks), before)


def test_extras_keep_tenants_apart(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = new_cache(3), list(range(2 * BLOCK_TOKENS))
    with house.open(host="1MB") as manager:
        manager.offload(tokens, cache, [0, 1], extras=b"tenant-a")
        with manager.match(tokens, extras=b"tenant-b") as hit:
            assert hit.blocks == 0
        with manager.match(tokens, extras=b"tenant-a") as hit:
            assert hit.blocks == 2


def test_what_the_device_holds_is_not_loaded_again(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = new_cache(5), list(range(6 * BLOCK_TOKENS))
    before = content(cache, [0, 1, 2, 3, 4, 5])
    with house.open(host="1MB", disk="1MB") as manager:
        manager.offload(tokens, cache, list(range(6)))
    with house.open(host="1MB", disk="1MB") as manager:
        rest = content(cache, list(range(12, DEVICE_BLOCKS)))
        with manager.match(tokens, skip=4) as hit:
            assert (hit.blocks, hit.tokens, hit.disk) == (2, 2 * BLOCK_TOKENS, 2)
            assert hit.onboard(cache, [10, 11, 12, 13]) == 2, "blocks beyond the hit are left alone"
        assert torch.equal(content(cache, [10, 11]), before[:, 4:])
        assert torch.equal(content(cache, list(range(12, DEVICE_BLOCKS))), rest)
        moved = house.metrics.value("kvbm_transfer_bytes_total", source="disk", target="host")
        assert moved == 2 * layout().block_bytes, "and nothing was read for the blocks before it"
        for skip in (6, 7, 100):
            with manager.match(tokens, skip=skip) as hit:
                assert (hit.blocks, hit.onboard(cache, [])) == (0, 0)
        with (
            pytest.raises(kvbm.SettingsError, match="skip=-1 cannot be used"),
            manager.match(tokens, skip=-1),
        ):
            pass


def test_a_chain_is_taken_for_its_tokens_and_grows_block_by_block(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = new_cache(6), list(range(500, 500 + 5 * BLOCK_TOKENS + 3))
    with house.open(host="1MB") as manager:
        chain, copied = kvbm.Chain(layout(), NAMESPACE), []
        for token in tokens:
            chain.append(token)
            copied.append(manager.offload(chain, cache, range(20, 20 + chain.blocks)))
        assert sum(copied) == 5, "each block once, when it is full"
        assert [i + 1 for i, count in enumerate(copied) if count] == [8, 16, 24, 32, 40]
        for found in (tokens, chain):
            with manager.match(found) as hit:
                assert hit.onboard(cache, range(5)) == 5
            assert torch.equal(content(cache, list(range(5))), content(cache, list(range(20, 25))))


def test_a_chain_of_something_else_is_refused(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = new_cache(6), list(range(2 * BLOCK_TOKENS))
    wide = kvbm.BlockLayout(block_tokens=2 * BLOCK_TOKENS, shard_bytes=2 * SHARD_BYTES)
    other = kvbm.Namespace(model="test", fields=(("weights", "2"),))
    with house.open(host="1MB") as manager:
        for chain in (kvbm.Chain(wide, NAMESPACE, tokens), kvbm.Chain(layout(), other, tokens)):
            with pytest.raises(kvbm.KvbmError, match="another namespace or block size"):
                manager.offload(chain, cache, [0, 1])
        salted = kvbm.Chain(layout(), NAMESPACE, tokens, extras=b"a")
        assert manager.offload(salted, cache, [0, 1]) == 2
        with manager.match(tokens, extras=b"a") as hit, manager.match(salted, extras=b"a") as again:
            assert hit.blocks == again.blocks == 2
        with manager.match(tokens) as hit:
            assert hit.blocks == 0
        with (
            pytest.raises(kvbm.KvbmError, match="a chain has the extras"),
            manager.match(salted, extras=b"b"),
        ):
            pass


def test_what_host_memory_gave_up_is_kept_again(house: LocalHouse | SharedHouse) -> None:
    """A sequence that is offered again may have lost its start meanwhile, and what follows without it is of no use."""
    cache, tokens = new_cache(7), list(range(6 * BLOCK_TOKENS))
    keys = kvbm.Chain(layout(), NAMESPACE, tokens).keys
    with house.open(host="1MB") as manager:
        manager.offload(tokens, cache, range(6))
        for missing in ([0], [2, 3], [5], [0, 2, 4]):
            house.with_space(partial(evict, keys=[keys[i] for i in missing]))
            assert manager.offload(tokens, cache, range(6)) == len(missing)
            with manager.match(tokens) as hit:
                assert hit.onboard(cache, range(10, 16)) == 6
            assert torch.equal(content(cache, range(10, 16)), content(cache, range(6)))
        house.with_space(Space.check)


def evict(space: Space, keys: list[kvbm.BlockKey]) -> None:
    for key in keys:
        slot = space.host_pool.find(key)
        assert slot is not None
        space.host_pool.evict(slot)


def test_a_cache_of_another_shape_is_refused_in_one_line(house: LocalHouse | SharedHouse) -> None:
    cache = {name: layer[:, :1] for name, layer in new_cache(4).items()}
    with house.open(host="1MB") as manager:
        with pytest.raises(kvbm.SettingsError, match=r"layout\.shard_bytes=\d+ cannot be used: \d+") as error:
            manager.offload(list(range(BLOCK_TOKENS)), cache, [0])
        assert "\n" not in str(error.value)
        # What failed holds nothing.
        house.with_space(Space.check)
        assert house.with_space(lambda space: space.host_pool.counts().filling) == 0


def test_a_disk_tier_needs_a_namespace_that_says_whose_bytes_they_are(tmp_path: Path) -> None:
    with pytest.raises(kvbm.SettingsError, match="namespace=None cannot be used: with a disk tier"):
        kvbm.BlockManager(layout(), host="1MB", disk="1MB", disk_dir=str(tmp_path))


def test_a_host_size_below_one_block_is_refused() -> None:
    with pytest.raises(kvbm.SettingsError, match="host='1KB' cannot be used: at least one block"):
        kvbm.BlockManager(layout(), host="1KB")
    with pytest.raises(kvbm.SettingsError, match=r"host='2\.5' cannot be used: a whole number of bytes"):
        kvbm.BlockManager(layout(), host=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["8KB", 8000])
def test_a_disk_below_one_block_is_refused_as_it_was_written(tmp_path: Path, size: str | int) -> None:
    options = {"host": "1MB", "disk_dir": str(tmp_path), "namespace": NAMESPACE}
    with pytest.raises(kvbm.SettingsError, match=r"^disk=.* cannot be used: at least [0-9.]+ GB ") as error:
        kvbm.BlockManager(layout(), disk=size, **options)
    assert (error.value.field, error.value.value) == ("disk", size)
    with pytest.raises(kvbm.SettingsError, match=r"^disk='8KB' "):
        kvbm.BlockManager(layout(), **{**options, "host": None}, disk="8KB")


def test_a_disk_directory_that_cannot_be_used_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = {"disk": "1MB", "disk_dir": str(tmp_path / "file"), "namespace": NAMESPACE}
    with pytest.raises(kvbm.SettingsError, match=r"^disk_dir='.*/file' cannot be used"):
        kvbm.BlockManager(layout(), host="1MB", **options)


def test_policies_that_cannot_be_used_are_refused_by_their_names(tmp_path: Path) -> None:
    for options, reason in (
        ({"eviction": "clock"}, "eviction='clock' cannot be used: one of: gittins, lru"),
        ({"disk_admission": "clock"}, "disk_admission='clock' cannot be used: one of: filter, all, ghost"),
        ({"disk_write_budget": 4096}, "disk_write_budget=4096 cannot be used: 0, or at least"),
    ):
        with pytest.raises(kvbm.SettingsError, match=reason):
            kvbm.BlockManager(
                layout(), host="1MB", disk="1MB", disk_dir=str(tmp_path), namespace=NAMESPACE, **options
            )
    assert not list(tmp_path.iterdir()), "before any tier was made"


def written_blocks(house: LocalHouse | SharedHouse, manager: kvbm.BlockManager) -> float:
    assert manager.flush()
    return house.metrics.value("kvbm_offload_blocks_h2d")


@pytest.mark.parametrize(
    ("disk_admission", "first", "second"), [("all", 5, 5), ("filter", 0, 5), ("ghost", 0, 5)]
)
def test_what_may_enter_disk_is_a_policys_choice(
    house: LocalHouse | SharedHouse, disk_admission: str, first: int, second: int
) -> None:
    cache, tokens = new_cache(2), list(range(5 * BLOCK_TOKENS))
    with house.open(host="1MB", disk="1MB", disk_admission=disk_admission) as manager:
        manager.offload(tokens, cache, list(range(5)))
        assert written_blocks(house, manager) == first
        with manager.match(tokens) as hit:
            assert hit.host == 5
        house.with_space(Space.pump)
        assert written_blocks(house, manager) == second


def test_no_more_is_written_than_the_budget_allows(house: LocalHouse | SharedHouse) -> None:
    cache, now_s = new_cache(2), 0.0
    budget = 3 * 24 * layout().block_bytes
    with house.open(host="1MB", disk="1MB", disk_write_budget=budget, clock=lambda: now_s) as manager:
        manager.offload(list(range(5 * BLOCK_TOKENS)), cache, list(range(5)))
        assert written_blocks(house, manager) == 3, "a 24th of the day's at once"
        now_s = 3600.0
        manager.offload(list(range(900, 900 + 5 * BLOCK_TOKENS)), cache, list(range(5)))
        assert written_blocks(house, manager) == 5, "and the rest over the day"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "library.py"
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.count("equal: True") == 2


def test_a_hit_that_ended_copies_nothing(house: LocalHouse | SharedHouse) -> None:
    cache, tokens = new_cache(1), list(range(2 * BLOCK_TOKENS))
    with house.open(host=2 * 4096 * 2) as manager:
        manager.offload(tokens, cache, [0, 1])
        with manager.match(tokens) as hit:
            assert hit.onboard(cache, [4, 5]) == 2
        before = content(cache, [6, 7])
        with pytest.raises(kvbm.KvbmError, match="are no longer held"):
            hit.onboard(cache, [6, 7])
        assert torch.equal(content(cache, [6, 7]), before)


def test_caches_laid_out_differently_do_not_exchange_blocks(house: LocalHouse | SharedHouse) -> None:
    """As many bytes in another order would come back shuffled."""
    cache, tokens = new_cache(1), list(range(BLOCK_TOKENS))
    turned = {name: tensor.transpose(2, 3).contiguous() for name, tensor in cache.items()}
    with house.open(host="1MB") as manager:
        manager.offload(tokens, cache, [0])
        with manager.match(tokens) as hit, pytest.raises(kvbm.KvbmError, match="kv_cache"):
            hit.onboard(turned, [0])


def test_many_caches_are_served(house: LocalHouse | SharedHouse) -> None:
    tokens = list(range(BLOCK_TOKENS))
    with house.open(host="1MB") as manager:
        caches = [new_cache(seed) for seed in range(7)]
        manager.offload(tokens, caches[0], [0])
        for cache in (*caches, *caches):
            with manager.match(tokens) as hit:
                assert hit.onboard(cache, [3]) == 1
            assert torch.equal(content(cache, [3]), content(caches[0], [0]))


def test_only_a_few_copiers_are_kept() -> None:
    made: list[MagicMock] = []

    def make(cache: DeviceCache) -> MagicMock:
        made.append(MagicMock(cache=cache))
        return made[-1]

    copiers, caches = Copiers(layout(), make), [new_cache(seed) for seed in range(7)]
    for cache in (*caches, *caches[-2:]):
        copiers.of(cache)
    assert len(copiers) == 4
    assert len(made) == 7, "the last ones were kept"
    assert [copier.close.called for copier in made] == [True] * 3 + [False] * 4
    copiers.close()
    assert all(copier.close.called for copier in made)


def test_another_order_of_dimensions_at_the_same_address_is_another_cache() -> None:
    """A new cache may lie where an old one lay: its blocks would come back shuffled."""
    square = kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=8 * 8 * 4)
    copiers, tensor = Copiers(square, lambda cache: MagicMock(cache=cache)), torch.zeros(4, 8, 8)
    copiers.of({"layer": tensor})
    with pytest.raises(kvbm.SettingsError, match="kv_cache"):
        copiers.of({"layer": tensor.transpose(1, 2)})
