"""No cell of a table is cut, however narrow the terminal is, and all tables are made in one place."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.text import Text

import kvbm
from kvbm.admin_protocol import EngineReport, PrefixReport, SpaceReport, TierReport
from kvbm.cli.status import _engine_table, _tier_table
from kvbm.cli.top_picture import page
from kvbm.observe.verdict import Finding
from kvbm.observe.view import FlowView, QueueView, TierView, View
from kvbm.present.tables import plain_table, screen_table
from rigs.property_tests import scale_examples

WIDTHS = (80, 100)
TERABYTE = 10**12
MANY = 1_234_567_890


def drawn(table: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(table)
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return out.getvalue()


numbers = st.integers(0, 10**14).map("{:,}".format)


@settings(max_examples=scale_examples(300))
@given(
    st.integers(40, 160),
    st.lists(
        st.text("abcd ", min_size=1, max_size=14).filter(str.strip), min_size=1, max_size=14, unique=True
    ),
    st.data(),
)
def test_every_number_is_shown_whole_at_any_width(
    width: int, headings: list[str], data: st.DataObject
) -> None:
    headings = [heading.strip() + str(i) for i, heading in enumerate(headings)]
    rows = data.draw(st.lists(st.lists(numbers, min_size=len(headings), max_size=len(headings)), max_size=3))
    for table in (plain_table(headings, folded=headings[:1]), screen_table(headings)):
        for row in rows:
            table.add_row(Text(row[0]), *row[1:])
        text = drawn(table, width)
        assert "…" not in text
        found = text.split()
        for row in rows:
            for cell in row[1:]:
                assert cell in found


def test_where_it_fits_it_is_a_table_and_spare_columns_go_first() -> None:
    table = plain_table(("name", "count", "spare"), words={"name"}, spare=("spare",))
    table.add_row("a", "1,000", "2,000")
    assert drawn(table, 40).split() == [
        "name",
        "count",
        "spare",
        *re.findall("─+", drawn(table, 40)),
        "a",
        "1,000",
        "2,000",
    ]
    narrow = drawn(table, 14)
    assert "spare" not in narrow and "2,000" not in narrow and "count" in narrow.splitlines()[1]


def test_where_it_does_not_fit_each_row_is_a_paragraph() -> None:
    table = plain_table(("name", "TTFT\nmean", "\np50"), words={"name"}, title="times")
    for name in "ab":
        table.add_row(name, "1,000.00", "2,000.00")
    assert drawn(table, 20).splitlines() == [
        "times",
        *("name a", "  TTFT mean 1,000.00", "  TTFT p50 2,000.00"),
        *("name b", "  TTFT mean 1,000.00", "  TTFT p50 2,000.00"),
    ]


ENGINE = EngineReport(
    engine="vllm/Qwen3-235B-A22B/dp0-8f3a2c7e",
    model="Qwen/Qwen3-235B-A22B-Instruct-2507",
    namespace="9f2c51d0a1b2",
    rank_count=16,
    ranks=tuple(range(15)),
    led=True,
    leases=MANY,
    leased_blocks=MANY + 1,
    lease_blocks_max=MANY + 2,
)
SPACE = SpaceReport(
    namespace=ENGINE.namespace,
    fingerprint="00",
    model=ENGINE.model,
    fields=(),
    ephemeral=False,
    staging=True,
    block_tokens=16,
    block_bytes=1 << 20,
    tiers=tuple(
        TierReport(tier=tier, blocks=MANY + 3, free=0, filling=MANY + 4, resident=MANY, leased=MANY + 5)
        for tier in ("host", "disk")
    ),
    fault="",
    onboard_blocks=MANY + 6,
    offload_blocks=MANY + 7,
    leases=0,
    reservations=0,
)


@pytest.mark.parametrize("width", WIDTHS)
def test_status_shows_all_numbers(width: int) -> None:
    text = drawn(_tier_table((SPACE,)), width) + drawn(_engine_table((ENGINE,)), width)
    assert "…" not in text
    for number in range(MANY + 1, MANY + 8):
        assert str(number) in text.split()


def view() -> View:
    tiers = tuple(
        TierView(
            name=name,
            capacity_blocks=MANY + place,
            resident_blocks=MANY,
            filling_blocks=MANY,
            leased_blocks=MANY,
            capacity_bytes=987 * TERABYTE,
            used_bytes=987 * TERABYTE,
            used_share=1.0,
            leased_share=1.0,
            hit_blocks=MANY,
            hit_share=1.0,
            evicted_per_s=1_234_567.0 + place,
            up=False,
            staging=place == 0,
        )
        for place, name in enumerate(("host", "disk", "remote"))
    )
    pairs = (("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host"))
    flows = tuple(
        FlowView(source=a, target=b, bytes_per_s=(place + 1) * 111.123e12, bytes_moved=0.0, mean_s=1234.5678)
        for place, (a, b) in enumerate(pairs)
    )
    return View(
        version="1.0",
        pid=1234567,
        epoch=1,
        uptime_s=1e7,
        window_s=60.0,
        unit="tokens",
        lookups_per_s=123_456.7,
        asked=MANY,
        hit=MANY,
        loaded=MANY,
        hit_rate=1.0,
        saved_s=1.0,
        lost_lookups=0.0,
        findings=(Finding("normal", "it works"),),
        tiers=tiers,
        flows=flows,
        flows_window_s=5.0,
        queues=QueueView(
            onboarding=MANY + 10,
            offloading=MANY + 11,
            remote_onboarding=MANY + 12,
            remote_offloading=MANY + 13,
            leases=MANY + 14,
            reservations=MANY + 15,
        ),
        spaces=(SPACE,),
        engines=(ENGINE,),
        prefixes=(
            PrefixReport(
                namespace=ENGINE.namespace,
                name="9f2c51d0a1b2c3d4/8f3a",
                tokens=MANY + 20,
                requests=MANY + 21,
                asked_tokens=MANY + 20,
                found_tokens=MANY + 20,
                lost=MANY + 22,
                heat=1.0,
                tiers={"host": MANY + 20},
            ),
        ),
    )


@pytest.mark.parametrize("width", [*WIDTHS, 119, 120, 150])
def test_top_shows_all_numbers(width: int) -> None:
    text = " ".join(drawn(page(view(), "/run/kvbm/manager.sock", width), width).split())
    rest = text.replace(f"…{ENGINE.engine[-15:]}", "").replace(f"…{ENGINE.model[-27:]}", "")
    assert "…" not in rest, "of names alone"
    shown = [0, 1, 2, 10, 11, 14, 15, 20, 21, 22]
    for number in shown:
        assert f"{MANY + number:,}" in text
    gigabytes = [f"{111123.0 * place:.3f} GB/s" for place in (1, 2, 3, 4)]
    for number in (*gigabytes, "1,234,567.8 ms", "1,234,568", "987 TB", "123456.7"):
        assert number in text


def test_no_other_module_makes_tables() -> None:
    root = Path(kvbm.__file__).parent
    makers = [str(file.relative_to(root)) for file in root.rglob("*.py") if "rich.table" in file.read_text()]
    assert makers == ["present/tables.py"]
