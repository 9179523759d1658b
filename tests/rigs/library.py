"""A KV cache of torch tensors, and what a model would have computed in it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

import kvbm
from kvbm.clock import Clock, monotonic
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.settings import parse_size
from rigs.served import DEADLINE_S, ServedManager

T = TypeVar("T")

BLOCK_TOKENS = 8
NAMESPACE = kvbm.Namespace(model="test", fields=(("weights", "1"),))
LAYERS = 3
DEVICE_BLOCKS = 32
BLOCK_SHAPE = (2, BLOCK_TOKENS, 16)
SHARD_BYTES = LAYERS * 2 * BLOCK_TOKENS * 16 * 4


def layout() -> kvbm.BlockLayout:
    """The layout of the cache that `new_cache` makes."""
    return kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=SHARD_BYTES)


def new_cache(seed: int) -> dict[str, torch.Tensor]:
    """A cache full of noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randn(DEVICE_BLOCKS, *BLOCK_SHAPE, generator=generator) for i in range(LAYERS)
    }


def content(cache: dict[str, torch.Tensor], blocks: list[int]) -> torch.Tensor:
    """What these blocks hold, in all layers."""
    return torch.stack([cache[f"layer.{i}"][blocks] for i in range(LAYERS)])


def computed(tokens: list[int], block: int) -> torch.Tensor:
    """The KV of one block, as a model computes it: a function of all tokens up to its end."""
    prefix = repr(tokens[: (block + 1) * BLOCK_TOKENS]).encode()
    generator = torch.Generator().manual_seed(zlib.crc32(prefix))
    return torch.randn(LAYERS, 1, *BLOCK_SHAPE, generator=generator)


def prompt(rng: random.Random, blocks: int) -> list[int]:
    """Random tokens: so many whole blocks, and part of another."""
    return [rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS))]


class LocalHouse:
    """Block managers that keep their blocks in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manager: kvbm.BlockManager

    def open(self, **options: Any) -> kvbm.BlockManager:
        """A block manager; with a `disk` its files lie in the test's directory."""
        if "disk" in options:
            options["disk_dir"] = str(self.directory)
        self._manager = kvbm.BlockManager(layout(), **{"namespace": NAMESPACE, **options})
        return self._manager

    def with_space(self, function: Callable[[Space], T]) -> T:
        """Look into the space of the last one, or change it."""
        return function(self._manager.backend.space)  # type: ignore[attr-defined]

    @property
    def metrics(self) -> Metrics:
        """Of the last one's tiers."""
        return self._manager.metrics

    def close(self) -> None:
        """Nothing runs."""


class SharedHouse:
    """Clients of a manager that runs beside, a new one for each: its files are found again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.served: ServedManager | None = None

    def open(
        self,
        *,
        host: str | int = "1MB",
        disk: str | int | None = None,
        disk_write_budget: int = 0,
        disk_admission: str = "all",
        clock: Clock = monotonic,
        **options: Any,
    ) -> kvbm.BlockManager:
        """A client of a manager with these tiers."""
        self.close()
        settings = {
            "host_bytes": parse_size("host", host) if isinstance(host, str) else host,
            "disk_bytes": parse_size("disk", disk) if isinstance(disk, str) else disk,
            "disk_dir": str(self.directory),
            "disk_write_budget_bytes": disk_write_budget,
            "disk_admission": disk_admission,
            **options,
        }
        self.served = ServedManager(self.directory, settings, clock)
        return self.connect()

    def connect(self, **options: Any) -> kvbm.BlockManager:
        """Another client of the manager that runs."""
        assert self.served is not None
        patient = {"reply_timeout_s": DEADLINE_S, **options}
        return kvbm.BlockManager.connect(self.served.path, layout(), NAMESPACE, **patient)

    def with_space(self, function: Callable[[Space], T]) -> T:
        """Look into the manager's space, or change it."""
        assert self.served is not None
        return self.served.with_space(function)

    @property
    def metrics(self) -> Metrics:
        """Of the manager."""
        assert self.served is not None
        return self.served.metrics

    def close(self) -> None:
        """Stop the manager."""
        if self.served is not None:
            self.served.stop()
