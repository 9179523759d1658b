"""Time to the first token of one long prompt under SGLang, by where its KV comes from; all in one run, as ratios.

SGLang runs on the CPU with a stub of its CUDA kernels (`tests/rigs/sglang`), so the figures compare ways to the same
bytes on one machine and say nothing about a GPU. Every answer is compared with the computed one.

    python -m benchmarks.sglang_ttft [--tokens 4096] [--only computed,device,…]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbm.present.tables import plain_table, save_json
from kvbm.testing.tiny_model import SHAPES, make_model

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.manager_probe import wait_for
from rigs.sglang import installation, modes
from rigs.sglang.engine_process import Answer, Engine, Nursery
from rigs.sglang.keepers import Files, Manager, wait_until_settled
from rigs.sglang.prompts import prompts

HIT = 0.9
"""The share of a prompt that must have been found where the row says."""
KEEP_S = 60.0
ROOMY = 4
"""Prompts that a pool or tier holds which is to hold them all."""


@dataclass(frozen=True)
class Row:
    """Where the KV came from, and seconds to the first token: the median, and the fastest and slowest."""

    source: str
    seconds: float
    least: float
    most: float


@dataclass
class Setting:
    """What all ways share: one model, two prompts, and what an engine computes for them."""

    nursery: Nursery
    model: Path
    directory: Path
    tokens: int
    repeats: int
    expected: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = prompts(seed=7, count=2, tokens=self.tokens)
        self.pages = self.tokens // modes.PAGE_TOKENS

    @contextmanager
    def engine(self, arguments: dict[str, Any], variables: dict[str, str] | None = None) -> Iterator[Engine]:
        """An engine that has answered another prompt already, so that nothing is done for the first time."""
        log = self.directory / f"engine-{len(os.listdir(self.directory))}.log"
        with self.nursery.start(arguments, log, variables).ready() as engine:
            engine.generate(prompts(seed=8, count=1, tokens=self.tokens), tokens=1)
            yield engine
            engine.end()

    def device(self, holds: float) -> dict[str, Any]:
        """Arguments of an engine whose device pool holds so many prompts."""
        return {
            "max_total_tokens": int(self.tokens * holds) + 256,
            "chunked_prefill_size": self.tokens,
            "max_prefill_tokens": self.tokens,
        }

    def ask(self, engine: Engine, number: int = 0) -> Answer:
        """One prompt, whose answer must be right."""
        (answer,) = engine.generate([self.prompts[number]], tokens=1)
        if len(self.expected) > number:
            assert answer.tokens == self.expected[number], "a wrong answer"
        return answer

    def timed(self, engine: Engine, before: Callable[[], None], place: str) -> list[float]:
        """Seconds of the first prompt, each time after `before`, and found at `place`."""
        taken = []
        for _ in range(self.repeats + 1):
            before()
            answer = self.ask(engine)
            found = answer.cached if place == "cached" else getattr(answer.where, place)
            assert found >= HIT * self.tokens, f"{place}: found {answer.cached} tokens, {answer.where}"
            taken.append(answer.seconds)
        return taken[1:]


def computed(setting: Setting) -> list[float]:
    """Nothing is found; also what all other answers must be."""
    with setting.engine(modes.plain(setting.model, **setting.device(1.2))) as engine:
        setting.expected = [setting.ask(engine, number).tokens for number in (0, 1)]
        taken = []
        for _ in range(2):
            assert engine.call("flush")
            answer = setting.ask(engine)
            assert answer.cached == 0
            taken.append(answer.seconds)
        return taken


def device(setting: Setting) -> list[float]:
    """Found in the device pool."""
    with setting.engine(modes.plain(setting.model, **setting.device(ROOMY))) as engine:
        setting.ask(engine)
        return setting.timed(engine, lambda: None, "cached")


def hicache_host(setting: Setting) -> list[float]:
    """Found in SGLang's host pool; the other prompt took its place on the device."""
    arguments = modes.hicache(setting.model, **setting.device(1.2)) | {"hicache_ratio": float(ROOMY)}
    with setting.engine(arguments) as engine:
        setting.ask(engine)
        return setting.timed(engine, lambda: _other(setting, engine), "host")


def _other(setting: Setting, engine: Engine) -> None:
    setting.ask(engine, 1)


def hicache_file(setting: Setting, cold: bool) -> list[float]:
    """Found in SGLang's files: in the page cache, or read from the disk."""
    kept = Files(setting.directory / f"files-{cold}")
    arguments = kept.arguments(setting.model, **setting.device(1.2)) | {"hicache_ratio": float(ROOMY)}
    with setting.engine(arguments, kept.variables()) as engine:
        setting.ask(engine)
        wait_until_settled(kept)

        def before() -> None:
            assert engine.call("flush")
            if cold:
                kept.damage(_leave_page_cache)

        return setting.timed(engine, before, "storage")


