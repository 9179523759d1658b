"""What keeps KV below a SGLang engine under test: its own files, or a manager of ours through one of three ways."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rigs.manager_probe import Metrics, SharedManager, wait_for
from rigs.sglang import modes

WAYS = ("storage", "generic", "linker")
"""The ways of ours: HiCache storage by its zero-copy calls, by its generic ones, and the linker."""
NAMESPACES = 2
"""Different models, or versions of one in another form, that one manager keeps; each gets an equal share."""
PAGES_MAX = NAMESPACES * 600
SETTLE_S = 30.0
STEADY = 8
"""Looks that must agree."""
FLIP = 0x80
"""In every byte of a 32-bit float: the sign, the last bit of the exponent, and two of the fraction."""


class Keeper(Protocol):
    """Keeps pages of KV while an engine is restarted."""

    name: str

    def arguments(self, model: Path, **more: Any) -> dict[str, Any]:
        """An engine's arguments."""

    def variables(self) -> dict[str, str]:
        """An engine's environment."""

    def stored(self) -> int:
        """Pages that would outlast a restart."""

    def damage(self, change: Callable[[Path], int]) -> int:
        """Change every file that holds KV, while nobody has it open; the sum of what `change` says."""

    def close(self) -> None: ...


class Files:
    """SGLang's own files below its host pool."""

    name = "file"

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def arguments(self, model: Path, **more: Any) -> dict[str, Any]:
        """An engine's arguments."""
        return modes.file(model, **more)

    def variables(self) -> dict[str, str]:
        """An engine's environment."""
        return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.directory)}

    def stored(self) -> int:
        """Files."""
        return len(self._files())

    def damage(self, change: Callable[[Path], int]) -> int:
        """Change every file."""
        return sum(change(path) for path in self._files())

    def close(self) -> None:
        """Nothing runs."""

    def _files(self) -> list[Path]:
        return sorted(self.directory.glob("*.bin"))


class Manager:
    """A shared manager with a disk, and the way of an engine to it."""

    def __init__(
        self,
        directory: Path,
        way: str = "storage",
        host_pages: int = PAGES_MAX,
        disk: bool = True,
        disk_pages: int = PAGES_MAX,
        namespaces: int = NAMESPACES,
    ) -> None:
        assert way in WAYS
        self.name = way
        self._directory, self._disk = directory, disk
        self._sizes = host_pages, disk_pages, namespaces
        self.disk = directory / "disk"
        self._running: SharedManager | None = None
        self.start()

    def arguments(self, model: Path, **more: Any) -> dict[str, Any]:
        """An engine's arguments."""
        if self.name == "linker":
            return modes.linker(model, **more)
        return modes.storage(model, v1=self.name == "storage", **more)

    def variables(self) -> dict[str, str]:
        """An engine's environment."""
        return {
            "DYN_KVBM_MANAGER": self.running.socket_path,
            "DYN_KVBM_RUNTIME_DIR": str(self._directory / "run"),
            "DYN_KVBM_ONBOARD": "always",
            "DYN_LOG": "info",
        }

    @property
    def running(self) -> SharedManager:
        """The manager's process."""
        assert self._running is not None
        return self._running

    def start(self) -> None:
        """Start the manager, or another on the same disk."""
        run = self._directory / "run"
        run.mkdir(mode=0o700, exist_ok=True)
        host, disk, namespaces = map(str, self._sizes)
        words = ["--runtime-dir", str(run), "--host-blocks", host, "--metrics", "--namespaces", namespaces]
        if self._disk:
            words += ["--disk-blocks", disk, "--disk-dir", str(self.disk), "--no-disk-offload-filter"]
        self._running = SharedManager(self._directory, str(run / "manager.sock"), *words)

    def stop(self) -> None:
        """SIGTERM: what waits for disk is written."""
        self.running.close()

    def pause(self, paused: bool) -> None:
        """SIGSTOP, or SIGCONT."""
        os.kill(self.running.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def metrics(self) -> Metrics:
        """The manager's counters now."""
        return self.running.metrics()

    def stored(self) -> int:
        """Pages on disk, or in host memory where there is no disk."""
        tier = "disk" if self._disk else "host"
        return int(self.metrics()[f'kvbm_pool_blocks{{tier="{tier}",state="resident"}}'])

    def damage(self, change: Callable[[Path], int]) -> int:
        """Change every slab file, while no manager runs."""
        self.stop()
        changed = sum(change(path) for path in sorted(self.disk.rglob("slab*")))
        self.start()
        return changed

    def close(self) -> None:
        """End the manager."""
        if self._running is not None and self.running.alive:
            self.pause(False)
            self.running.close()


def keeper(way: str, directory: Path, **options: Any) -> Keeper:
    """What one of the ways, or `file`, keeps KV in."""
    directory.mkdir(parents=True, exist_ok=True)
    return Files(directory / "files") if way == "file" else Manager(directory, way, **options)


def wait_until_stored(kept: Keeper, pages: int) -> None:
    """Wait until so many pages would outlast a restart."""
    wait_for(lambda: kept.stored() >= pages, SETTLE_S, lambda: f"{kept.stored()} of {pages} pages are stored")


def wait_until_settled(kept: Keeper) -> None:
    """Wait until nothing more comes to be stored: the count stays the same for a while."""
    counts: list[int] = []

    def settled() -> bool:
        counts.append(kept.stored())
        return len(counts) > STEADY and len(set(counts[-STEADY:])) == 1

    wait_for(settled, SETTLE_S, lambda: f"pages are still being stored: {counts[-STEADY:]}")


def flip_every_byte(path: Path) -> int:
    """Flip a bit in every byte; how many."""
    content = path.read_bytes()
    path.write_bytes(content.translate(bytes(byte ^ FLIP for byte in range(256))))
    return len(content)


def cut_in_half(path: Path) -> int:
    """Cut off the second half of what was written (a slab is made larger than that); how many bytes."""
    written = len(path.read_bytes().rstrip(b"\0"))
    os.truncate(path, written // 2)
    return written - written // 2


def copy_of(model: Path, directory: Path) -> Path:
    """A copy of a model that a test may change."""
    return Path(shutil.copytree(model, directory))


def change_weights(model: Path) -> Mapping[str, Any]:
    """Other weights at the same path: each matrix's rows move on by one."""
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    weights = {name: tensor.roll(1, 0).contiguous() for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return weights
