"""KV events as engines publish them, read block by block."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbm.block import Tier
from kvbm.events.wire import (
    Cleared,
    Removed,
    Stored,
    WireError,
    encode,
    events_in,
    name_of,
    stored_fields,
    tier_of,
)

STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode((1.5, events, 0))


def test_a_batch_of_blocks_is_split_and_chained() -> None:
    assert list(events_in(payload(STORED))) == [
        Stored(11, 10, (1, 2), Tier.DEVICE),
        Stored(12, 11, (3, 4), Tier.DEVICE),
    ]


def test_older_vllms_publish_arrays() -> None:
    stored = ["BlockStored", [11], None, [1, 2], 2, None, "CPU"]
    removed = ["BlockRemoved", [11], "CPU"]
    assert list(events_in(payload(stored, removed, ["AllBlocksCleared"]))) == [
        Stored(11, None, (1, 2), Tier.HOST),
        Removed(11, Tier.HOST),
        Cleared(),
    ]


@pytest.mark.parametrize(
    ("published", "name"),
    [
        (7, 7),
        (-1, 2**64 - 1),
        ("42", 42),
        (bytes(24) + (9).to_bytes(8, "big"), 9),
        (b"\1" * 32, 0x0101010101010101),
    ],
)
def test_hashes_come_in_several_forms(published: object, name: int) -> None:
    assert name_of(published) == name


@pytest.mark.parametrize("published", [None, 1.5, True])
def test_what_is_no_hash_is_refused(published: object) -> None:
    with pytest.raises(TypeError, match="no block hash"):
        name_of(published)


def test_mediums_name_tiers() -> None:
    mediums = ("GPU", None, "XPU", "CPU", "cpu_pinned", "CPU_TIER1", "CPU_TIER2", "STORAGE", "DISK")
    assert [tier_of(each).name for each in mediums] == ["DEVICE"] * 3 + ["HOST"] * 3 + ["DISK"] * 3


def test_adapters_extra_keys_and_windows_are_kept() -> None:
    event = STORED | {
        "lora_name": "poet",
        "extra_keys": [None, [["image", 3]]],
        "group_idx": 2,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 128,
    }
    window = {"group_idx": 2, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    first, second = events_in(payload(event))
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.lora_name, first.group, first.more) == ("poet", 2, window)
    assert second.more == window | {"extra_keys": [[["image", 3]]]}
    assert stored_fields(second, "GPU")["extra_keys"] == [[["image", 3]]]


def test_full_attention_is_said_as_the_original_says_it() -> None:
    event = STORED | {"group_idx": 1, "kv_cache_spec_kind": "full_attention", "extra_keys": [None, None]}
    first, _ = events_in(payload(event))
    assert isinstance(first, Stored)
    assert first.more is None


@pytest.mark.parametrize(
    "event",
    [
        STORED | {"block_size": 0},
        STORED | {"token_ids": [1, 2, 3]},
        {"type": "BlockStored"},
        {"block_hashes": []},
        [],
        7,
        {"type": "BlockRemoved", "block_hashes": [None]},
    ],
)
def test_what_cannot_be_read_is_told_and_what_came_before_it_counts(event: object) -> None:
    events = events_in(payload({"type": "AllBlocksCleared"}, event))
    assert next(events) == Cleared()
    with pytest.raises(WireError, match="cannot be read"):
        list(events)


@pytest.mark.parametrize("message", [b"", b"\xc1", msgspec.msgpack.encode(3), msgspec.msgpack.encode([1.0])])
def test_what_is_no_batch_is_told(message: bytes) -> None:
    with pytest.raises(WireError):
        list(events_in(message))


def test_an_event_of_another_kind_says_nothing() -> None:
    assert list(events_in(payload({"type": "BlockUsed", "block_hashes": [1]}))) == []


def test_the_bytes_of_a_message() -> None:
    """Byte for byte what the original publishes for one block: an array of time, events and rank; events are maps."""
    fields = stored_fields(Stored(42, 7, (1, 2, 3, 4), Tier.HOST), "CPU_TIER1")
    expected = (
        b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x91\x86"
        b"\xa4type\xabBlockStored\xacblock_hashes\x91\x2a\xb1parent_block_hash\x07"
        b"\xa9token_ids\x94\x01\x02\x03\x04\xaablock_size\x04\xa6medium\xa9CPU_TIER1\x00"
    )
    assert encode(1.5, [fields]) == expected
