"""Where blocks lie: every layout is found, described by its content, or refused in one line."""

from __future__ import annotations

import pytest
import torch

from kvbm.errors import KvbmError
from kvbm.transfer import DeviceCache
from kvbm.transfer.device_cache import Region

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 7, 2, 4, 16


def stacked(order: str, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    """All layers in one allocation whose axes lie in memory as `order` says; views `[B, H, N, C]`."""
    sizes = {"L": LAYERS, "B": blocks, "H": HEADS, "N": TOKENS, "C": WIDTH}
    whole = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layer.{index}": logical[index] for index in range(LAYERS)}


def separate(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"layer.{index}": torch.zeros(shape, dtype=dtype) for index in range(LAYERS)}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_layers_of_one_allocation_become_one_region(order: str) -> None:
    cache = DeviceCache.from_tensors(stacked(order), BLOCKS)
    assert len(cache.regions) == 1
    assert cache.shard_bytes == LAYERS * HEADS * TOKENS * WIDTH * 4
    assert cache.block_count == BLOCKS


@pytest.mark.parametrize(
    ("order", "run_words"),
    [
        ("BLHNC", LAYERS * HEADS * TOKENS * WIDTH // 2),
        ("LBHNC", HEADS * TOKENS * WIDTH // 2),
        ("LHBNC", TOKENS * WIDTH // 2),
    ],
)
def test_runs_are_as_long_as_memory_allows(order: str, run_words: int) -> None:
    assert DeviceCache.from_tensors(stacked(order), BLOCKS).regions[0].device.shape[-1] == run_words


def test_layers_of_their_own_allocations_are_regions_one_behind_the_other() -> None:
    cache = DeviceCache.from_tensors(separate((BLOCKS, HEADS, TOKENS, WIDTH)), BLOCKS)
    page_bytes = HEADS * TOKENS * WIDTH * 4
    assert [region.slot_offset_bytes for region in cache.regions] == [0, page_bytes, 2 * page_bytes]


@pytest.mark.parametrize(
    "shape",
    [
        (2, BLOCKS, TOKENS, HEADS, 8),
        (BLOCKS, 2, TOKENS, HEADS, 8),
        (BLOCKS, TOKENS, 24),
        (BLOCKS, 1, TOKENS, 24),
    ],
)
def test_older_shapes_and_mla(shape: tuple[int, ...]) -> None:
    cache = DeviceCache.from_tensors({"a": torch.zeros(shape)}, BLOCKS)
    assert cache.shard_bytes == torch.zeros(shape).nbytes // BLOCKS
    assert cache.regions[0].device.shape[0] == BLOCKS


def test_two_blocks_with_keys_and_values_first_are_told_apart_or_refused() -> None:
    assert DeviceCache.from_tensors({"a": torch.zeros(2, 3, 4, 2, 8)}, 3).shard_bytes == 2 * 4 * 2 * 8 * 4
    with pytest.raises(KvbmError, match="either of the first two axes"):
        DeviceCache.from_tensors({"a": torch.zeros(2, 2, 4, 2, 8)}, 2)


def test_kernel_blocks_belong_to_the_block_that_they_divide() -> None:
    tensor = torch.arange(6 * 2 * 4, dtype=torch.int32).view(6, 1, 2, 4)
    cache = DeviceCache.from_tensors({"a": tensor}, 3)
    assert cache.shard_bytes == 2 * 2 * 4 * 4
    assert cache.regions[0].device[1].contiguous().view(torch.int32).flatten().tolist() == list(range(16, 32))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5, 2, 4, 8), "no axis of 7 blocks"),
        (torch.zeros(2, 7, 4, 8), "no axis of 7 blocks"),  # heads first is no layout of any engine
        (torch.zeros(3, 7, 4, 2, 8), "no axis of 7 blocks"),
        (torch.zeros(5, 7, 7, 7), "no axis of 7 blocks"),
        (torch.zeros(7, 2, 0, 8), "holds no bytes"),
        (torch.zeros(()), "no axis|holds no"),
        (torch.zeros(7, 8).to_sparse(), "sparse"),
        (torch.zeros(1, 8).expand(7, 8), "share bytes"),
        (torch.zeros(100).as_strided((7, 16), (8, 1)), "share bytes"),
        (torch.zeros(100).as_strided((7, 2, 8), (14, 4, 1)), "share bytes"),
    ],
)
def test_what_cannot_be_addressed_is_refused_in_one_line(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(KvbmError, match=message) as caught:
        DeviceCache.from_tensors({"model.layers.0": tensor}, 7)
    assert "\n" not in str(caught.value)
    assert "model.layers.0" in str(caught.value)


def test_no_layers_and_several_devices_are_refused() -> None:
    with pytest.raises(KvbmError, match="no layer"):
        DeviceCache.from_tensors({}, 7)
    with pytest.raises(KvbmError, match="cpu, meta"):
        DeviceCache.from_tensors({"a": torch.zeros(7, 8), "b": torch.zeros(7, 8, device="meta")}, 7)


@pytest.mark.parametrize("shift_blocks", [1, 3])
def test_layers_that_overlay_other_blocks_are_refused(shift_blocks: int) -> None:
    whole = torch.zeros(20 * 16)
    first = whole.as_strided((7, 16), (16, 1))
    second = whole.as_strided((7, 16), (16, 1), shift_blocks * 16)
    with pytest.raises(KvbmError, match="b lie on other blocks of a"):
        DeviceCache.from_tensors({"a": first, "b": second}, 7)


def test_overlaid_layers_with_another_distance_between_blocks_are_refused() -> None:
    whole = torch.zeros(20 * 16)
    with pytest.raises(KvbmError, match="lie on other blocks"):
        DeviceCache.from_tensors(
            {"a": whole.as_strided((7, 16), (16, 1)), "b": whole.as_strided((7, 16), (32, 1))}, 7
        )


def test_equal_views_are_kept_once() -> None:
    tensor = torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)
    once = DeviceCache.from_tensors({"a": tensor}, BLOCKS)
    twice = DeviceCache.from_tensors({"a": tensor, "b": tensor.view(tensor.shape)}, BLOCKS)
    assert twice.shard_bytes == once.shard_bytes
    assert len(twice.regions) == 1
    assert "a=b" in twice.description


