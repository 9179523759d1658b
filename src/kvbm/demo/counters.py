"""Counters of a run, read from metrics pages before and after its requests: vLLM's own and KVBM's."""

from __future__ import annotations

Labels = tuple[tuple[str, str], ...]
Readings = dict[tuple[str, Labels], float]
"""Every sample of a page by name and labels, sorted by label name."""

TIERS = ("device", "host", "disk")


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
    names, wanted = (name, f"{name}_total"), set(labels.items())
    found = (value for (each, own), value in readings.items() if each in names and wanted <= set(own))
    return int(sum(found))


def hit_tokens(engine: Readings, kvbm: Readings, block_tokens: int) -> dict[str, int]:
    """Prompt tokens that were not computed, by the tier they came from.

    vLLM counts them by tier from 0.32 on. Before that the blocks that KVBM brought to the device are counted.
    """
    hits = {"device": total(engine, "vllm:prefix_cache_hits")}
    for tier, onboarded in (("host", "kvbm_onboard_blocks_h2d"), ("disk", "kvbm_onboard_blocks_d2d")):
        by_engine = total(engine, "vllm:prompt_tokens_cached_by_source", source=tier)
        hits[tier] = by_engine or total(kvbm, onboarded) * block_tokens
    return hits
