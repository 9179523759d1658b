"""Everything about KVBM on a CUDA card: is every byte right, and how close to the link's limit is it.

    PYTHONPATH=src python benchmarks/gpu.py [--output gpu.json]

One run of a few minutes on a machine that has torch and triton and needs no network. Every ratio with a bar is to
something that is timed beside it, by turns. What a machine lacks is left out, and named: the last two parts,
`outputs` and `hits`, need kvbm's own dependencies. `--rehearse` runs the same code on a CPU with small sizes, to
see that it runs: its figures mean nothing. Exits with 1 when a byte or an output is wrong, or a part ended early;
not for a bar that is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import torch

from kvbm.transfer import Copier, DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier

sys.path.insert(0, str(Path(__file__).parent))
from gpu_beside import check_captures, check_layerwise, time_stores
from gpu_bytes import check_bytes, check_order
from gpu_engine import check_outputs, time_hits
from gpu_rig import PREPARED_S, Result, Rig, Sizes, shared_arena, views


def time_copies(rig: Rig, result: Result, sizes: Sizes) -> None:
    """64 blocks down and up, in large and in small pieces, by every method, beside one contiguous copy.

    The bars are on the device's time; what the host adds before and after is told beside it.
    """
    total = sizes.blocks * sizes.block_bytes
    flat, host = torch.zeros(total, dtype=torch.uint8, device=rig.device), rig.pinned(total)
    plain_down, plain_up = (
        partial(there.copy_, here, non_blocking=True) for there, here in ((host, flat), (flat, host))
    )
    for name, order, bar in (("64 KiB", "LBNHC", 0.95), ("4 KiB", "LHBNC", 0.85), ("one run", "BLNHC", 0.95)):
        cache = DeviceCache.from_tensors(views(rig, order, sizes, 2 * sizes.blocks), 2 * sizes.blocks)
        arena = shared_arena(2 * sizes.blocks, sizes.block_bytes)
        pairs = [((37 * i) % (2 * sizes.blocks), i) for i in range(sizes.blocks)]
        for method in (*rig.methods, "auto"):
            with rig.copier(cache, arena, method) as copier:
                works = (plain_down, *both(copier, pairs), plain_up)
                alone_down, down, up, alone_up = rig.median_device_s(*works)
                if method != "auto":
                    result.add(f"{name} pieces, {method}, down", alone_down / down, "of one copy")
                    result.add(f"{name} pieces, {method}, up", alone_up / up, "of one copy")
                    continue
                choice = copier.choice if isinstance(copier, CudaCopier) else None
                by = (choice.store.name, choice.load.name) if choice else ("cpu", "cpu")
                result.add(f"{name} pieces, chosen ({by[0]}), down", alone_down / down, "of one copy", bar)
                result.add(f"{name} pieces, chosen ({by[1]}), up", alone_up / up, "of one copy", bar)
                alone_down, down, up, alone_up = rig.median_s(*works)
                result.add(
                    f"{name} pieces, chosen, down, with the host's part", alone_down / down, "of one copy"
                )
                result.add(f"{name} pieces, chosen, up, with the host's part", alone_up / up, "of one copy")
                if name == "one run":
                    time_plain(rig, result, flat, host, arena.view(-1)[:total])
        time_gather(rig, result, name, cache, host, pairs)


def both(copier: Copier, pairs: list[tuple[int, int]]) -> tuple[Callable[[], None], Callable[[], None]]:
    """A store and a load of the pairs, for the end of which the present stream waits."""
    return (
        lambda: copier.hold(copier.begin_store(pairs, copier.mark())),
        lambda: copier.hold(copier.begin_load(pairs, copier.mark())),
    )


def time_plain(
    rig: Rig, result: Result, flat: torch.Tensor, host: torch.Tensor, locked: torch.Tensor
) -> None:
    """The ceiling itself, and the same copy to and from the arena: memory may lie nearer or farther."""
    down, arena_down, up, arena_up = rig.median_device_s(
        lambda: host.copy_(flat, non_blocking=True),
        lambda: locked.copy_(flat, non_blocking=True),
        lambda: flat.copy_(host, non_blocking=True),
        lambda: flat.copy_(locked, non_blocking=True),
    )
    result.add("one copy, down", flat.nbytes / down / 1e9, "GB/s")
    result.add("one copy, up", flat.nbytes / up / 1e9, "GB/s")
    result.add("one copy to the arena", down / arena_down, "of one copy")
    result.add("one copy from the arena", up / arena_up, "of one copy")


def time_gather(
    rig: Rig, result: Result, name: str, cache: DeviceCache, host: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """The same blocks with torch alone: gathered on the device, then one copy; and back."""
    region = cache.regions[0].device
    blocks = torch.tensor([block for block, _ in pairs], device=rig.device)
    staged = torch.empty_like(region[: len(pairs)], memory_format=torch.contiguous_format)
    there = host[: staged.nbytes].view(region.dtype).view(staged.shape)

    def down() -> None:
        torch.index_select(region, 0, blocks, out=staged)
        there.copy_(staged, non_blocking=True)

    def up() -> None:
        staged.copy_(there, non_blocking=True)
        region.index_copy_(0, blocks, staged)

    flat, target = staged.view(-1), there.view(-1)
    plain_down, down_s, plain_up, up_s = rig.median_device_s(
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
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                (host if index else device).copy_(device if index else host, non_blocking=True)
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 2 * sizes.blocks), 2 * sizes.blocks)
    arena = shared_arena(2 * sizes.blocks, sizes.block_bytes)
    down = [(i, i) for i in range(sizes.blocks)]
    up = [(i, i) for i in range(sizes.blocks, 2 * sizes.blocks)]
    with rig.copier(cache, arena, "auto") as copier:

        def ours() -> None:
            mark = copier.mark()
            for copying in (copier.begin_store(down, mark), copier.begin_load(up, mark)):
                copier.hold(copying)

        plain_s, ours_s = rig.median_device_s(plain, ours)
    result.add("both ways at once", plain_s / ours_s, "of two copies", 0.9)
    result.add("two copies at once", 2 * total / plain_s / 1e9, "GB/s")


def time_arena(rig: Rig, result: Result, sizes: Sizes) -> None:
    """What a large arena costs the engine's start, and how long its pages take to be locked behind it."""
    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 4), 4)
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()  # an engine that starts has no page-locked memory to use again
    begun_s = time.perf_counter()
    arena = shared_arena(sizes.arena_bytes // sizes.block_bytes, sizes.block_bytes)
    result.add("arena, pages touched", time.perf_counter() - begun_s, "s")
    begun_s = time.perf_counter()
    with rig.copier(cache, arena, prepared=False) as copier:
        result.add("arena, the engine's start waits", time.perf_counter() - begun_s, "s", 0.2, at_most=True)
        copier.begin_store([(1, len(arena) - 1)], copier.mark()).wait()
        if isinstance(copier, CudaCopier):
            result.check("all pages are locked in time", copier.prepared(PREPARED_S))
            result.add("arena, all pages locked after", time.perf_counter() - begun_s, "s")


# ---- the whole

SMALL = Sizes(layers=4, heads=4, piece=2048, blocks=8, arena_bytes=1 << 24, tokens=64, steps=2)
"""What is checked byte by byte, and all that a rehearsal does."""


def machine(rig: Rig) -> dict[str, str]:
    """What the table's caption says."""
    found = {"torch": torch.__version__, "device": "CPU, rehearsal"}
    if rig.cuda:
        from kvbm.transfer.cuda.driver import CudaDriver

        version = CudaDriver().version
        found = {
            **found,
            "device": torch.cuda.get_device_name(),
            "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
            "triton": next((d.version for d in distributions(name="triton")), "none"),
        }
    return found


PARTS: dict[str, Callable[[Rig, Result, Sizes], None]] = {
    "bytes": lambda rig, result, sizes: check_bytes(rig, result, SMALL),
    "order": lambda rig, result, sizes: check_order(rig, result, SMALL),
    "captures": lambda rig, result, sizes: check_captures(rig, result, SMALL),
    "copies": time_copies,
    "both-ways": time_both_ways,
    "arena": time_arena,
    "stores": time_stores,
    "layers": check_layerwise,
    "outputs": lambda rig, result, sizes: check_outputs(rig, result),
    "hits": time_hits,
}


def run_parts(rig: Rig, result: Result, names: list[str], output: Path | None) -> None:
    """Every part, whatever became of those before it; what there is so far is written after each."""
    begun_s = time.perf_counter()
    for name in names:
        print(f"{name} ({time.perf_counter() - begun_s:.0f} s)", flush=True)
        try:
            PARTS[name](rig, result, Sizes() if rig.cuda else SMALL)
        except Exception as error:
            # A card is rare: what one part ran into must not cost the figures of the others.
            traceback.print_exc()
            result.check(f"{name} ended early ({type(error).__name__}: {error})", right=False)
        for what, why in rig.refused.items():
            result.left_out.setdefault(what, why)
        if output:
            rows = [{**asdict(row), "met": row.met} for row in result.rows]
            output.write_text(json.dumps({**asdict(result), "rows": rows}, indent=2) + "\n")


def print_table(result: Result) -> None:
    """The short table, and what it is a table of."""
    print(f"\n{', '.join(f'{name} {value}' for name, value in result.machine.items())}")
    for what, why in result.left_out.items():
        print(f"left out: {what}: {why}")
    for row in result.rows:
        bar = (
            ""
            if row.bar is None
            else f"{'≤' if row.at_most else '≥'} {row.bar:g} {'' if row.met else 'MISSED'}"
        )
        print(f"{row.what:<66} {row.value:8.3f} {row.unit:<12} {bar}".rstrip())


def main() -> int:
    """Check, time, print; 1 when something was wrong or ended early."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small: the figures mean nothing")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"some parts alone: {', '.join(PARTS)}",
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(name)s: %(message)s")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA card is there; --rehearse runs the same code on a CPU")
    begun_s = time.perf_counter()
    rig = Rig(options.rehearse)
    result = Result(machine(rig))
    for what in rig.refused:
        # Triton may lack a compiler. What the driver offers has to work.
        result.check(what, right=what == "copies by kernel")
    run_parts(rig, result, options.only, options.output)
    print_table(result)
    print(f"wrong: {', '.join(result.wrong) or 'nothing'}; {time.perf_counter() - begun_s:.0f} s")
    return bool(result.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
