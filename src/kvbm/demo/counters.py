"""Counters of a run, read from metrics pages: vLLM's own and, where KVBM is on, KVBM's.

Pages are read before and after the measured requests; a run's numbers are the differences.
"""

from __future__ import annotations

from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]
Readings = dict[tuple[str, Labels], float]
"""Every sample of a page by name and labels, sorted by label name."""

TIERS = ("device", "host", "disk")
TRANSFERS = (("device", "host"), ("host", "disk"), ("disk", "host"), ("host", "device"))


def read(page: str) -> Readings:
    """The samples of a page in the Prometheus text format. Raises ValueError when it is not such a page."""
    from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def difference(before: Readings, after: Readings) -> Readings:
    """The counts between two readings. A series that is new counts from zero."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def total(readings: Readings, name: str, **labels: str) -> int:
    """The sum of a counter's series that carry these labels; 0 when there is none.

    `name` is given without `_total`: pages differ in whether they write it.
    """
    wanted = set(labels.items())
    return int(
        sum(
            value
            for (found, found_labels), value in readings.items()
            if found in (name, f"{name}_total") and wanted <= set(found_labels)
        )
    )


def hit_tokens(engine: Readings, kvbm: Readings, block_tokens: int) -> dict[str, int]:
    """Prompt tokens that were not computed, by the tier they came from.

    vLLM says it per tier from 0.32 on. Before that the blocks that KVBM brought to the device are counted.
    """
    hits = {"device": total(engine, "vllm:prefix_cache_hits")}
    for tier, onboarded in (("host", "kvbm_onboard_blocks_h2d"), ("disk", "kvbm_onboard_blocks_d2d")):
        by_engine = total(engine, "vllm:prompt_tokens_cached_by_source", source=tier)
        hits[tier] = by_engine or total(kvbm, onboarded) * block_tokens
    return hits


def bytes_moved(kvbm: Readings) -> dict[str, int]:
    """Bytes that KVBM moved, by direction ("device to host", …)."""
    return {
        f"{source} to {target}": total(kvbm, "kvbm_transfer_bytes", source=source, target=target)
        for source, target in TRANSFERS
    }


def named(readings: Readings, prefix: str) -> Mapping[str, float]:
    """The series whose name begins with `prefix` and that moved, with labels in the name: for a report."""
    return {
        name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels) + "}" if labels else ""): value
        for (name, labels), value in sorted(readings.items())
        if name.startswith(prefix) and value and not name.endswith(("_created", "_bucket"))
    }
