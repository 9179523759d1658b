"""Connector statistics: what vLLM's log line and its /metrics say about us."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class KvbmStats(KVConnectorStats):
    """Counts since the last report: `loaded_host_blocks`, `loaded_disk_blocks`, `failed_blocks`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("_", " "): value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


def build(data: dict[str, Any] | None) -> KvbmStats:
    """Stats from the payload that crossed a process border."""
    return KvbmStats(data=dict(data or {}))
