"""Is it worth while to keep all layers of a block side by side: what attention pays for it, and what copies gain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch calls it

from gpu_copies import both
from gpu_rig import Rig, Trial, shared_arena, views
from kvbm.transfer import DeviceCache

ORDERS = {"layers outermost": "LBNHC", "blocks outermost": "BLNHC"}
SEQUENCES = 8
ATTENTION_BAR = 0.01
GAIN_BAR = 1.1


def compare_layouts(trial: Trial) -> None:
    """A decode step's reads of KV in both layouts, all layers one after the other, and 64 blocks down and up."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    width = -(-sizes.tokens // 16)
    blocks = max(SEQUENCES * width, 2 * sizes.blocks)
    layers = {title: views(rig, order, sizes, blocks) for title, order in ORDERS.items()}
    shuffled = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    tables = shuffled[: SEQUENCES * width].view(SEQUENCES, width).to(rig.device)
    costs = []
    for what, work in (("attention of a decode step", attend), ("a plain read of all KV", read)):
        reads = (replayed(rig, list(caches.values()), tables, work) for caches in layers.values())
        outer_s, inner_s = rig.median_device_s(*reads)
        costs.append(inner_s / outer_s - 1)
        for title, taken_s in zip(ORDERS, (outer_s, inner_s), strict=True):
            result.add(f"{what}, {title}", taken_s * 1e3, "ms")
    result.add("block-outermost costs a plain read", costs[1], "slower")
    result.add(
        "block-outermost costs attention",
        costs[0],
        "slower",
        ATTENTION_BAR,
        at_most=True,
        advice="leave DYN_KVBM_KV_LAYOUT unset: every step would pay for what copies gain",
    )
    gains = time_layouts(trial, layers, blocks)
    if max(costs) <= ATTENTION_BAR and min(gains) >= GAIN_BAR:
        result.suggest(
            f"DYN_KVBM_KV_LAYOUT=block is worth setting here: attention takes {costs[0]:+.1%}, and copies are "
            f"{gains[0]:.2f} times as fast down and {gains[1]:.2f} times up (torch's attention; measure the engine's)"
        )


def time_layouts(
    trial: Trial, layers: dict[str, dict[str, torch.Tensor]], blocks: int
) -> tuple[float, float]:
    """How many times as fast copies are with blocks outermost, down and up, with the host's part."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    pairs = [((37 * i) % blocks, i) for i in range(sizes.blocks)]
    times: dict[str, list[float]] = {}
    for title, caches in layers.items():
        cache = DeviceCache.from_tensors(caches, blocks)
        with rig.copier(cache, shared_arena(sizes.blocks, cache.shard_bytes), "auto") as copier:
            times[title] = rig.median_s(*both(copier, pairs))
        for direction, taken_s in zip(("down", "up"), times[title], strict=True):
            copied = len(pairs) * cache.shard_bytes
            result.add(
                f"copies with {title}, with the host's part, {direction}", copied / taken_s / 1e9, "GB/s"
            )
    down, up = (
        outer_s / inner_s for outer_s, inner_s in zip(*(times[title] for title in ORDERS), strict=True)
    )
    result.add("copies with blocks outermost, down", down, "× the speed")
    result.add("copies with blocks outermost, up", up, "× the speed")
    return down, up


def attend(layer: torch.Tensor, tables: torch.Tensor) -> None:
    """One layer's attention of a decode step: the sequences' blocks are gathered, and attended to.

    `layer` is bf16 `[blocks, heads, tokens, K and V]`.
    """
    dim = layer.shape[-1] // 2
    # [S, N, heads, tokens, 2 × D] → [S, heads, N × tokens, 2 × D]
    gathered = layer[tables].transpose(1, 2).flatten(2, 3)
    query = gathered[:, :, :1, :dim]
    F.scaled_dot_product_attention(query, gathered[..., :dim], gathered[..., dim:])


def read(layer: torch.Tensor, tables: torch.Tensor) -> None:
    """Read one layer's KV where it lies, and write next to nothing: what a layout costs shows most."""
    del tables
    layer.amax((2, 3))


def replayed(
    rig: Rig,
    caches: list[torch.Tensor],
    tables: torch.Tensor,
    work: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[[], object]:
    """The work of all layers, one after the other; on a card it is a CUDA graph, as in engines."""
    words = [cache.view(torch.bfloat16) for cache in caches]

    def run() -> None:
        for layer in words:
            work(layer, tables)

    run()
    if not rig.cuda:
        return run
    rig.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay
