"""The contract of a copier as tests. Subclass `CopierContract`, say how to make yours, and run pytest::

    class TestMyCopier(CopierContract):
        def make_copier(self, cache, arena):
            return MyCopier(cache, arena)

The promises are in `kvbm.transfer.copier.Copier`. Needs torch, and pytest: the extra `openkvbm[test]`.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kvbm.errors import KvbmError
from kvbm.testing.kv_views import (
    BLOCKS,
    LAYOUTS,
    PADDING,
    PAIRS,
    SLOTS,
    Views,
    block_bytes,
    block_parts,
    new_arena,
    scramble,
    whole_bytes,
)
from kvbm.transfer.copier import Copier
from kvbm.transfer.device_cache import DeviceCache

MOVED = [(5, 9), (6, 10), (0, 4), (8, 3)]
"""Other blocks, and the slots that they are loaded from."""
DEADLINE_S = 30.0

_each_layout = pytest.mark.parametrize("layout", LAYOUTS)


class CopierRig:
    """A copier with an engine's KV cache of one layout, full of noise, and an arena full of `PADDING`."""

    def __init__(self, views: Views, cache: DeviceCache, arena: torch.Tensor, copier: Copier) -> None:
        self.views, self.cache, self.arena, self.copier = views, cache, arena, copier

    def block(self, block: int) -> bytes:
        """The bytes of a device block."""
        return block_bytes(self.views, block)

    def blocks(self) -> list[bytes]:
        """The bytes of all device blocks."""
        return [self.block(block) for block in range(BLOCKS)]

    def slot(self, slot: int) -> bytes:
        """The bytes of a slot, as far as a block reaches."""
        return bytes(self.arena[slot, : self.cache.shard_bytes].numpy())


