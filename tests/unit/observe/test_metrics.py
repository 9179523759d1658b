"""The table and the numbers: bounded labels, exact names, Prometheus' own rules."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvbm.observe.exposition import render
from kvbm.observe.metric_kinds import MetricKind
from kvbm.observe.metric_table import TABLE
from kvbm.observe.metrics import Metrics
from kvbm.observe.reference import page
from rigs.checkout import ROOT
from rigs.system_packages import require

# The names, types and help texts of the original, as a scrape of it gives them.
ORIGINAL_HELP = {
    "kvbm_offload_blocks_d2h": "The number of offload blocks from device to host",
    "kvbm_offload_blocks_h2d": "The number of offload blocks from host to disk",
    "kvbm_offload_blocks_d2d": "The number of offload blocks from device to disk (bypassing host memory)",
    "kvbm_offload_blocks_d2o": "The number of offload blocks from device to object storage",
    "kvbm_onboard_blocks_h2d": "The number of onboard blocks from host to device",
    "kvbm_onboard_blocks_d2d": "The number of onboard blocks from disk to device",
    "kvbm_onboard_blocks_o2d": "The number of onboard blocks from object storage to device",
    "kvbm_matched_tokens": "The number of matched tokens",
    "kvbm_host_cache_hit_rate": "Host cache hit rate (0.0-1.0) from the sliding window",
    "kvbm_disk_cache_hit_rate": "Disk cache hit rate (0.0-1.0) from the sliding window",
    "kvbm_object_cache_hit_rate": "Object storage cache hit rate (0.0-1.0) from the sliding window",
    "kvbm_object_read_failures": "The number of failed object storage read operations (blocks)",
    "kvbm_object_write_failures": "The number of failed object storage write operations (blocks)",
}
ORIGINAL = {
    "kvbm_offload_blocks_d2h": "counter",
    "kvbm_offload_blocks_h2d": "counter",
    "kvbm_offload_blocks_d2d": "counter",
    "kvbm_offload_blocks_d2o": "counter",
    "kvbm_onboard_blocks_h2d": "counter",
    "kvbm_onboard_blocks_d2d": "counter",
    "kvbm_onboard_blocks_o2d": "counter",
    "kvbm_matched_tokens": "counter",
    "kvbm_host_cache_hit_rate": "gauge",
    "kvbm_disk_cache_hit_rate": "gauge",
    "kvbm_object_cache_hit_rate": "gauge",
    "kvbm_object_read_failures": "counter",
    "kvbm_object_write_failures": "counter",
}


def full() -> Metrics:
    """Metrics in which every series of the table has been touched."""
    metrics = Metrics()
    for metric in TABLE:
        labels = {label.name: label.values[-1] for label in metric.labels}
        if metric.kind is MetricKind.COUNTER:
            metrics.add(metric.name, 3, **labels)
        elif metric.kind is MetricKind.GAUGE:
            metrics.set(metric.name, 0.25, **labels)
        else:
            metrics.observe(metric.name, 0.02, **labels)
    return metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(render(metrics)):
        for sample in family.samples:
            # The client's parser gives every counter its `_total`; the original's names go without.
            bare = sample.name.removesuffix("_total")
            name = bare if bare in ORIGINAL else sample.name
            found[name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_the_series_of_the_original_are_all_there_from_the_start():
    text = render(Metrics())
    for name, kind in ORIGINAL.items():
        assert f"# HELP {name} {ORIGINAL_HELP[name]}\n# TYPE {name} {kind}\n" in text
        assert re.search(rf"^{name} 0$", text, re.MULTILINE), name
        assert f"{name}_total" not in text
    assert {metric.name for metric in TABLE if metric.compatible} == set(ORIGINAL)
    assert all(not metric.labels for metric in TABLE if metric.compatible)


def test_new_series_follow_the_rules_of_prometheus():
    names = [metric.name for metric in TABLE]
    assert len(names) == len(set(names))
    for metric in TABLE:
        assert re.fullmatch(r"kvbm_[a-z0-9_]+", metric.name)
        assert metric.help
        assert "\n" not in metric.help
        if metric.compatible:
            continue
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        for label in metric.labels:
            assert len(label.values) == len(set(label.values)) > 0
            assert label.name not in {"le", "quantile", "name", "value"}


def test_every_metric_reaches_the_page():
    found = samples(full())
    for metric in TABLE:
        labels = tuple(sorted((label.name, label.values[-1]) for label in metric.labels))
        if metric.kind is MetricKind.HISTOGRAM:
            assert found[f"{metric.name}_count", labels] == 1
            assert found[f"{metric.name}_sum", labels] == 0.02
        else:
            assert found[metric.name, labels] == (3 if metric.kind is MetricKind.COUNTER else 0.25)


def test_failures_and_skips_start_at_zero_in_all_their_labels():
    found = samples(Metrics())
    for tier in ("host", "disk"):
        for kind in ("corrupt", "io", "load"):
            assert found["kvbm_failures_total", (("kind", kind), ("tier", tier))] == 0
    reasons = {dict(labels)["reason"] for name, labels in found if name == "kvbm_skipped_offloads_total"}
    assert reasons == {"full", "filter", "budget", "queue_full", "evicted", "tier_off"}


@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")])
def test_counters_are_of_the_tiers_that_there_are(tiers):
    metrics = Metrics(tiers)
    for tier in ("host", "disk"):  # as a lookup counts that finds nothing
        metrics.add("kvbm_hit_tokens_total", 0, engine="m/dp0", tier=tier)
        metrics.add("kvbm_hit_blocks_total", 0, tier=tier)
    named = {dict(labels)["tier"] for _, labels in samples(metrics) if "tier" in dict(labels)}
    assert named == set(tiers)
    per_tier = [
        metric for metric in TABLE if metric.at_zero and "tier" in {row.name for row in metric.labels}
    ]
    for metric in per_tier:
        assert {name[1] for name in metrics.snapshot() if name[0] == metric.name} == set(tiers)
    for name in ORIGINAL:
        assert (name, ()) in samples(metrics), "the original's are always there"


def test_what_happens_in_a_tier_without_series_is_counted_all_the_same():
    metrics = Metrics(("disk",))
    metrics.add("kvbm_evicted_blocks_total", 2, tier="host", reason="capacity")
    assert samples(metrics)["kvbm_evicted_blocks_total", (("reason", "capacity"), ("tier", "host"))] == 2


def test_gauges_of_tiers_that_do_not_exist_are_absent():
    names = {name for name, _ in samples(Metrics())}
    assert "kvbm_tier_up" not in names
    assert "kvbm_pool_capacity_blocks" not in names
    assert "# TYPE kvbm_tier_up" not in render(Metrics())


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_histogram_buckets_are_cumulative_and_complete(values):
    metrics = Metrics()
    for value in values:
        metrics.observe("kvbm_transfer_seconds", value, source="disk", target="host")
    found = samples(metrics)
    labels = (("source", "disk"), ("target", "host"))
    buckets = {
        float(dict(row)["le"]): count for (name, row), count in found.items() if name.endswith("_bucket")
    }
    for bound, count in buckets.items():
        assert count == sum(value <= bound for value in values)
    assert buckets[float("inf")] == found["kvbm_transfer_seconds_count", labels] == len(values)
    assert found["kvbm_transfer_seconds_sum", labels] == pytest.approx(sum(values))


def test_each_series_has_its_own_number():
    metrics = Metrics()
    metrics.add("kvbm_evicted_blocks_total", 2, tier="disk", reason="reset")
    metrics.add("kvbm_evicted_blocks_total", 3, tier="disk", reason="reset")
    assert metrics.value("kvbm_evicted_blocks_total", tier="disk", reason="reset") == 5
    assert metrics.value("kvbm_evicted_blocks_total", tier="disk", reason="capacity") == 0
    assert metrics.value("kvbm_evicted_blocks_total", tier="host", reason="reset") == 0
    metrics.set("kvbm_queue_blocks", 5, queue="offload")
    metrics.set("kvbm_queue_blocks", 3, queue="offload")
    assert metrics.value("kvbm_queue_blocks", queue="offload") == 3


def test_reading_makes_no_series():
    metrics = Metrics()
    assert metrics.value("kvbm_tier_up", tier="disk") == 0
    assert "kvbm_tier_up" not in render(metrics)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda metrics: metrics.add("kvbm_unknown"),
        lambda metrics: metrics.value("kvbm_unknown"),
        lambda metrics: metrics.add("kvbm_hit_blocks_total"),
        lambda metrics: metrics.add("kvbm_hit_blocks_total", tier="cloud"),
        lambda metrics: metrics.add("kvbm_hit_blocks_total", level="host"),
        lambda metrics: metrics.add("kvbm_hit_blocks_total", tier="host", extra="1"),
        lambda metrics: metrics.add("kvbm_matched_tokens", tier="host"),
        lambda metrics: metrics.add("kvbm_matched_tokens", -1),
        lambda metrics: metrics.set("kvbm_matched_tokens", 1),
        lambda metrics: metrics.add("kvbm_engines"),
        lambda metrics: metrics.observe("kvbm_engines", 1),
    ],
)
def test_a_wrong_name_or_label_is_a_programmers_error(wrong):
    metrics = Metrics()
    before = metrics.snapshot()
    with pytest.raises(AssertionError):
        wrong(metrics)
    assert metrics.snapshot() == before


def test_snapshot_stands_still():
    metrics = Metrics()
    before = metrics.snapshot()
    metrics.add("kvbm_evicted_blocks_total", 4, tier="host", reason="reset")
    metrics.observe("kvbm_transfer_seconds", 1.0, source="disk", target="host")
    assert before["kvbm_evicted_blocks_total", "host", "reset"] == 0
    assert metrics.snapshot()["kvbm_evicted_blocks_total", "host", "reset"] == 4
    assert metrics.snapshot()["kvbm_transfer_seconds", "disk", "host"] == 1


def test_a_scrape_while_series_appear():
    metrics = Metrics()
    stop = threading.Event()
    faults: list[Exception] = []

    def scrape() -> None:
        while not stop.is_set():
            try:
                samples(metrics)
            except Exception as fault:  # any fault at all is the finding
                faults.append(fault)
                return

    reader = threading.Thread(target=scrape)
    reader.start()
    tiers = ("device", "host", "disk", "remote")
    for turn in range(200):
        for source in tiers:
            metrics.observe("kvbm_transfer_seconds", 0.01 * turn, source=source, target=tiers[turn % 4])
            metrics.add("kvbm_transfer_bytes_total", turn, source=source, target=tiers[turn % 4])
    stop.set()
    reader.join()
    assert faults == []


def test_counting_needs_no_client_library():
    source = Path(render.__code__.co_filename).parent
    for path in source.glob("*.py"):
        assert "import prometheus_client" not in path.read_text()


def test_promtool_finds_nothing_but_the_names_of_the_original():
    result = subprocess.run(
        [require("promtool"), "check", "metrics"],
        input=render(full()),
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    assert complaints
    for line in complaints:
        name, _, finding = line.partition(" ")
        assert name in ORIGINAL, line
        assert finding == 'counter metrics should have "_total" suffix', line


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")
def test_reference_page_is_current():
    written = ROOT / "docs/reference/metrics.md"
    assert written.read_text() == page(), "run: python -m kvbm.observe.reference > docs/reference/metrics.md"
    assert all(f"`{metric.name}`" in page() for metric in TABLE)
