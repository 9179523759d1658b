"""Log lines: one line each, and the traffic summary as a function of two snapshots."""

from __future__ import annotations

import io
import logging

import pytest

from kvbm.observe.log import configure, key_values, start_line, traffic_line
from kvbm.observe.metrics import Metrics


@pytest.fixture
def stream():
    logger = logging.getLogger("kvbm")
    kept = list(logger.handlers), logger.level, logger.propagate
    yield io.StringIO()
    logger.handlers[:], logger.level, logger.propagate = kept
    logger.setLevel(kept[1])


def test_a_record_is_one_line(stream):
    configure("info", stream)
    log = logging.getLogger("kvbm.manager")
    log.info("a\nb")
    log.debug("not shown")
    try:
        raise ValueError("c\nd")
    except ValueError:
        log.exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("Z level=info logger=kvbm.manager a\\nb")
    assert lines[0].startswith("time=20")
    assert 'level=error logger=kvbm.manager failed traceback="Traceback' in lines[1]
    assert "ValueError: c\\nd" in lines[1]


def test_the_last_configuration_wins(stream):
    other = io.StringIO()
    configure("error", other)
    configure("warn", stream)
    logging.getLogger("kvbm.x").warning("w")
    assert other.getvalue() == ""
    assert len(stream.getvalue().splitlines()) == 1
    assert "level=warn" in stream.getvalue()


def test_off_is_off_and_the_engines_logging_is_untouched(stream):
    root = list(logging.getLogger().handlers), logging.getLogger().level
    configure("off", stream)
    logging.getLogger("kvbm").critical("x")
    assert stream.getvalue() == ""
    assert root == (list(logging.getLogger().handlers), logging.getLogger().level)


def test_an_unknown_level_is_a_programmers_error():
    with pytest.raises(AssertionError):
        configure("loud")


def test_key_values():
    assert (
        key_values(a=1, b=None, c="x y", d=True, e='q"', f="", g="/p/q", h="l\nm", i="k=v")
        == 'a=1 c="x y" d=true e="q\\"" f="" g=/p/q h="l\\nm" i="k=v"'
    )
    assert start_line("manager", pid=3) == "start role=manager pid=3"


def test_traffic_line():
    metrics = Metrics()
    for tier, capacity, filling, resident in (("host", 100, 1, 60), ("disk", 1000, 0, 120)):
        metrics.set("kvbm_pool_capacity_blocks", capacity, tier=tier)
        metrics.set("kvbm_pool_blocks", capacity - filling - resident, tier=tier, state="free")
        metrics.set("kvbm_pool_blocks", filling, tier=tier, state="filling")
        metrics.set("kvbm_pool_blocks", resident, tier=tier, state="resident")
    metrics.add("kvbm_offload_blocks_d2h", 1000)
    before = metrics.snapshot()
    assert traffic_line(before, metrics.snapshot(), 60) == ""
    metrics.add("kvbm_offload_blocks_d2h", 128)
    metrics.add("kvbm_offload_blocks_h2d", 128)
    metrics.add("kvbm_transfer_bytes_total", 402_000_000, source="device", target="host")
    metrics.add("kvbm_transfer_bytes_total", 77, source="host", target="disk")
    metrics.add("kvbm_onboard_blocks_h2d", 40)
    metrics.add("kvbm_onboard_blocks_d2d", 24)
    metrics.add("kvbm_transfer_bytes_total", 201_000_000, source="host", target="device")
    metrics.add("kvbm_evicted_blocks_total", 12, tier="host", reason="capacity")
    metrics.add("kvbm_evicted_blocks_total", 5, tier="host", reason="reset")  # no sign of a small tier
    assert traffic_line(before, metrics.snapshot(), 60.2) == (
        "last 60 s: stored 128 blocks (402 MB), loaded 64 (201 MB: 40 host, 24 disk), evicted 12 host 0 disk,"
        " failures 0, host 61% full, disk 12% full"
    )


def test_traffic_line_says_what_disk_wrote_for_what_was_hit_there():
    metrics = Metrics()
    metrics.add("kvbm_hit_bytes_total", 1000, tier="disk")
    before = metrics.snapshot()
    metrics.add("kvbm_onboard_blocks_d2d", 1)
    metrics.add("kvbm_transfer_bytes_total", 4200, source="host", target="disk")
    metrics.add("kvbm_hit_bytes_total", 1000, tier="host")
    assert "disk wrote" not in traffic_line(before, metrics.snapshot(), 60)
    metrics.add("kvbm_hit_bytes_total", 2000, tier="disk")
    assert ", disk wrote 2.1 bytes per byte of hit, failures 0" in traffic_line(
        before, metrics.snapshot(), 60
    )


def test_traffic_line_names_only_tiers_that_exist():
    metrics = Metrics()
    metrics.set("kvbm_pool_capacity_blocks", 4, tier="host")
    before = metrics.snapshot()
    metrics.add("kvbm_failures_total", 2, tier="host", kind="load")
    metrics.add("kvbm_failures_total", tier="host", kind="io")
    assert traffic_line(before, metrics.snapshot(), 60) == (
        "last 60 s: stored 0 blocks (0 B), loaded 0 (0 B: 0 host), evicted 0 host, failures 3, host 0% full"
    )


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("kvbm_offload_blocks_d2h", {}),
        ("kvbm_offload_blocks_d2d", {}),
        ("kvbm_onboard_blocks_h2d", {}),
        ("kvbm_onboard_blocks_d2d", {}),
        ("kvbm_failures_total", {"tier": "disk", "kind": "io"}),
    ],
)
def test_any_movement_is_worth_a_line(name, labels):
    metrics = Metrics()
    before = metrics.snapshot()
    metrics.add(name, **labels)
    assert traffic_line(before, metrics.snapshot(), 60).startswith("last 60 s: ")
