"""Time to first token of a long prompt by where its KV is: nowhere, on the device, in host memory, on disk.

KVBM and vLLM's own offloading side by side, one engine after the other, each in the default multi-process mode. In
every engine hits of the tier and of the device take turns, so that the difference, what a tier costs on top of the
device, is free of the machine's slow minutes; medians count. Run it from the checkout:

    python -m benchmarks.ttft [--tokens 8000] [--repeats 12] [--only kvbm-host,native-host] [--size windows]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from benchmarks import ceilings
from benchmarks.engine import (
    BLOCK_TOKENS,
    CONNECTOR,
    Engine,
    Scenario,
    add_engine_arguments,
    end_with_children,
    in_own_process,
    passed_on,
    prompt,
    prompt_kv,
)
from kvbm.present.tables import plain_table, save_json
from kvbm.testing.tiny_model import SHAPES, Size, make_model

SCENARIOS = ("plain", "kvbm-host", "kvbm-disk", "kvbm-remote", "native-host", "native-fs")
NATIVE = {"native-host", "native-fs"}
TITLES = {
    "plain": "vLLM alone",
    "kvbm-host": "KVBM, host memory",
    "kvbm-disk": "KVBM, disk (verified)",
    "kvbm-remote": "KVBM, store (a directory, verified)",
    "native-host": "vLLM's own, host memory",
    "native-fs": "vLLM's own, files",
}
ALLOWANCE_S = 0.030
LEAST_HIT_SHARE = 0.9
COLD_PROMPTS = 2
WIDTH = 106


def scenario(name: str, roomy: int, tight: int, block_bytes: int, scratch: Path) -> Scenario:
    """How an engine is set up: its tier has `roomy` blocks, and host memory above a disk `tight` ones."""
    if name == "plain":
        return Scenario(name=name, tier=None)
    if name in NATIVE:
        # Imported here: it needs vLLM, and only the process that runs the engine has a use for it.
        from benchmarks.peers import vllm_native

        if name == "native-host":
            return Scenario(
                name=name, tier="host", transfer_config=vllm_native.host_config(roomy * block_bytes)
            )
        files = str(scratch)
        config = vllm_native.file_config(tight * block_bytes, files)
        return Scenario(name=name, tier="disk", transfer_config=config, files=files)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(probe.getsockname()[1])}
    if name == "kvbm-host":
        environment["DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"] = str(roomy)
        return Scenario(name=name, tier="host", environment=environment, transfer_config=CONNECTOR)
    environment["DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"] = str(tight)
    if name == "kvbm-remote":
        environment |= {"DYN_KVBM_REMOTE": f"file://{scratch}", "DYN_KVBM_REMOTE_LINGER_SECS": "0"}
        return Scenario(
            name=name, tier="external_unspecified", environment=environment, transfer_config=CONNECTOR
        )
    environment |= {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(roomy),
        "DYN_KVBM_DISK_CACHE_DIR": str(scratch),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    return Scenario(name=name, tier="disk", environment=environment, transfer_config=CONNECTOR)


def measure(
    model: str,
    chosen: Scenario,
    tokens: int,
    repeats: int,
    dtype: str,
    groups: int = 1,
    more: dict[str, Any] | None = None,
) -> dict[str, list[float]]:
    """Cold, tier-hit and device-hit times of one engine, in seconds, and KVBM's own share of a tier hit.

    Two prompts are computed, then asked in turn: each time one comes from the tier, because the other took its
    place on the device (and, where the tier is a disk, in the small host memory before it), and once more from the
    device. What comes first warms up (first use of a shape, first touch of a pool) and does not count.
    Raises RuntimeError when a request was not served from where it should have been.
    """
    times: dict[str, list[float]] = {"cold": [], "tier": [], "loading": [], "device": []}
    with Engine(model, chosen, prompt_tokens=tokens, dtype=dtype, groups=groups, more=more) as engine:
        for number in range(COLD_PROMPTS + 1):
            seconds = _timed(engine, chosen, prompt(number, tokens), "cold")
            engine.wait_until_stored()
            if number:
                times["cold"].append(seconds)
        for turn in range(repeats + 2):
            asked = prompt(COLD_PROMPTS - 1 + turn % 2 if chosen.tier else COLD_PROMPTS, tokens)
            took = {}
            if chosen.tier:
                engine.reset_device()
                before_s = engine.loading_s()
                took["tier"] = _timed(engine, chosen, asked, "tier")
                engine.wait_until_stored()
                took["loading"] = engine.loading_s() - before_s
            took["device"] = _timed(engine, chosen, asked, "device")
            for kind, seconds in took.items() if turn > 1 else ():
                times[kind].append(seconds)
    return times


def _timed(engine: Engine, chosen: Scenario, text: list[int], kind: str) -> float:
    """Seconds to the first token of a request that must have been served as `kind` says."""
    tier = chosen.tier or ""
    before = engine.hit_tokens(tier)
    seconds, cached = engine.first_token_s(text)
    from_tier = engine.hit_tokens(tier) - before
    least = LEAST_HIT_SHARE * len(text)
    wrong = {
        "cold": cached > BLOCK_TOKENS,
        "device": cached < least or from_tier > BLOCK_TOKENS,
        "tier": from_tier < least,
    }
    if wrong[kind]:
        raise RuntimeError(
            f"{chosen.name}, {kind}: {cached} of {len(text)} tokens cached, {from_tier} of them from tier {tier!r}"
        )
    return seconds


def summarise(
    measured: dict[str, dict[str, list[float]]], moved_bytes: int, copy_rate: float, disk_rate: float
) -> list[dict[str, Any]]:
    """One row per engine, times in seconds. `on_top_s` is what a tier hit takes beyond the device hit after it;
    its ceiling is a plain copy (and an O_DIRECT read) of as many bytes, its budget the ceiling and an allowance.
    `loading_s` is the part that KVBM times itself: from a worker hearing of a load until its last byte is there."""
    rows: list[dict[str, Any]] = []
    for name, times in measured.items():
        row: dict[str, Any] = {
            "what": TITLES[name],
            "scenario": name,
            "cold_s": statistics.median(times["cold"]),
            "device_s": statistics.median(times["device"]),
        }
        if times["tier"]:
            pairs = zip(times["tier"], times["device"], strict=True)
            on_disk = name in ("kvbm-disk", "native-fs")
            row["tier_s"] = statistics.median(times["tier"])
            row["on_top_s"] = statistics.median(tier - device for tier, device in pairs)
            row["ceiling_s"] = moved_bytes / copy_rate + (moved_bytes / disk_rate if on_disk else 0.0)
            if name not in NATIVE:
                row["loading_s"] = statistics.median(times["loading"])
                row["budget_s"] = row["ceiling_s"] + ALLOWANCE_S * (2 if on_disk else 1)
                row["ratio"] = row["on_top_s"] / row["budget_s"]
        rows.append(row)
    return rows


def render(rows: list[dict[str, Any]]) -> Table:
    """The budget table, times in ms. A ratio of at most 1 is within the budget."""
    columns = {
        "cold_s": "cold",
        "device_s": "device hit",
        "tier_s": "tier hit",
        "on_top_s": "on top",
        "loading_s": "loading",
        "budget_s": "budget",
        "ceiling_s": "ceiling",
    }
    headings = ("engine", *columns.values(), "ratio")
    table = plain_table(headings, words={"engine"}, title="Time to first token, ms")
    for row in rows:
        cells = ["–" if key not in row else f"{row[key] * 1e3:,.0f}" for key in columns]
        table.add_row(row["what"], *cells, f"{row['ratio']:.2f}" if "ratio" in row else "–")
    return table


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    end_with_children()
    console = Console(stderr=True)
    size = cast("Size", options.size)
    kv = prompt_kv(size, options.dtype, options.tokens)
    options.output.mkdir(parents=True, exist_ok=True)
    model = str(
        make_model(options.output.absolute() / "models" / f"{size}-{options.dtype}", size, options.dtype)
    )
    if options.scenario:
        with tempfile.TemporaryDirectory(prefix="ttft-", dir=options.output.absolute()) as scratch:
            # Disk rows get host memory for one request and no more.
            roomy, tight = kv.stored_blocks * (COLD_PROMPTS + 2), kv.loaded_blocks + 2
            chosen = scenario(options.scenario, roomy, tight, kv.block_bytes, Path(scratch))
            times = measure(
                model, chosen, options.tokens, options.repeats, options.dtype, SHAPES[size].groups
            )
            Path(options.result).write_text(json.dumps(times))
        return 0
    moved = kv.loaded_blocks * kv.block_bytes
    console.print(f"ceilings of {moved / 1e6:.0f} MB in blocks of {kv.block_bytes >> 10} KiB")
    copy_rate = ceilings.copy_bytes_per_s(moved, kv.block_bytes)
    disk_rate = ceilings.disk_read_bytes_per_s(options.output, moved, kv.block_bytes)
    console.print(f"  copy {copy_rate / 1e9:.1f} GB/s, O_DIRECT read {disk_rate / 1e9:.1f} GB/s")
    measured: dict[str, dict[str, list[float]]] = {}
    for name in options.only:
        console.print(f"measuring {name}")
        chosen = {"tokens": options.tokens, "repeats": options.repeats, "scenario": name}
        measured[name] = in_own_process("benchmarks.ttft", passed_on(options, **chosen), options.timeout)
        medians = {kind: f"{statistics.median(times):.3f}" for kind, times in measured[name].items() if times}
        console.print(f"  medians in s: {medians}")
    rows = summarise(measured, moved, copy_rate, disk_rate)
    rates = {"copy_bytes_per_s": copy_rate, "disk_read_bytes_per_s": disk_rate, "moved_bytes": moved}
    save_json({"rows": rows, "times_s": measured, **rates}, options.output / "ttft.json")
    Console(width=max(WIDTH, Console().width)).print(render(rows))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser, hybrid=True)
    parser.add_argument("--tokens", type=int, default=8000, help="length of a prompt")
    parser.add_argument("--repeats", type=int, default=12, help="measured hits per engine")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(name for name in SCENARIOS if name in text.split(",")),
        default=SCENARIOS,
        help="comma-separated: " + ", ".join(SCENARIOS),
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