@pytest.mark.parametrize("small_first", [True, False])
def test_a_view_of_a_part_of_another_ones_block_is_kept_within_it(small_first: bool) -> None:
    whole = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    large, small = whole.view(BLOCKS, 1, 1, 64), whole.as_strided((BLOCKS, 1, 1, 40), (64, 40, 40, 1))
    views = {"s": small, "l": large} if small_first else {"l": large, "s": small}
    assert DeviceCache.from_tensors(views, BLOCKS).shard_bytes == 64


def test_padding_between_blocks_is_not_part_of_a_block() -> None:
    whole = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    view = whole.as_strided((BLOCKS, 1, 1, 40), (64, 40, 40, 1))
    assert DeviceCache.from_tensors({"a": view}, BLOCKS).shard_bytes == 40


def test_description_names_what_fixes_the_bytes() -> None:
    cache = DeviceCache.from_tensors(stacked("LBNHC", torch.bfloat16), BLOCKS)
    assert cache.description == "3*bfloat16[2,4,16]@1,0,2:layer.0,layer.1,layer.2"


def test_description_differs_with_the_bytes_and_only_with_them() -> None:
    def describe(views: dict[str, torch.Tensor], blocks: int = BLOCKS) -> str:
        return DeviceCache.from_tensors(views, blocks).description

    one = describe(stacked("LBHNC"))
    assert describe(stacked("LBHNC", blocks=BLOCKS + 2), BLOCKS + 2) == one
    assert describe(stacked("BLHNC")) == one  # the slot's bytes are the same
    assert describe(separate((BLOCKS, HEADS, TOKENS, WIDTH))) == one
    others = [
        describe(stacked("LBNHC")),
        describe(stacked("LBHNC", torch.int32)),
        describe({f"x.{name}": view for name, view in stacked("LBHNC").items()}),
        describe(dict(reversed(list(stacked("LBHNC").items())))),
        describe(separate((BLOCKS, HEADS, TOKENS, 2 * WIDTH))),
        describe(separate((BLOCKS, HEADS * TOKENS, WIDTH))),
        describe(dict(list(stacked("LBHNC").items())[:2])),
    ]
    assert len({one, *others}) == len(others) + 1