class CopierContract(abc.ABC):
    """The duties of every copier. Override `make_copier`, and the other methods that your device needs."""

    dtype = torch.float32

    @abc.abstractmethod
    def make_copier(self, cache: DeviceCache, arena: torch.Tensor) -> Copier:
        """A new copier between the device blocks of `cache` and the slots of `arena`."""

    def place(self, views: Views) -> Views:
        """The KV cache on your device, with the strides that `views` have. As it is, for a device that is the CPU."""
        return views

    def compute(self, work: Callable[[], object]) -> None:
        """Give your device some work of the engine's, to be done in order. At once, for a device that is the CPU."""
        work()

    def finish(self) -> None:
        """Wait until all work of the engine's is done."""
        return

    @contextmanager
    def rig(self, layout: str) -> Iterator[CopierRig]:
        views = self.place(LAYOUTS[layout](self.dtype))
        scramble(views, seed=1)
        cache = DeviceCache.from_tensors(views, BLOCKS)
        arena = new_arena(cache.shard_bytes)
        copier = self.make_copier(cache, arena)
        try:
            yield CopierRig(views, cache, arena, copier)
        finally:
            copier.close()

    @_each_layout
    def test_slots_hold_the_blocks_bytes_and_nothing_else_is_written(self, layout: str) -> None:
        with self.rig(layout) as rig:
            before = whole_bytes(rig.views)
            rig.copier.store(PAIRS)
            expected = {slot: rig.block(block) for block, slot in PAIRS}
            for slot in range(SLOTS):
                row = rig.arena[slot].numpy().tobytes()
                body = expected.get(slot, bytes([PADDING]) * rig.cache.shard_bytes)
                assert row == body.ljust(len(row), bytes([PADDING])), f"slot {slot}"
            assert whole_bytes(rig.views) == before, "a store writes nothing on the device"

    @_each_layout
    def test_a_load_writes_its_blocks_and_nothing_else(self, layout: str) -> None:
        with self.rig(layout) as rig:
            stored = {slot: rig.block(block) for block, slot in PAIRS}
            rig.copier.store(PAIRS)
            scramble(rig.views, seed=2)
            blocks, everything, arena = rig.blocks(), whole_bytes(rig.views), rig.arena.clone()
            rig.copier.load(MOVED)
            loaded = dict(MOVED)
            for block in range(BLOCKS):
                expected = stored[loaded[block]] if block in loaded else blocks[block]
                assert rig.block(block) == expected, f"block {block}"
            assert torch.equal(rig.arena, arena), "a load writes nothing into slots"
            # With the old blocks back in their places, the gaps between blocks must be as they were.
            for block, slot in MOVED:
                old = torch.frombuffer(bytearray(blocks[block]), dtype=torch.uint8)
                rig.arena[slot, : rig.cache.shard_bytes] = old
            rig.copier.load(MOVED)
            assert whole_bytes(rig.views) == everything, "a load writes nothing between blocks"

    @_each_layout
    def test_a_layers_load_brings_that_layer_alone(self, layout: str) -> None:
        with self.rig(layout) as rig:
            rig.copier.store(PAIRS)
            stored = {slot: block_parts(rig.views, block) for block, slot in PAIRS}
            scramble(rig.views, seed=2)
            expected = [block_parts(rig.views, block) for block in range(BLOCKS)]
            for name in reversed(list(rig.views)):
                rig.copier.begin_load(MOVED, layer=name).wait()
                for block, slot in MOVED:
                    expected[block][name] = stored[slot][name]
                assert [block_parts(rig.views, block) for block in range(BLOCKS)] == expected, name
            one_by_one = whole_bytes(rig.views)
            scramble(rig.views, seed=2)
            rig.copier.load(MOVED)
            assert whole_bytes(rig.views) == one_by_one, "all layers make a whole load"

    @_each_layout
    def test_all_blocks_make_the_round_trip(self, layout: str) -> None:
        with self.rig(layout) as rig:
            before = rig.blocks()
            rig.copier.store([(block, block + 1) for block in range(BLOCKS)])
            scramble(rig.views, seed=3)
            rig.copier.load([(block, BLOCKS - block) for block in range(BLOCKS)])
            assert rig.blocks() == before[::-1]

    @pytest.mark.parametrize("pair", [(BLOCKS, 0), (-1, 0), (0, SLOTS), (0, -1)])
    @pytest.mark.parametrize("begin", ["begin_store", "begin_load"])
    def test_a_pair_out_of_range_is_refused_and_nothing_is_copied(
        self, begin: str, pair: tuple[int, int]
    ) -> None:
        with self.rig("separate") as rig:
            before = whole_bytes(rig.views)
            with pytest.raises(KvbmError):
                getattr(rig.copier, begin)([(1, 1), pair])
            assert whole_bytes(rig.views) == before
            assert bool((rig.arena == PADDING).all())

    def test_a_layer_that_is_not_there_is_a_programmers_error(self) -> None:
        with self.rig("separate") as rig, pytest.raises(KeyError):
            rig.copier.begin_load([(0, 0)], layer="another model's")

    def test_no_pairs_are_no_copy(self) -> None:
        with self.rig("separate") as rig:
            before = whole_bytes(rig.views)
            rig.copier.begin_store([]).wait()
            rig.copier.begin_load([]).wait()
            assert whole_bytes(rig.views) == before
            assert bool((rig.arena == PADDING).all())

    def test_a_copy_that_is_over_says_so(self) -> None:
        with self.rig("LBNHC") as rig:
            for begin in (rig.copier.begin_store, rig.copier.begin_load):
                copying = begin(PAIRS)
                copying.wait()
                assert copying.done() and copying.done()
                copying.wait()  # a wait for copies that have ended returns at once

    def test_loads_are_over_in_the_order_in_which_they_were_begun(self) -> None:
        with self.rig("LBNHC") as rig:
            rig.copier.store(PAIRS)
            begun = [rig.copier.begin_load([pair], layer=name) for pair in MOVED for name in rig.views]
            begun[-1].wait()
            assert all(copying.done() for copying in begun)

    def test_a_store_takes_what_was_written_before_its_mark(self) -> None:
        with self.rig("LBNHC") as rig:
            self.compute(lambda: scramble(rig.views, seed=4))
            copying = rig.copier.begin_store(PAIRS, rig.copier.mark())
            rig.copier.hold(copying)
            self.compute(lambda: scramble(rig.views, seed=5))
            copying.wait()
            self.finish()
            scramble(rig.views, seed=4)
            assert [rig.slot(slot) for _, slot in PAIRS] == [rig.block(block) for block, _ in PAIRS]

    def test_a_load_comes_after_its_mark_and_before_what_it_holds(self) -> None:
        with self.rig("LBNHC") as rig:
            rig.copier.store(PAIRS)
            stored = {slot: rig.block(block) for block, slot in PAIRS}
            scramble(rig.views, seed=2)
            before, seen = rig.blocks(), list[list[bytes]]()
            self.compute(lambda: seen.append(rig.blocks()))
            copying = rig.copier.begin_load(MOVED, rig.copier.mark())
            rig.copier.hold(copying)
            self.compute(lambda: seen.append(rig.blocks()))
            copying.wait()
            self.finish()
            after = [stored[dict(MOVED)[b]] if b in dict(MOVED) else before[b] for b in range(BLOCKS)]
            assert seen == [before, after]

    def test_a_thread_that_was_adopted_copies(self) -> None:
        with self.rig("LBNHC") as rig:
            mark, copied = rig.copier.mark(), threading.Event()

            def copy() -> None:
                rig.copier.adopt_thread()
                rig.copier.store(PAIRS, mark)
                copied.set()

            thread = threading.Thread(target=copy, daemon=True)
            thread.start()
            assert copied.wait(DEADLINE_S), "the thread did not copy"
            thread.join(DEADLINE_S)
            assert [rig.slot(slot) for _, slot in PAIRS] == [rig.block(block) for block, _ in PAIRS]

    def test_closing_waits_for_copies_under_way(self) -> None:
        with self.rig("LBNHC") as rig:
            rig.copier.begin_store(PAIRS, rig.copier.mark())
            rig.copier.close()
            assert [rig.slot(slot) for _, slot in PAIRS] == [rig.block(block) for block, _ in PAIRS]
            rig.copier.close()  # closing twice is no error
