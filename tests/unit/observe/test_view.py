"""Rates from two moments: against an oracle that counts in dictionaries, and what the verdict says of them."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.admin_protocol import Description, EngineReport, Moment, SnapshotReply, SpaceReport, TierReport
from kvbm.block import NO_COUNT
from kvbm.observe.metric_table import BY_NAME
from kvbm.observe.verdict import Signs, judge
from kvbm.observe.view import FLOWS, look, start_of
from kvbm.remote_report import RemoteReport

BLOCK_TOKENS, BLOCK_BYTES = 16, 4096


def moment(at_s: float, values: dict[tuple[str, ...], float]) -> Moment:
    return Moment(
        at_s=at_s, values=tuple((name, tuple(labels), value) for (name, *labels), value in values.items())
    )


def tier(name: str, blocks: int = 100, resident: int = 40, leased: int = 10, fault: str = "") -> TierReport:
    return TierReport(
        tier=name,
        blocks=blocks,
        free=blocks - resident - 2,
        filling=2,
        resident=resident,
        leased=leased,
        fault=fault,
    )


def space(*tiers: TierReport, block_tokens: int = BLOCK_TOKENS, name: str = "aa") -> SpaceReport:
    return SpaceReport(
        namespace=name,
        fingerprint=bytes(32),
        model="m",
        fields=(),
        ephemeral=False,
        staging=False,
        block_tokens=block_tokens,
        block_bytes=BLOCK_BYTES,
        tiers=tiers,
        fault="",
        onboard_blocks=3,
        offload_blocks=4,
        leases=5,
        reservations=6,
    )


def engine(ranks: int = 2) -> EngineReport:
    return EngineReport(
        engine="e",
        model="m",
        namespace="aa",
        rank_count=2,
        ranks=tuple(range(ranks)),
        led=True,
        leases=1,
        leased_blocks=9,
        lease_blocks_max=75,
    )


def state(
    now: Moment, earlier: Moment, *spaces: SpaceReport, uptime_s: float = 1000.0, engines: int = 1
) -> SnapshotReply:
    description = Description(
        version="1",
        pid=7,
        epoch=1,
        uptime_s=uptime_s,
        spaces=spaces or (space(tier("host"), tier("disk", blocks=200)),),
        engines=(engine(),) * engines,
        asked_blocks=0,
        hit_blocks={},
        sessions=1,
        fences=0,
        refused=0,
    )
    return SnapshotReply(manager=description, now=now, earlier=earlier)


SERIES = [
    ("kvbm_queried_blocks_total",),
    ("kvbm_hit_blocks_total", "host"),
    ("kvbm_hit_blocks_total", "disk"),
    ("kvbm_onboard_blocks_h2d",),
    ("kvbm_onboard_blocks_d2d",),
    ("kvbm_lookups_total", "hit"),
    ("kvbm_lookups_total", "miss"),
    ("kvbm_evicted_blocks_total", "host", "capacity"),
    ("kvbm_evicted_blocks_total", "host", "reset"),
    ("kvbm_evicted_blocks_total", "disk", "capacity"),
    ("kvbm_saved_prefill_seconds_total",),
    ("kvbm_lost_prefixes_total",),
    *(("kvbm_transfer_bytes_total", *flow) for flow in FLOWS),
    *(("kvbm_transfer_seconds_count", *flow) for flow in FLOWS),
    *(("kvbm_transfer_seconds_sum", *flow) for flow in FLOWS),
]
counts = st.dictionaries(st.sampled_from(SERIES), st.integers(0, 1000))


@given(counts, counts, st.floats(0.5, 100.0))
def test_rates_are_growth_over_the_window(
    at_first: dict[tuple[str, ...], float], more: dict[tuple[str, ...], float], seconds: float
) -> None:
    at_last = {series: at_first.get(series, 0) + more.get(series, 0) for series in {*at_first, *more}}
    view = look(state(moment(50.0 + seconds, at_last), moment(50.0, at_first)))

    def grown(*series: str) -> float:
        return more.get(series, 0)

    asked, found = grown("kvbm_queried_blocks_total"), {}
    for name in ("host", "disk"):
        found[name] = grown("kvbm_hit_blocks_total", name)
    assert view.asked == BLOCK_TOKENS * asked and view.hit == BLOCK_TOKENS * sum(found.values())
    assert view.hit_rate == pytest.approx(sum(found.values()) / asked if asked else 0.0)
    assert view.loaded == BLOCK_TOKENS * (grown("kvbm_onboard_blocks_h2d") + grown("kvbm_onboard_blocks_d2d"))
    lookups = grown("kvbm_lookups_total", "hit") + grown("kvbm_lookups_total", "miss")
    assert view.lookups_per_s == pytest.approx(lookups / seconds)
    assert (view.saved_s, view.lost_lookups) == (
        grown("kvbm_saved_prefill_seconds_total"),
        grown("kvbm_lost_prefixes_total"),
    )
    for shown in view.tiers:
        assert shown.hit_share == pytest.approx(found[shown.name] / asked if asked else 0.0)
        evicted = grown("kvbm_evicted_blocks_total", shown.name, "capacity")
        assert shown.evicted_per_s == pytest.approx(evicted / seconds), "no reset says that a tier is small"
    for flow in view.flows:
        path = (flow.source, flow.target)
        assert flow.bytes_per_s == pytest.approx(grown("kvbm_transfer_bytes_total", *path) / seconds)
        transfers = grown("kvbm_transfer_seconds_count", *path)
        mean_s = grown("kvbm_transfer_seconds_sum", *path) / transfers if transfers else None
        assert flow.mean_s == (None if mean_s is None else pytest.approx(mean_s))


def test_occupancy_and_queues_are_sums_over_namespaces() -> None:
    at = moment(10.0, {})
    view = look(
        state(
            at, moment(0.0, {}), space(tier("host")), space(tier("host", blocks=300, resident=158, leased=0))
        )
    )
    (host,) = view.tiers
    assert (host.capacity_blocks, host.resident_blocks, host.leased_blocks) == (400, 198, 10)
    assert host.capacity_bytes == 400 * BLOCK_BYTES and host.used_bytes == 202 * BLOCK_BYTES
    assert host.used_share == pytest.approx(202 / 400)
    assert msgspec.structs.astuple(view.queues) == (6, 8, 0, 0, 10, 12)


def test_namespaces_with_blocks_of_other_lengths_are_counted_in_blocks() -> None:
    values = {("kvbm_queried_blocks_total",): 10.0}
    odd = space(tier("host"), block_tokens=32, name="bb")
    mixed = look(state(moment(60.0, values), moment(0.0, {}), space(tier("host")), odd))
    assert (mixed.unit, mixed.asked) == ("blocks", 10.0)
    alone = look(state(moment(60.0, values), moment(0.0, {}), odd))
    assert (alone.unit, alone.asked) == ("tokens", 320.0)
    single = look(state(moment(60.0, values), moment(0.0, {}), space(tier("host"), block_tokens=1)))
    assert (single.unit, single.asked) == ("tokens", 10.0)


def test_a_window_is_the_given_one_the_managers_or_since_its_start_but_never_of_another_life() -> None:
    name = ("kvbm_queried_blocks_total",)
    now, earlier = moment(100.0, {name: 9.0}), moment(40.0, {name: 5.0})
    asked = state(now, earlier, uptime_s=80.0)
    assert (look(asked).window_s, look(asked).asked) == (60.0, 4.0 * BLOCK_TOKENS)
    nearer = look(asked, moment(90.0, {name: 8.0}))
    assert (nearer.window_s, nearer.asked) == (10.0, BLOCK_TOKENS)
    whole = look(asked, start_of(asked))
    assert (whole.window_s, whole.asked) == (80.0, 9.0 * BLOCK_TOKENS)
    assert look(asked, moment(10.0, {name: 1.0})).window_s == 60.0
    assert look(asked, moment(100.0, {name: 9.0})).window_s == 60.0


def test_flows_and_evictions_may_have_a_shorter_window() -> None:
    flow = ("kvbm_transfer_bytes_total", "host", "device")
    evicted = ("kvbm_evicted_blocks_total", "host", "capacity")
    now = moment(100.0, {flow: 1000.0, evicted: 50.0})
    view = look(state(now, moment(40.0, {})), recent=moment(95.0, {flow: 900.0, evicted: 40.0}))
    assert (view.window_s, view.flows_window_s) == (60.0, 5.0)
    assert next(f.bytes_per_s for f in view.flows if f.target == "device") == 20.0
    assert view.tiers[0].evicted_per_s == 2.0


# ---- the verdict


def said(**signs: object) -> list[tuple[str, str]]:
    known = {"window_s": 60.0, "uptime_s": 3600.0, "engines": 1, "lookups": 100.0, "asked": 1000.0, **signs}
    return [(finding.level, finding.text) for finding in judge(msgspec.convert(known, Signs))]


def test_it_says_what_was_saved() -> None:
    assert said(hit_rate=0.63, saved_s=41.2, loaded=630.0) == [
        ("normal", "hit rate 63% of the 1,000 tokens asked in the last minute: saved 41 s of prefill")
    ]
    assert said(hit_rate=0.5, loaded=500.0)[0][1].endswith("500 tokens were loaded, not computed")
    assert said(hit_rate=0.5)[0][1].endswith("nothing was loaded")
    assert said(window_s=5.0, lookups=0.0) == [("normal", "no request in the last 5 s")]
    assert said(engines=0, lookups=0.0) == [("normal", "no engine is connected")]
    assert [text.split()[0] for _, text in said(engines=0)] == ["no", "hit"]


PRESSED = {"hit_rate": 0.6, "loaded": 9.0, "host_full": True, "host_evicted_per_s": 120.0}


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        (
            {**PRESSED, "has_disk": True, "disk_hit_share": 0.3},
            ["evicts 120 blocks/s", "30%", "more host memory"],
        ),
        ({**PRESSED, "lost_lookups": 30.0}, ["30% of the requests found nothing", "or a disk tier"]),
        (
            {"has_disk": True, "disk_full": True, "disk_evicted_per_s": 5.0, "lost_lookups": 30.0},
            ["larger disk"],
        ),
        ({"no_room_share": 0.2, "host_leased_share": 0.7}, ["leases hold 70%"]),
        ({"cost_share": 0.4}, ["40% of what was found is computed"]),
        ({"late_share": 0.4, "onboarding": 1234}, ["arrives too late (1,234 blocks"]),
        ({"hit_rate": 0.001, "stored_bytes": 5e9}, ["5 GB were written and almost", "does not pay"]),
        (
            {"hit_rate": 0.0, "stored_bytes": 5e9},
            ["written and nothing", "does not pay", "cache_salt", "kvbm why"],
        ),
    ],
)
def test_it_says_what_would_help_and_only_with_a_reason(signs: dict[str, object], words: list[str]) -> None:
    advice = [text for level, text in said(**signs) if level == "advice"]
    assert len(advice) == 1 and all(word in advice[0] for word in words)
    assert not [text for level, text in said(**{**signs, "lookups": 3.0}) if level == "advice"]


def test_a_full_host_from_which_nothing_is_missed_is_no_reason_for_more_memory() -> None:
    assert [level for level, _ in said(**PRESSED)] == ["normal"]


def test_faults_come_first() -> None:
    levels = said(
        faults=[["aa", "disk: read-only"]], incomplete=[["e", 1, 2]], corrupt=2.0, failed=3.0, cost_share=0.5
    )
    assert [level for level, _ in levels] == ["fault"] * 4 + ["normal", "advice"]
    assert levels[0][1] == "namespace aa: disk: read-only"
    assert "1 of its 2 ranks" in levels[1][1] and "2 blocks had a wrong checksum" in levels[2][1]


def test_faults_of_tiers_and_missing_ranks_reach_the_verdict() -> None:
    asked = state(moment(9.0, {}), moment(0.0, {}), space(tier("host"), tier("disk", fault="gone")))
    missing = msgspec.structs.replace(asked.manager, engines=(engine(ranks=1),))
    texts = [finding.text for finding in look(msgspec.structs.replace(asked, manager=missing)).findings]
    assert texts[0] == "namespace aa: disk: gone" and "1 of its 2 ranks" in texts[1]


def test_the_view_reads_series_that_the_table_has() -> None:
    """A label that is added to a metric would make its rate 0 without a word."""
    for name, *labels in SERIES:
        metric = BY_NAME[re.sub("(?<=seconds)_(count|sum)$", "", name)]
        assert len(metric.labels) == len(labels)
        assert all(value in label.values for label, value in zip(metric.labels, labels, strict=True))


def store(**fields: object) -> RemoteReport:
    return RemoteReport(name="remote", up_blocks=3, down_blocks=2, **fields)  # type: ignore[arg-type]


def with_store(report: RemoteReport, known: int = 50) -> SpaceReport:
    away = TierReport(
        tier="remote", blocks=NO_COUNT, free=0, filling=0, resident=known, leased=0, fault=report.fault
    )
    return msgspec.structs.replace(space(tier("host"), away), remotes=(report,))


def test_a_remote_tier_has_no_size_and_divides_nothing() -> None:
    values = {("kvbm_queried_blocks_total",): 10.0, ("kvbm_hit_blocks_total", "remote"): 5.0,
              ("kvbm_transfer_bytes_total", "remote", "host"): 600.0}  # fmt: skip
    view = look(state(moment(60.0, values), moment(0.0, {}), with_store(store())))
    host, remote = view.tiers
    assert (host.name, remote.name) == ("host", "remote")
    assert (remote.capacity_blocks, remote.capacity_bytes, remote.used_share, remote.leased_share) == (
        0,
        0,
        0.0,
        0.0,
    )
    assert (remote.resident_blocks, remote.used_bytes, remote.hit_share) == (50, 50 * BLOCK_BYTES, 0.5)
    flows = {(flow.source, flow.target): flow.bytes_per_s for flow in view.flows}
    assert (flows["remote", "host"], flows["host", "remote"]) == (10.0, 0.0)
    assert (view.queues.remote_onboarding, view.queues.remote_offloading, view.queues.onboarding) == (3, 2, 3)


def test_without_one_there_are_no_flows_of_it() -> None:
    view = look(state(moment(60.0, {}), moment(0.0, {})))
    assert [(flow.source, flow.target) for flow in view.flows] == list(FLOWS)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (store(fault="remote tier is off (slow): x"), "remote: remote tier is off (slow): x"),
        (
            store(store_fault="remote tier takes no stores (full): x"),
            "remote: remote tier takes no stores (full): x",
        ),
        (
            store(
                fleet="f", nodes=2, troubles=("h:1: refused", "h:2: refused"), directory_fault="etcd is away"
            ),
            "remote: etcd is away; none of 2 nodes is reached: h:1: refused",
        ),
    ],
)
def test_a_store_that_is_off_or_takes_nothing_and_a_fleet_apart_are_faults_told_once(
    report: RemoteReport, said: str
) -> None:
    view = look(state(moment(60.0, {}), moment(0.0, {}), with_store(report)))
    faults = [finding.text for finding in view.findings if finding.level == "fault"]
    assert faults == [f"namespace aa: {said}"]


@pytest.mark.parametrize(
    ("reason", "blocks", "said"),
    [
        (
            "evicted",
            30.0,
            "23% of the blocks on their way to the store were evicted from host before their turn",
        ),
        ("evicted", 5.0, ""),
        ("budget", 7.0, "7 blocks were not written to the store, as the hour's budget was spent"),
    ],
)
def test_what_does_not_reach_the_store_is_said_with_what_would_help(
    reason: str, blocks: float, said: str
) -> None:
    values = {
        ("kvbm_lookups_total", "hit"): 20.0,
        ("kvbm_offload_blocks_d2o",): 100.0,
        ("kvbm_remote_skipped_blocks_total", reason): blocks,
    }
    view = look(state(moment(60.0, values), moment(0.0, {}), with_store(store())))
    advice = [finding.text for finding in view.findings if finding.level == "advice"]
    assert [text for text in advice if "store" in text] == ([] if not said else advice)
    assert not said or advice[0].startswith(said)


def test_damaged_blocks_of_a_store_are_not_blamed_on_the_disk() -> None:
    values = {("kvbm_failures_total", "remote", "corrupt"): 2.0}
    view = look(state(moment(60.0, values), moment(0.0, {}), with_store(store())))
    (fault,) = [finding.text for finding in view.findings if finding.level == "fault"]
    assert fault.startswith("2 blocks of the remote store had a wrong checksum")
