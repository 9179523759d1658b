"""Everything about copies on a CUDA card: is every byte right, and how close to the link's limit is it.

    PYTHONPATH=src python benchmarks/gpu.py [--output gpu.json]

One run of a few minutes on a machine that has torch and triton and needs no network. Every figure is a ratio to a
ceiling that is timed beside it, by turns. `--rehearse` runs the same code on a CPU with small sizes, to see that it
runs: its figures mean nothing. Exits with 1 when a byte is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from kvbm.transfer import Copier, CpuCopier, DeviceCache

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from mini_model import Config, Model, Step

from gpu_bytes import check_bytes, check_order
from gpu_rig import Result, Rig, Sizes, shared_arena, views


def time_copies(rig: Rig, result: Result, sizes: Sizes) -> None:
    """64 blocks down and up, in large and in small pieces, by every method, beside one contiguous copy."""
    total = sizes.blocks * sizes.block_bytes
    flat, host = torch.zeros(total, dtype=torch.uint8, device=rig.device), rig.pinned(total)
    for name, order, bar in (("64 KiB", "LBNHC", 0.95), ("4 KiB", "LHBNC", 0.85), ("one run", "BLNHC", 0.95)):
        cache = DeviceCache.from_tensors(views(rig, order, sizes, 2 * sizes.blocks), 2 * sizes.blocks)
        arena = shared_arena(2 * sizes.blocks, sizes.block_bytes)
        pairs = [((37 * i) % (2 * sizes.blocks), i) for i in range(sizes.blocks)]
        best = {"down": 0.0, "up": 0.0}
        for method in (*rig.methods, "auto"):
            with rig.copier(cache, arena, method) as copier:
                plain_down, down, plain_up, up = rig.median_s(
                    partial(host.copy_, flat, non_blocking=True),
                    partial(copier.store, pairs),
                    partial(flat.copy_, host, non_blocking=True),
                    partial(copier.load, pairs),
                )
                if method == "auto":
                    best = {"down": plain_down / down, "up": plain_up / up}
                    continue
                result.add(f"{name} pieces, {method}, down", plain_down / down, "of one copy")
                result.add(f"{name} pieces, {method}, up", plain_up / up, "of one copy")
        result.add(f"{name} pieces, chosen, down", best["down"], "of one copy", bar)
        result.add(f"{name} pieces, chosen, up", best["up"], "of one copy", bar)
        time_gather(rig, result, name, cache, host, pairs)
    result.add(
        "one copy, down", total / rig.median_s(lambda: host.copy_(flat, non_blocking=True))[0] / 1e9, "GB/s"
    )
    result.add(
        "one copy, up", total / rig.median_s(lambda: flat.copy_(host, non_blocking=True))[0] / 1e9, "GB/s"
    )


def time_gather(
    rig: Rig, result: Result, name: str, cache: DeviceCache, host: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """The same blocks with torch alone: gathered on the device, then one copy; and back."""
    region = cache.regions[0].device
    blocks = torch.tensor([block for block, _ in pairs], device=rig.device)
    staged = torch.empty_like(region[: len(pairs)], memory_format=torch.contiguous_format)
    there = host[: staged.nbytes].view(region.dtype).view(staged.shape)

    def down() -> None:
        staged.copy_(region.index_select(0, blocks))
        there.copy_(staged, non_blocking=True)

    def up() -> None:
        staged.copy_(there, non_blocking=True)
        region.index_copy_(0, blocks, staged)

    flat, target = staged.view(-1), there.view(-1)
    plain_down, down_s, plain_up, up_s = rig.median_s(
        lambda: target.copy_(flat, non_blocking=True), down, lambda: flat.copy_(target, non_blocking=True), up
    )
    result.add(f"{name} pieces, torch index_select/index_copy_, down", plain_down / down_s, "of one copy")
    result.add(f"{name} pieces, torch index_select/index_copy_, up", plain_up / up_s, "of one copy")


def time_both_ways(rig: Rig, result: Result, sizes: Sizes) -> None:
    """Stores and loads at once, beside two contiguous copies at once."""
    total = sizes.blocks * sizes.block_bytes
    sides = [(torch.zeros(total, dtype=torch.uint8, device=rig.device), rig.pinned(total)) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if rig.cuda else [None, None]

    def plain() -> None:
        for index, ((device, host), stream) in enumerate(zip(sides, streams, strict=True)):
            with torch.cuda.stream(stream):
                (host if index else device).copy_(device if index else host, non_blocking=True)

    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 2 * sizes.blocks), 2 * sizes.blocks)
    arena = shared_arena(2 * sizes.blocks, sizes.block_bytes)
    down = [(i, i) for i in range(sizes.blocks)]
    up = [(i, i) for i in range(sizes.blocks, 2 * sizes.blocks)]
    with rig.copier(cache, arena, "auto") as copier:

        def ours() -> None:
            mark = copier.mark()
            for copying in (copier.begin_store(down, mark), copier.begin_load(up, mark)):
                copying.wait()

        plain_s, ours_s = rig.median_s(plain, ours)
    result.add("both ways at once", plain_s / ours_s, "of two copies", 0.9)
    result.add("two copies at once", 2 * total / plain_s / 1e9, "GB/s")


def time_arena(rig: Rig, result: Result, sizes: Sizes) -> None:
    """What a large arena costs the engine's start, and how long its pages take to be locked behind it."""
    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 4), 4)
    begun_s = time.perf_counter()
    arena = shared_arena(sizes.arena_bytes // sizes.block_bytes, sizes.block_bytes)
    result.add("arena, pages touched", time.perf_counter() - begun_s, "s")
    begun_s = time.perf_counter()
    with rig.copier(cache, arena, prepared=False) as copier:
        result.add("arena, the engine's start waits", time.perf_counter() - begun_s, "s", 0.2, at_most=True)
        copier.begin_store([(1, len(arena) - 1)], copier.mark()).wait()
        if isinstance(copier, CpuCopier):
            return
        copier.prepared(300.0)
        result.add("arena, all pages locked after", time.perf_counter() - begun_s, "s")


def time_decode(rig: Rig, result: Result, sizes: Sizes) -> None:
    """Decode steps with and without stores beside them: those of an engine at work, and as many as the link takes."""
    config = Config(
        layers=sizes.layers,
        hidden=2048 if rig.cuda else 64,
        intermediate=6144 if rig.cuda else 128,
        heads=16 if rig.cuda else 2,
        kv_heads=8 if rig.cuda else 1,
        head_dim=128 if rig.cuda else 32,
        qk_norm=True,
    )
    model = Model.random(config, str(rig.device), torch.bfloat16)
    width = -(-sizes.tokens // 16)
    kv_shape = (4 * width, config.layers, 2, 16, config.kv_heads, config.head_dim)
    kv = torch.zeros(kv_shape, dtype=torch.bfloat16, device=rig.device)
    cache = DeviceCache.from_tensors({"kv": kv}, len(kv))
    arena = shared_arena(len(kv), cache.shard_bytes)
    step = last_tokens(rig, sizes.tokens, width)
    logits = model.forward(kv, step)
    with rig.copier(cache, arena, "auto") as copier:
        place = 0

        def decode(blocks_a_step: int) -> None:
            nonlocal place
            mark = copier.mark()
            out = model.forward(kv, step)
            if blocks_a_step:
                picked = [(place + i) % len(kv) for i in range(blocks_a_step)]
                place = (place + blocks_a_step) % len(kv)
                copier.begin_store([(block, block) for block in picked], mark)
            out.argmax(-1).tolist()

        def decode_all(blocks_a_step: int) -> None:
            for _ in range(sizes.steps):
                decode(blocks_a_step)

        alone_s, beside_s = rig.median_s(partial(decode_all, 0), partial(decode_all, 8))
        result.add("decode step", alone_s / sizes.steps * 1e3, "ms")
        result.add(
            "decode step, 8 blocks stored beside each", beside_s / alone_s - 1, "slower", 0.03, at_most=True
        )
        with storing_all_the_time(copier, len(kv)):
            full_s = rig.median_s(partial(decode_all, 0))[0]
        result.add("decode step, stores at all the link's speed", full_s / alone_s - 1, "slower")
    result.check("the decode steps computed something", bool(logits.isfinite().all()))


def last_tokens(rig: Rig, tokens: int, width: int) -> Step:
    """The next token of four sequences of so many tokens, each in blocks of its own."""
    rows = range(4)
    values = (
        [[5]] * 4,
        [[tokens - 1]] * 4,
        [[row * width + i for i in range(width)] for row in rows],
        list(rows),
        [row * width + (tokens - 1) // 16 for row in rows],
        [(tokens - 1) % 16] * 4,
        list(rows),
    )
    return Step(*(torch.tensor(value, device=rig.device) for value in values))


@contextmanager
def storing_all_the_time(copier: Copier, blocks: int) -> Iterator[None]:
    """A thread that stores one batch of blocks after the other."""
    over = threading.Event()

    def run() -> None:
        pairs = [(block, block) for block in range(min(64, blocks))]
        while not over.is_set():
            copier.begin_store(pairs, copier.mark()).wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---- the whole


def machine(rig: Rig) -> dict[str, str]:
    """What the table's caption says."""
    found = {"torch": torch.__version__, "device": "CPU, rehearsal"}
    if rig.cuda:
        import triton

        from kvbm.transfer.cuda_driver import CudaDriver

        version = CudaDriver().version
        found = {
            **found,
            "device": torch.cuda.get_device_name(),
            "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
            "triton": triton.__version__,
            **{f"without {method}": f"({reason})" for method, reason in rig.refused.items()},
        }
    return found


def main() -> int:
    """Check, time, print; 1 when a byte was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small: the figures mean nothing")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA card is there; --rehearse runs the same code on a CPU")
    begun_s = time.perf_counter()
    rig = Rig(options.rehearse)
    small = Sizes(layers=4, heads=4, piece=2048, blocks=8, arena_bytes=1 << 24, tokens=64, steps=2)
    sizes = Sizes() if rig.cuda else small
    result = Result(machine(rig))
    for title, part in (
        ("bytes", lambda: (check_bytes(rig, result, small), check_order(rig, result, small))),
        ("copies", lambda: time_copies(rig, result, sizes)),
        ("both ways", lambda: time_both_ways(rig, result, sizes)),
        ("arena", lambda: time_arena(rig, result, sizes)),
        ("decode", lambda: time_decode(rig, result, sizes)),
    ):
        print(f"{title} ({time.perf_counter() - begun_s:.0f} s)", flush=True)
        part()
    if options.output:
        written = {**asdict(result), "rows": [{**asdict(row), "met": row.met} for row in result.rows]}
        options.output.write_text(json.dumps(written, indent=2) + "\n")
    print(f"\n{', '.join(f'{name} {value}' for name, value in result.machine.items())}")
    for row in result.rows:
        bar = (
            ""
            if row.bar is None
            else f"{'≤' if row.at_most else '≥'} {row.bar:g} {'' if row.met else 'MISSED'}"
        )
        print(f"{row.what:<58} {row.value:8.3f} {row.unit:<12} {bar}")
    print(f"wrong: {', '.join(result.wrong) or 'nothing'}; {time.perf_counter() - begun_s:.0f} s")
    return bool(result.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
