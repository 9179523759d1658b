"""vLLM's KV events of what tiers hold, as maps of their fields, made without vLLM: what a manager publishes.

The fields are those that vLLM's publisher encodes (`vllm.distributed.kv_events`), also those that are empty. What the
manager does not know, the number and kind of an engine's group of layers, is left out, as vLLM leaves out what is None:
routers take such blocks for those of full attention, and only such blocks are told of.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from kvbm.block import Tier
from kvbm.events.wire import name_of
from kvbm.hashing import split_keys
from kvbm.protocol import RemovedBlocks, StoredRun, TierEvents

MEDIUMS = {int(Tier.HOST): "CPU", int(Tier.DISK): "STORAGE", int(Tier.REMOTE): "EXTERNAL"}
"""vLLM's own names (`vllm.distributed.kv_events`), which Dynamo's router knows; it has none for what lies beyond the
node, for which SGLang says EXTERNAL."""
TOKEN_BYTES = 4

_Facts = tuple[int | None, str | None, list[Any] | None]
_PLAIN: _Facts = (None, None, None)
_FACTS = msgspec.msgpack.Decoder(_Facts)


def tier_fields(told: TierEvents) -> list[dict[str, Any]]:
    """One event for each run, in order. A run of which an engine said nonsense is left out: nobody could find it."""
    events = [_removed(gone) for gone in told.removed]
    for run in told.stored:
        try:
            events.append(_stored(run))
        except (msgspec.DecodeError, ValueError):
            continue
    return events


def _removed(gone: RemovedBlocks) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [name_of(each) for each in split_keys(gone.hashes)],
        "medium": MEDIUMS[gone.tier],
    }


def _stored(run: StoredRun) -> dict[str, Any]:
    """Raises ValueError or msgspec.DecodeError for what no engine of ours says."""
    names = [name_of(each) for each in split_keys(run.hashes)]
    tokens = array("I")
    tokens.frombytes(run.tokens)
    facts = [_FACTS.decode(each) if each else _PLAIN for each in run.facts] or [_PLAIN] * len(names)
    lora_id, lora_name, _ = facts[0]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": name_of(run.before) if run.before else None,
        "token_ids": tokens.tolist(),
        "block_size": len(tokens) // len(names),
        "lora_id": lora_id,
        "medium": MEDIUMS[run.tier],
        "lora_name": lora_name,
        "extra_keys": [extra_keys for _, _, extra_keys in facts],
    }