def _leave_page_cache(path: Path) -> int:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return 0


def ours(setting: Setting, way: str, tier: str) -> list[float]:
    """Found at a manager: in host memory, or on disk because the other prompts took its place there."""
    place = setting.directory / f"{way}-{tier}"
    place.mkdir()
    host = int(setting.pages * (1.3 if tier == "disk" else ROOMY))
    kept = Manager(
        place, way, host_pages=host, disk=tier == "disk", disk_pages=setting.pages * ROOMY, namespaces=1
    )
    arguments = kept.arguments(setting.model, **setting.device(1.2))
    if way != "linker":
        arguments |= {"hicache_ratio": 1.5}
    read = 'kvbm_hit_blocks_total{tier="disk"}'
    try:
        with setting.engine(arguments, kept.variables()) as engine:
            for number in (0, 1):
                _keep(setting, engine, number)

            def before() -> None:
                if tier == "disk":
                    assert engine.call("flush")
                    setting.ask(engine, 1)
                    wait_until_settled(kept)
                assert engine.call("flush")

            seen = kept.metrics()[read]
            taken = setting.timed(engine, before, "cached" if way == "linker" else "storage")
            from_disk = kept.metrics()[read] - seen
            assert (from_disk > setting.repeats * setting.pages * 0.5) == (tier == "disk"), from_disk
            return taken
    finally:
        kept.close()


def _keep(setting: Setting, engine: Engine, number: int) -> None:
    """Ask until what was stored is found: nothing is kept before the weights have been read through."""

    def found() -> bool:
        assert engine.call("flush")
        return setting.ask(engine, number).cached >= HIT * setting.tokens

    wait_for(found, KEEP_S, f"prompt {number} is not kept")


SOURCES: dict[str, tuple[str, Callable[[Setting], list[float]]]] = {
    "computed": ("computed", computed),
    "device": ("SGLang, device pool", device),
    "hicache-host": ("SGLang, host pool", hicache_host),
    "hicache-file": ("SGLang, files in the page cache (not verified)", lambda s: hicache_file(s, False)),
    "hicache-file-cold": ("SGLang, files read from disk (not verified)", lambda s: hicache_file(s, True)),
    "storage-host": ("KVBM storage, host memory", lambda s: ours(s, "storage", "host")),
    "storage-disk": ("KVBM storage, disk (verified)", lambda s: ours(s, "storage", "disk")),
    "linker-host": ("KVBM linker, host memory", lambda s: ours(s, "linker", "host")),
    "linker-disk": ("KVBM linker, disk (verified)", lambda s: ours(s, "linker", "disk")),
}


def main() -> int:
    """Measure and print; 1 where a way could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--size", choices=[*SHAPES], default="demo", help="of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", default=",".join(SOURCES), help="comma-separated; computed is always measured"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    if reason := installation.missing():
        raise SystemExit(reason)
    unknown = {*options.only.split(",")} - {*SOURCES}
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: accepted are {', '.join(SOURCES)}")
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model = make_model(directory / "model", options.size, "float32")
        (directory / "runs").mkdir()
        nursery = Nursery(directory / "nursery.log")
        setting = Setting(nursery, model, directory / "runs", options.tokens, options.repeats)
        for name, (source, measure) in SOURCES.items():
            if name != "computed" and name not in options.only.split(","):
                continue
            try:
                taken = measure(setting)
            except (AssertionError, OSError) as error:
                failed += 1
                print(f"{name}: {str(error)[-600:]}", file=sys.stderr)
                continue
            rows.append(Row(source, statistics.median(taken), min(taken), max(taken)))
        nursery.close()
    megabytes = SHAPES[options.size].kv_bytes_per_token("float32") * options.tokens / 1e6
    title = f"one prompt of {options.tokens} tokens, {megabytes:.0f} MB of KV, fp32, model `{options.size}`"
    columns = ("the prompt's KV", "ms, median", "fastest", "slowest", "of computing")
    table = plain_table(columns, words=columns[:1], title=title)
    for row in rows:
        times = (f"{1000 * value:.0f}" for value in (row.seconds, row.least, row.most))
        table.add_row(row.source, *times, f"{row.seconds / rows[0].seconds:.3f}")
    Console(width=max(110, Console().width)).print(table)
    if options.json:
        save_json(rows, options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
