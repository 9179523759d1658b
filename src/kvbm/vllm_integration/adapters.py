"""LoRA adapters add their content to the keys of their requests: vLLM's hash covers only name and path."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvbm.vllm_integration import engine_start
from kvbm.weights import changed_since, weight_files, weights_digest

log = logging.getLogger("kvbm.vllm")


class Adapters:
    """The extras of requests with an adapter, by its path.

    Requests neither look up nor store if the files of their adapter changed while the engine runs (it may or may not
    have been loaded again), or if it has no local files (so that it cannot be told from another). An adapter that is
    younger than the engine may have changed between its loading and our first look: its keys are this engine's alone.
    """

    def __init__(self, memo_path: Path) -> None:
        self._memo_path = memo_path
        self._seen: dict[str, tuple[tuple[object, ...], bytes]] = {}
        self._refused: set[str] = set()
        self._own_suffix = os.urandom(16)

    def extras(self, lora_path: str) -> bytes | None:
        """The extras of a request that uses the adapter at this path; None when its blocks must not be kept."""
        if lora_path in self._refused:
            return None
        try:
            identity = _identity(Path(lora_path))
            if lora_path not in self._seen:
                digest = weights_digest([Path(lora_path)], self._memo_path)
                if digest is None:
                    self._refuse(lora_path, "is in no local file that could be digested")
                    return None
                young = changed_since([Path(lora_path)], engine_start.engine_start_s()) is not None
                self._seen[lora_path] = identity, digest.encode() + (self._own_suffix if young else b"")
        except OSError as error:
            self._refuse(lora_path, f"cannot be read ({error})")
            return None
        first, extras = self._seen[lora_path]
        if identity != first:
            self._refuse(lora_path, "changed while the engine runs")
            return None
        return extras

    def _refuse(self, lora_path: str, why: str) -> None:
        self._refused.add(lora_path)
        log.warning("adapter %s %s: from now on its blocks are not kept", lora_path, why)


def _identity(location: Path) -> tuple[object, ...]:
    """A value that changes when any of an adapter's files changes."""
    return tuple(
        (path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in weight_files(location)
        for status in (path.stat(),)
    )
