"""The account that the consolidator keeps, against one kept with plain sets."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import Tier
from kvbm.events.merge import MEDIUMS, Merge, sequence_hash
from kvbm.events.wire import Cleared, Event, Removed, Stored

NAMES, SIZE = 6, 2
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE)


def stored(name: int, tier: Tier = Tier.DEVICE) -> Stored:
    """Blocks 1, 2, 3 … follow one another in one prompt."""
    return Stored(name, name - 1 if name > 1 else None, tuple(range(name * SIZE, (name + 1) * SIZE)), tier)


def names(events: list[dict[str, Any]]) -> list[tuple[str, int | None, str | None]]:
    return [(each["type"], *each.get("block_hashes", [None]), each.get("medium")) for each in events]


def through(merge: Merge, *events: Event) -> list[tuple[str, int | None, str | None]]:
    for event in events:
        merge.take_in(event)
    return names(merge.drain())


def test_a_block_in_every_tier_is_published_once_and_removed_last() -> None:
    merge = Merge("dedup")
    assert through(merge, *(stored(1, tier) for tier in TIERS)) == [("BlockStored", 1, None)]
    assert through(merge, Removed(1, Tier.DEVICE), Removed(1, Tier.HOST)) == []
    assert through(merge, Removed(1, Tier.DISK)) == []
    assert through(merge, Removed(1, Tier.REMOTE)) == [("BlockRemoved", 1, None)]
    assert len(merge) == 0


def test_passthrough_says_every_event_with_its_tier() -> None:
    merge = Merge("passthrough")
    assert through(
        merge, stored(1), stored(1, Tier.HOST), Removed(1, Tier.DEVICE), Removed(1, Tier.HOST)
    ) == [
        ("BlockStored", 1, "GPU"),
        ("BlockStored", 1, "CPU_TIER1"),
        ("BlockRemoved", 1, "GPU"),
        ("BlockRemoved", 1, "CPU_TIER1"),
    ]


def test_a_cleared_cache_is_told_and_nothing_of_before_it() -> None:
    merge = Merge("dedup")
    assert through(merge, stored(2), stored(1), Cleared(), stored(1)) == [
        ("AllBlocksCleared", None, None),
        ("BlockStored", 1, None),
    ]
    assert through(merge, Removed(2, Tier.DEVICE)) == []


def test_a_block_is_told_after_the_one_before_it() -> None:
    """Tiers tell of what they hold in the order in which it lies there."""
    merge = Merge("dedup")
    assert through(merge, stored(3, Tier.DISK), stored(2, Tier.DISK), stored(4, Tier.DISK)) == []
    assert through(merge, Removed(4, Tier.DISK)) == []
    assert through(merge, stored(1, Tier.DISK)) == [("BlockStored", name, None) for name in (1, 2, 3)]
    assert through(merge, Removed(1, Tier.DISK)) == [("BlockRemoved", 1, None)]
    assert names(merge.snapshot()) == [("AllBlocksCleared", None, None)], "nobody finds 2 and 3 without 1"
    assert through(merge, stored(1)) == [("BlockStored", name, None) for name in (1, 2, 3)]


def test_a_window_begins_anywhere() -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    merge = Merge("dedup")
    assert len(through(merge, Stored(8, 7, (5, 6), Tier.DEVICE, None, 1, window))) == 1


def test_adapters_with_the_same_tokens_stay_apart() -> None:
    merge = Merge("dedup")
    plain, adapted = Stored(1, None, (5, 6), Tier.DEVICE), Stored(2, None, (5, 6), Tier.DEVICE, "poet")
    assert len(through(merge, plain, adapted)) == 2
    assert through(merge, Removed(1, Tier.DEVICE)) == [("BlockRemoved", 1, None)]
    assert [each.get("lora_name") for each in merge.snapshot()] == [None, "poet"]


def test_groups_of_layers_stay_apart() -> None:
    merge = Merge("dedup")
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    of_window = Stored(1, None, (5, 6), Tier.DEVICE, None, 1, window)
    assert len(through(merge, stored(1), of_window)) == 2
    merge.take_in(Removed(1, Tier.DEVICE, 1))
    assert merge.drain() == [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1}]


def test_a_snapshot_has_every_block_after_the_one_before_it() -> None:
    merge = Merge("dedup")
    through(merge, stored(1), stored(2), stored(3), Removed(1, Tier.DEVICE), stored(1))
    assert names(merge.snapshot()) == [
        ("AllBlocksCleared", None, None),
        *(("BlockStored", name, None) for name in (1, 2, 3)),
    ]
    merge = Merge("passthrough")
    through(merge, stored(2), stored(1, Tier.DISK), stored(1))
    assert [(name, medium) for _, name, medium in names(merge.snapshot())[1:]] == [
        (1, "GPU"),
        (1, "CPU_TIER2"),
        (2, "GPU"),
    ]


def test_the_hash_of_a_sequence_is_that_of_dynamos_router() -> None:
    first = xxhash.xxh3_64_intdigest(b"\1\0\0\0\2\0\0\0", 1337)
    assert sequence_hash((1, 2), None) == first
    chained = first.to_bytes(8, "little") + sequence_hash((3, 4), None).to_bytes(8, "little")
    assert sequence_hash((3, 4), first) == xxhash.xxh3_64_intdigest(chained, 1337)


def test_the_log_has_the_lines_that_the_originals_tests_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvbm.consolidator")
    through(Merge("dedup"), stored(1), stored(1, Tier.HOST), Removed(1, Tier.DEVICE), Removed(1, Tier.HOST))
    for line in (
        r"stored in first source Vllm.*will publish STORE event",
        r"DEDUP: Block \d+ \(seq_hash=\d+\) added to source Kvbm",
        r"removed from source Vllm, still in.*Kvbm",
        r"removed from last source Kvbm.*will publish REMOVE event",
    ):
        assert re.search(line, caplog.text), line


EVENTS = st.lists(
    st.one_of(
        st.builds(stored, st.integers(1, NAMES), st.sampled_from(TIERS)),
        st.builds(Removed, st.integers(1, NAMES), st.sampled_from(TIERS)),
        st.just(Cleared()),
        st.just(None),
    ),
    max_size=40,
)


class Router:
    """As Dynamo's, which knows a block of the device only after the one before it."""

    def __init__(self) -> None:
        self.device = set[int]()
        self.below: dict[str, set[int]] = {medium: set() for medium in MEDIUMS.values()}

    def hear(self, said: list[dict[str, Any]]) -> None:
        for each in said:
            if each["type"] == "AllBlocksCleared":
                self.__init__()  # type: ignore[misc]
                continue
            (name,) = each["block_hashes"]
            known = self.below[each["medium"]] if each.get("medium") else self.device
            if each["type"] == "BlockRemoved":
                known.remove(name) if known is self.device else known.discard(name)
                continue
            if known is self.device:
                assert name not in known
                assert each["parent_block_hash"] is None or each["parent_block_hash"] in known
            known.add(name)


@given(EVENTS)
def test_a_router_believes_what_is_so(events: list[Event | None]) -> None:
    """`None` is a moment at which what has come is published."""
    held: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
    merge, passed = Merge("dedup"), Merge("passthrough")
    router, by_tier = Router(), Router()
    for event in [*events, None]:
        if isinstance(event, Stored):
            held[event.tier].add(event.name)
        elif isinstance(event, Removed):
            held[event.tier].discard(event.name)
        elif isinstance(event, Cleared):
            held = {tier: set() for tier in TIERS}
        if event is not None:
            merge.take_in(event)
            passed.take_in(event)
            continue
        router.hear(merge.drain())
        by_tier.hear(passed.drain())
        everything = set[int]().union(*held.values())
        found = {name for name in everything if everything.issuperset(range(1, name))}
        assert found <= router.device <= everything
        assert by_tier.below == {MEDIUMS[tier]: held[tier] for tier in TIERS}
    router.hear(merge.snapshot())
    assert router.device == found
    by_tier.hear(passed.snapshot())
    assert by_tier.below == {MEDIUMS[tier]: held[tier] for tier in TIERS}