def test_strides_of_axes_of_size_one_mean_nothing() -> None:
    plain = torch.zeros(BLOCKS, 1, TOKENS, WIDTH)
    odd = plain.as_strided(plain.shape, (TOKENS * WIDTH, 3, WIDTH, 1))
    one, other = (DeviceCache.from_tensors({"a": view}, BLOCKS) for view in (plain, odd))
    assert one.description == other.description
    assert one.regions[0].device.stride() == other.regions[0].device.stride()


def places(region: Region) -> list[tuple[int, int]]:
    """(address, offset in the slot) of every byte of block 1, in the order of the slot."""
    view = region.device
    word = view.element_size()
    start = view.storage_offset()
    offsets = torch.arange(view.untyped_storage().nbytes() // word).as_strided(
        view.shape, view.stride(), start
    )[1]
    return [
        (
            view.untyped_storage().data_ptr() + index * word + byte,
            region.slot_offset_bytes + place * word + byte,
        )
        for place, index in enumerate(offsets.flatten().tolist())
        for byte in range(word)
    ]


LAYERED = {
    **{order: (lambda order=order: stacked(order)) for order in ("LBHNC", "LBNHC", "LHBNC")},
    **{order: (lambda order=order: stacked(order)) for order in ("BLHNC", "BLNHC", "BHLNC")},
    "separate": lambda: separate((BLOCKS, HEADS, TOKENS, WIDTH)),
    "kv-first": lambda: separate((2, BLOCKS, TOKENS, HEADS, 8), torch.bfloat16),
    "odd": lambda: separate((BLOCKS, 1, 3, 5), torch.uint8),
    "mixed": lambda: {**separate((BLOCKS, HEADS, TOKENS, WIDTH)), "odd": torch.zeros(BLOCKS, 7)},
}


@pytest.mark.parametrize("layout", LAYERED)
def test_layers_are_the_same_bytes_as_regions(layout: str) -> None:
    views = LAYERED[layout]()
    cache = DeviceCache.from_tensors(views, BLOCKS)
    assert list(cache.layers) == list(views)
    by_layer = [place for name in views for place in places(cache.layers[name])]
    assert sorted(by_layer) == sorted(place for region in cache.regions for place in places(region))
    assert [offset for _, offset in by_layer] == list(range(cache.shard_bytes))


@pytest.mark.parametrize("layout", LAYERED)
def test_a_layers_bytes_are_its_views(layout: str) -> None:
    views = LAYERED[layout]()
    cache = DeviceCache.from_tensors(views, BLOCKS)
    for name, view in views.items():
        block = view[:, 1] if view.shape[0] == 2 else view[1]
        word = view.element_size()
        offsets = torch.arange(view.untyped_storage().nbytes() // word).as_strided(
            block.shape, block.stride(), block.storage_offset()
        )
        start = view.untyped_storage().data_ptr()
        expected = {start + o * word + byte for o in offsets.flatten().tolist() for byte in range(word)}
        assert {address for address, _ in places(cache.layers[name])} == expected, name


def test_overlaid_layers_share_a_region() -> None:
    whole = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    large, small = whole.view(BLOCKS, 1, 1, 64), whole.as_strided((BLOCKS, 1, 1, 40), (64, 40, 40, 1))
    cache = DeviceCache.from_tensors(
        {"s": small, "l": large, "same": large, "o": torch.zeros(BLOCKS, 8)}, BLOCKS
    )
    assert set(cache.layers) == {"s", "l", "same", "o"}
    assert cache.layers["s"] is cache.layers["l"] is cache.layers["same"]
    assert cache.layers["l"].bytes_per_block == 64
    assert cache.layers["o"].slot_offset_bytes == 64
