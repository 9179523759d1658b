"""KV events as vLLM publishes them over ZMQ and as Dynamo's router reads them.

A message has three frames: topic, sequence number (u64, big-endian) and payload. The payload is msgpack,
`[seconds, [event, …], data-parallel rank]`; an event is a map of named fields with its `type`, in older vLLMs an array
of the fields in their order with the type first. One event may carry several blocks that follow one another; here each
block is an event of its own.

Sources: `vllm.distributed.kv_events`; Dynamo's `lib/kv-router/src/zmq_wire`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbm.block import Tier
from kvbm.errors import KvbmError

SEQUENCE_BYTES = 8
_U64 = (1 << 64) - 1
_TOKEN_MAX = (1 << 32) - 1
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)
_REMOVED_FIELDS = ("block_hashes", "medium")
_FULL_ATTENTION = (None, "full_attention", "mla_attention")
_ENCODER = msgspec.msgpack.Encoder()

_TIERS = {
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
    "NETWORK": Tier.REMOTE,
    "SHARED": Tier.REMOTE,
}


class WireError(KvbmError):
    """A message in another form than the module's."""


@dataclass(frozen=True)
class Stored:
    """A block came into a tier. `name` is the engine's hash of it, `before` that of the block before it in its prompt.

    `more` are the other fields that the engine published and that a router may read (extra keys, and the kind of a
    group of layers that is not full attention).
    """

    name: int
    before: int | None
    tokens: Sequence[int]
    tier: Tier
    lora_name: str | None = None
    group: int = 0
    more: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Removed:
    """A block left a tier."""

    name: int
    tier: Tier
    group: int = 0


@dataclass(frozen=True)
class Cleared:
    """The engine holds nothing any more."""


Event = Stored | Removed | Cleared


def tier_of(medium: object) -> Tier:
    """The tier that a medium names; what is not known is taken for the device."""
    return _TIERS.get(str(medium).upper(), Tier.DEVICE)


def events_in(payload: bytes) -> Iterator[Event]:
    """The events of a message's payload, block by block. Raises WireError, after the events that can be read."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch[1]
        for event in events:
            yield from _events_of(event)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WireError(f"a KV event cannot be read: {type(error).__name__}: {error}") from error


def encode(seconds: float, events: Sequence[Mapping[str, Any]], rank: int = 0) -> bytes:
    """The payload of a message with these events; `seconds` since 1970."""
    return _ENCODER.encode((seconds, events, rank))


def stored_fields(event: Stored, medium: str | None) -> dict[str, Any]:
    """A stored block as the consolidator publishes it; fields that say nothing are left out."""
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [event.name],
        "parent_block_hash": event.before,
        "token_ids": event.tokens,
        "block_size": len(event.tokens),
    }
    if event.lora_name is not None:
        fields["lora_name"] = event.lora_name
    if medium is not None:
        fields["medium"] = medium
    fields.update(event.more or {})
    return fields


def removed_fields(name: int, medium: str | None, group: int = 0) -> dict[str, Any]:
    """A removed block as the consolidator publishes it."""
    fields: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [name]}
    if medium is not None:
        fields["medium"] = medium
    if group:
        fields["group_idx"] = group
    return fields


def cleared_fields() -> dict[str, Any]:
    """An emptied cache."""
    return {"type": "AllBlocksCleared"}


def name_of(value: object) -> int:
    """A block's hash as an unsigned number of 64 bits: engines publish numbers, signed ones too, decimal text, or the
    bytes of a longer hash, of which the last eight count (as in vLLM's `maybe_convert_block_hash`)."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, str | int) and not isinstance(value, bool):
        return int(value) & _U64
    raise TypeError(f"no block hash: {value!r}")


def _events_of(event: Any) -> Iterator[Event]:
    kind, fields = _named(event)
    if kind == "AllBlocksCleared":
        yield Cleared()
        return
    tier, group = tier_of(fields.get("medium")), fields.get("group_idx") or 0
    names = [name_of(each) for each in fields["block_hashes"]]
    if kind == "BlockRemoved":
        for name in names:
            yield Removed(name, tier, group)
    elif kind == "BlockStored":
        yield from _stored(fields, names, tier, group)


def _stored(fields: Mapping[str, Any], names: list[int], tier: Tier, group: int) -> Iterator[Stored]:
    size, tokens = int(fields["block_size"]), fields["token_ids"]
    if size <= 0 or len(tokens) < size * len(names):
        raise ValueError(f"block_size={size} for {len(tokens)} tokens of {len(names)} blocks")
    if not all(isinstance(token, int) and 0 <= token <= _TOKEN_MAX for token in tokens):
        raise ValueError(f"token_ids are numbers from 0 to {_TOKEN_MAX}")
    parent = fields.get("parent_block_hash")
    before = name_of(parent) if parent is not None else None
    kept = _kept(fields)
    extra_keys = fields.get("extra_keys") or ()
    for place, name in enumerate(names):
        more = dict(kept)
        if place < len(extra_keys) and extra_keys[place]:
            more["extra_keys"] = [extra_keys[place]]
        yield Stored(
            name,
            before,
            tuple(tokens[place * size : (place + 1) * size]),
            tier,
            fields.get("lora_name"),
            group,
            more or None,
        )
        before = name


def _kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a group of layers from one of full attention, which is what routers take blocks for."""
    kind = fields.get("kv_cache_spec_kind")
    if kind in _FULL_ATTENTION:
        return {}
    names = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _named(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, Mapping):
        return str(event["type"]), event
    kind = str(event[0])
    names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
    return kind, dict(zip(names, event[1:], strict=False))
