"""Messages and frames: whole, in order, bounded, and nothing else gets through."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm import admin_protocol
from kvbm.errors import ProtocolError
from kvbm.framing import encode
from kvbm.layout import LAYOUT_MAX, PAGE_BYTES, BlockLayout, Namespace, round_up
from kvbm.protocol import (
    Follow,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Progress,
)
from kvbm.protocol_decoding import decode_from_manager, decode_to_manager

NAMESPACE = Namespace(model="m", fields=(("weights", "a"), ("dtype", "b")))


def body(frame: bytes) -> bytes:
    return frame[4:]


def test_tags_are_unique() -> None:
    messages = [*get_args(admin_protocol.ToManager), *get_args(admin_protocol.FromManager)]
    tags = [kind.__struct_config__.tag for kind in Message.__subclasses__()]
    assert len(tags) == len(set(tags)) == len(messages)


def test_a_message_comes_back_as_it_was() -> None:
    hello = Hello(
        version=1,
        role="worker",
        engine="e",
        rank=1,
        rank_count=2,
        namespace=NAMESPACE,
        layout=BlockLayout(block_tokens=16, shard_bytes=5, shard_count=2),
    )
    assert decode_to_manager(body(encode(hello))) == hello
    reply = LookupReply(lookup=1, slots=(1, 2), generations=(2**63, 0), ready=1, sources=b"\x02\x03")
    assert decode_from_manager(body(encode(reply))) == reply


def test_each_side_takes_only_what_is_meant_for_it() -> None:
    with pytest.raises(ProtocolError):
        decode_to_manager(body(encode(Progress(lookup=1, ready=0, final=True))))
    with pytest.raises(ProtocolError):
        decode_from_manager(body(encode(Follow())))


def test_unknown_fields_of_a_later_version_are_skipped() -> None:
    raw = msgspec.msgpack.encode({"type": "lookup", "lookup": 1, "keys": b"", "colour": "blue"})
    assert decode_to_manager(raw) == Lookup(lookup=1, keys=b"")


@given(st.binary(max_size=100))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (decode_to_manager, decode_from_manager):
        outcome: object
        try:
            outcome = decode(data)
        except ProtocolError as error:
            outcome = error
        assert isinstance(outcome, Message) or "\n" not in str(outcome)


@pytest.mark.parametrize("depth", [100, 5000, 1_000_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    raw = b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("follow")
    raw += msgspec.msgpack.encode("x") + b"\x91" * depth + b"\x01"
    try:
        assert decode_to_manager(raw) == Follow()
    except ProtocolError:
        assert depth > 100


# ---- layouts and namespaces


def test_slots_are_whole_pages() -> None:
    layout = BlockLayout(block_tokens=16, shard_bytes=PAGE_BYTES + 1, shard_count=3)
    assert (layout.slot_bytes, layout.block_bytes) == (2 * PAGE_BYTES, 6 * PAGE_BYTES)
    assert [round_up(value, 4) for value in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize("field", ["block_tokens", "shard_bytes", "shard_count"])
@pytest.mark.parametrize("value", [0, -1, LAYOUT_MAX + 1])
def test_a_layout_out_of_bounds_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}"):
        BlockLayout(**{"block_tokens": 1, "shard_bytes": 1, field: value})


def test_every_part_of_a_namespace_is_in_its_fingerprint() -> None:
    variants = [
        NAMESPACE,
        Namespace(model="m", fields=(("weights", "a"), ("dtype", "c"))),
        Namespace(model="m", fields=(("weights", "a"),)),
        Namespace(model="m", fields=(("dtype", "b"), ("weights", "a"))),
        Namespace(model="m", fields=(("weights", "ad"), ("type", "b"))),
        Namespace(model="m", fields=(("weight", "sa"), ("dtype", "b"))),
        Namespace(model="m", fields=(("a", "dtype"), ("b", ""))),
    ]
    assert len({namespace.fingerprint for namespace in variants}) == len(variants)
    # The name is a label: the same weights may be served under many.
    assert Namespace(model="n", fields=NAMESPACE.fields).fingerprint == NAMESPACE.fingerprint
    assert all(len(namespace.fingerprint) == 32 for namespace in variants)
    assert NAMESPACE.fingerprint.hex().startswith(NAMESPACE.short)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(NAMESPACE), type=Namespace)
    assert again.fingerprint == NAMESPACE.fingerprint


def test_the_first_difference_is_named() -> None:
    other = Namespace(model="m", fields=(("weights", "a"), ("dtype", "c")))
    assert NAMESPACE.difference(other) == "dtype is 'c' here, 'b' there"
    assert NAMESPACE.difference(Namespace(model="n", fields=())) == "weights is None here, 'a' there"
    assert NAMESPACE.difference(NAMESPACE) == "no field differs"
    assert "more" in Namespace(model="m", fields=()).difference(Namespace(model="m", fields=(("more", "x"),)))
