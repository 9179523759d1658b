"""Connector statistics: KVBM's part of vLLM's log line and of its /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvbm.block import Tier
from kvbm.leader import Leader
from kvbm.protocol import UNLOADED_REASONS

COUNTERS = {
    "loaded_host_blocks": "Blocks that KVBM loaded from host memory",
    "loaded_disk_blocks": "Blocks that KVBM loaded from disk",
    "loaded_remote_blocks": "Blocks that KVBM loaded from a remote store",
    "failed_blocks": "Blocks that KVBM had promised and that were computed instead",
}
"""The counters, and their descriptions in vLLM's /metrics."""

UNLOADED = {f"unloaded_{reason}_blocks": reason for reason in UNLOADED_REASONS}
"""Blocks that were found and computed all the same, by reason: one series, with the reason as a label."""
UNLOADED_HELP = (
    "Blocks that KVBM had found beyond those on the device and that were computed all the same, by reason"
)


@dataclass
class KvbmStats(KVConnectorStats):
    """Counts since the last report, by the names of `COUNTERS` and `UNLOADED`."""

    def __getitem__(self, name: str) -> Any:
        """`stats["data"]`: how MultiConnector before 0.32 reads a child's statistics, serialized or not."""
        return getattr(self, name)

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


class KvbmPromMetrics(KVConnectorPromMetrics):
    """`vllm:kvbm_…_total`. MultiConnector stops the engine when a child has statistics and nothing like this."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_name = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvbm_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        unloaded = self._counter_cls(
            name="vllm:kvbm_unloaded_blocks", documentation=UNLOADED_HELP, labelnames=[*labelnames, "reason"]
        )
        for name, reason in UNLOADED.items():
            by_engine = {engine: [*values, reason] for engine, values in per_engine_labelvalues.items()}
            self._by_name[name] = create_metric_per_engine(unloaded, by_engine)

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None:
        data = _counts(transfer_stats_data)
        for name, by_engine in self._by_name.items():
            by_engine[engine_idx].inc(data.get(name, 0))


class Counted:
    """The counts of a leader, as differences between two calls."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._last: Counter[str] = Counter()
        self._numbers: tuple[int, ...] = ()

    def since_last(self) -> KvbmStats | None:
        """The counts since the last call; None when there are none."""
        lookups = self._leader.lookups
        numbers = (*lookups.unloaded.values(), *lookups.loaded_blocks.values(), lookups.failed_blocks)
        if numbers == self._numbers:
            return None  # as in almost every step
        self._numbers = numbers
        now = Counter({name: lookups.unloaded[reason] for name, reason in UNLOADED.items()})
        now["loaded_host_blocks"] = lookups.loaded_blocks[Tier.HOST]
        now["loaded_disk_blocks"] = lookups.loaded_blocks[Tier.DISK]
        now["loaded_remote_blocks"] = lookups.loaded_blocks[Tier.REMOTE]
        now["failed_blocks"] = lookups.failed_blocks
        rise, self._last = now - self._last, now
        # Reasons without blocks are left out: vLLM's log line repeats everything that is in.
        return KvbmStats(data={**dict.fromkeys(COUNTERS, 0), **rise}) if rise else None


def build(data: dict[str, Any] | None) -> KvbmStats:
    """Stats from the payload that crossed a process border."""
    return KvbmStats(data=dict(_counts(data or {})))


def _counts(payload: Any) -> dict[str, Any]:
    """The counts in a payload: MultiConnector hands over the object itself or, before 0.32, its fields."""
    data: dict[str, Any] = payload.data if isinstance(payload, KVConnectorStats) else payload
    inner = data.get("data")
    return inner if isinstance(inner, dict) else data
