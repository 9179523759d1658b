"""Copies beside the forward pass: what stores cost the steps beside them, and what loads cost before or within one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbm.transfer import Copier, DeviceCache, DeviceEvent

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from mini_model import Config, Model, Step

from gpu_rig import Rig, Sizes, Trial, shared_arena

BLOCK_TOKENS = 16
DECODE_BAR = 0.03
"""So much slower may a decode step be with stores beside it."""
STORES_ADVICE = "DYN_KVBM_OFFLOAD_MODE=lazy stores only what leaves the device"


def large_model(rig: Rig, sizes: Sizes) -> Model:
    """Random weights of the size of a 1.7 B Qwen3; on a CPU of hardly any."""
    config = Config(
        layers=sizes.layers,
        hidden=2048 if rig.cuda else 64,
        intermediate=6144 if rig.cuda else 128,
        heads=16 if rig.cuda else 2,
        kv_heads=8 if rig.cuda else 1,
        head_dim=128 if rig.cuda else 32,
        qk_norm=True,
    )
    return Model.random(config, str(rig.device), torch.bfloat16)


def kv_of(model: Model, rig: Rig, blocks: int) -> torch.Tensor:
    """KV of so many blocks, blocks outermost as in the mini engine: `[blocks, layers, 2, tokens, KV heads, D]`."""
    config = model.config
    shape = (blocks, config.layers, 2, BLOCK_TOKENS, config.kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=torch.bfloat16, device=rig.device)


def step_of(rig: Rig, sequences: int, start: int, count: int) -> Step:
    """`count` tokens of each sequence, from position `start` on. Sequences lie one behind the other in the cache."""
    width = -(-(start + count) // BLOCK_TOKENS)
    positions = range(start, start + count)
    values = (
        [[5 + position % 1000 for position in positions]] * sequences,
        [list(positions)] * sequences,
        [[row * width + i for i in range(width)] for row in range(sequences)],
        list(range(sequences * count)),
        [row * width + position // BLOCK_TOKENS for row in range(sequences) for position in positions],
        [position % BLOCK_TOKENS for _ in range(sequences) for position in positions],
        [(row + 1) * count - 1 for row in range(sequences)],
    )
    return Step(*(torch.tensor(value, device=rig.device) for value in values))


def time_stores(trial: Trial) -> None:
    """Steps with and without stores beside them, as eager offloading gives them; lazy offloading has at best none.

    A decode step gets more than an engine's (four sequences fill a block in four steps), a prefill step what it fills.
    """
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    model = large_model(rig, sizes)
    prefill = min(512, sizes.tokens // 2)
    for title, sequences, count, stored, bar in (
        ("decode step", 4, 1, 8, DECODE_BAR),
        (f"prefill step of {prefill} tokens", 1, prefill, prefill // BLOCK_TOKENS, None),
    ):
        step = step_of(rig, sequences, sizes.tokens - count, count)
        kv = kv_of(model, rig, int(step.tables.max()) + 1)
        cache = DeviceCache.from_tensors({"kv": kv}, len(kv))
        steps = Steps(rig, model, kv, step)
        with rig.copier(cache, shared_arena(len(kv), cache.shard_bytes), "auto") as copier:
            storing = StoresBeside(copier, len(kv), stored)
            alone_s, beside_s = rig.median_s(
                partial(steps.run, sizes.steps, copier.mark),
                partial(steps.run, sizes.steps, copier.mark, storing.store),
            )
            result.add(title, alone_s / sizes.steps * 1e3, "ms")
            result.add(
                f"{title}, {stored} blocks stored beside each",
                beside_s / alone_s - 1,
                "slower",
                bar,
                at_most=True,
                advice=STORES_ADVICE,
            )
            with storing_all_the_time(copier, cache) as stored_bytes_per_s:
                full_s = rig.median_s(partial(steps.run, sizes.steps, copier.mark))[0]
                rate = stored_bytes_per_s()
            result.add(f"{title}, stores at all the link's speed", full_s / alone_s - 1, "slower")
            result.add(f"{title}, those stores", rate / 1e9, "GB/s")
            if rig.cuda:  # a rehearsal's steps may be over before a single batch is
                result.check(f"{title}: the stores beside it went on", rate > 0)
            result.check(f"{title}: it computed something", steps.finite)


class Steps:
    """The same step again and again.

    On a card the step is replayed as a CUDA graph, as engines do: else Python's part of it would be what is timed.
    """

    def __init__(self, rig: Rig, model: Model, kv: torch.Tensor, step: Step) -> None:
        self.finite = False
        self._forward: Callable[[], object] = partial(self._compute, model, kv, step)
        self._forward()
        if rig.cuda:
            rig.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._forward()
            self._forward = graph.replay

    def _compute(self, model: Model, kv: torch.Tensor, step: Step) -> None:
        self._out = model.forward(kv, step)

    def run(
        self,
        steps: int,
        before: Callable[[], Any] = lambda: None,
        after: Callable[[Any], object] = lambda begun: None,
    ) -> None:
        """`after` gets what `before` gave, when the step was put on the device. Each step ends as an engine's does: the
        tokens are read."""
        for _ in range(steps):
            begun = before()
            self._forward()
            after(begun)
            self._out.argmax(-1).tolist()
        self.finite = bool(self._out.isfinite().all())


class StoresBeside:
    """Stores of so many blocks, other ones every time."""

    def __init__(self, copier: Copier, blocks: int, stored: int) -> None:
        self._copier, self._blocks, self._stored = copier, blocks, stored
        self._place = 0

    def store(self, mark: DeviceEvent | None) -> None:
        """Begin the next ones behind the mark."""
        picked = [(self._place + i) % self._blocks for i in range(self._stored)]
        self._place = (self._place + self._stored) % self._blocks
        self._copier.begin_store([(block, block) for block in picked], mark)


@contextmanager
def storing_all_the_time(copier: Copier, cache: DeviceCache) -> Iterator[Callable[[], float]]:
    """A thread that stores one batch of blocks after the other, and waits for nothing that is computed meanwhile.

    Gives the bytes per second so far; raises at the end what the thread raised.
    """
    over, before, batches = threading.Event(), copier.mark(), 0
    pairs = [(block, block) for block in range(min(64, cache.block_count))]
    begun_s = time.perf_counter()

    def run() -> None:
        nonlocal batches
        copier.adopt_thread()
        while not over.is_set():
            copier.begin_store(pairs, before).wait()
            batches += 1

    def bytes_per_s() -> float:
        return batches * len(pairs) * cache.shard_bytes / (time.perf_counter() - begun_s)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield bytes_per_s
        finally:
            over.set()
        running.result()


def check_layerwise(trial: Trial) -> None:
    """The tail of a prompt is computed, its prefix comes from host memory: before the step, or layer by layer in it."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    model = large_model(rig, sizes)
    prefix_blocks = sizes.tokens // BLOCK_TOKENS * 3 // 4
    prefix = prefix_blocks * BLOCK_TOKENS
    tail = step_of(rig, 1, prefix, sizes.tokens - prefix)
    kv = kv_of(model, rig, int(tail.tables.max()) + 1)
    cache = DeviceCache.from_tensors({f"layers.{i}": kv[:, i] for i in range(model.config.layers)}, len(kv))
    arena = shared_arena(prefix_blocks, cache.shard_bytes)
    pairs = [(block, prefix_blocks - 1 - block) for block in range(prefix_blocks)]
    model.forward(kv, step_of(rig, 1, 0, prefix))
    expected = model.forward(kv, tail)
    with (
        rig.copier(cache, arena, "auto") as copier,
        ThreadPoolExecutor(1, initializer=copier.adopt_thread) as beside,
    ):
        copier.store(pairs, copier.mark())

        def alone() -> torch.Tensor:
            return model.forward(kv, tail)

        def before() -> torch.Tensor:
            copier.hold(copier.begin_load(pairs, copier.mark()))
            return model.forward(kv, tail)

        def layerwise() -> torch.Tensor:
            mark = copier.mark()
            loads = [beside.submit(copier.begin_load, pairs, mark, layer) for layer in cache.layers]
            return model.forward(kv, tail, lambda i: copier.hold(loads[i].result()))

        for title, load in (("before the step", before), ("layer by layer", layerwise)):
            kv[:prefix_blocks].zero_()
            result.check(f"logits of a prompt loaded {title}", torch.equal(load(), expected))
        kv[:prefix_blocks].zero_()
        result.check("without its prefix a prompt has other logits", not torch.equal(alone(), expected))
        alone_s, before_s, layerwise_s = rig.median_s(alone, before, layerwise)
    what = f"prefill step, {prefix} tokens before it"
    result.add(f"{what} on the device", alone_s * 1e3, "ms")
    result.add(f"{what} loaded first", before_s / alone_s - 1, "slower")
    result.add(f"{what} loaded layer by layer", layerwise_s / alone_s - 1, "slower")
