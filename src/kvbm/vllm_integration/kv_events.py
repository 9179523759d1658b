"""vLLM's KV events for what our tiers hold, in vLLM's own form, and what they need to know of a request.

vLLM publishes them beside its own events of the device (`kv_events_config`). A wrong form makes routers drop the
whole batch: hashes must be made as vLLM makes its own (`maybe_convert_block_hash`), and a stored block needs its tokens
and the block before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from kvbm.events.tier_form import MEDIUMS
from kvbm.hashing import split_keys
from kvbm.leader.announced import TierEvent
from kvbm.leader.tracked import NOTHING_SAID, Said, Says
from kvbm.protocol import StoredRun


def events_wanted(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and getattr(config, "enable_kv_cache_events", False))


def says_of(request: Any, block_tokens: int, wanted: Callable[[], bool]) -> Says:
    """What is said of a request's blocks, when they are stored and `wanted` says so."""
    return partial(_said, request, block_tokens, wanted)


def _said(request: Any, block_tokens: int, wanted: Callable[[], bool], start: int, end: int) -> Said:
    if not wanted():
        return NOTHING_SAID
    tokens = array("I", request.all_token_ids[start * block_tokens : end * block_tokens])
    assert tokens.itemsize == 4
    plain = (
        request.lora_request is None and not request.mm_features and not getattr(request, "cache_salt", None)
    )
    if plain and getattr(request, "prompt_embeds", None) is None:
        return Said(tokens.tobytes())
    return Said(
        tokens.tobytes(), facts=tuple(_facts(request, block_tokens, block) for block in range(start, end))
    )


def _facts(request: Any, block_tokens: int, block: int) -> bytes:
    """The adapter and the extra keys of a block, as vLLM's own events have them."""
    from vllm.v1.core import kv_cache_utils

    extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(
        request, block * block_tokens, (block + 1) * block_tokens, 0
    )
    published = getattr(kv_cache_utils, "to_event_extra_keys", list)([extra_keys])
    lora = request.lora_request
    named = (lora.adapter_id, lora.name) if lora is not None else (None, None)
    return msgspec.msgpack.encode((*named, published[0] if published else None))


class EventForm:
    """Makes vLLM's events of ours. `group` is vLLM's number of the group whose blocks they are, `spec` its kind."""

    def __init__(self, block_tokens: int, group: int, spec: Any) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._stored, self._removed, self._named = BlockStored, BlockRemoved, maybe_convert_block_hash
        self._block_tokens = block_tokens
        facts = {"group_idx": group, "kv_cache_spec_kind": _kind(spec)}
        self._of_stored = {name: facts[name] for name in facts if name in BlockStored.__struct_fields__}
        self._of_removed = {name: facts[name] for name in facts if name in BlockRemoved.__struct_fields__}
        self._has_extra_keys = "extra_keys" in BlockStored.__struct_fields__

    def __call__(self, events: Iterable[TierEvent]) -> list[Any]:
        """One event of vLLM for each of ours."""
        return [self._made(event) for event in events]

    def _made(self, event: TierEvent) -> Any:
        hashes = [self._named(each) for each in split_keys(event.hashes)]
        medium = MEDIUMS[event.tier]
        if not isinstance(event, StoredRun):
            return self._removed(block_hashes=hashes, medium=medium, **self._of_removed)
        tokens = array("I")
        tokens.frombytes(event.tokens)
        facts = [msgspec.msgpack.decode(each) if each else (None, None, None) for each in event.facts]
        lora_id, lora_name, _ = facts[0] if facts else (None, None, None)
        more: dict[str, Any] = dict(self._of_stored)
        if self._has_extra_keys:
            more["extra_keys"] = [_as_published(each[2]) for each in facts] if facts else [None] * len(hashes)
        return self._stored(
            block_hashes=hashes,
            parent_block_hash=self._named(event.before) if event.before else None,
            token_ids=tokens.tolist(),
            block_size=self._block_tokens,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            **more,
        )


def _as_published(extra_keys: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Lists were tuples before they travelled."""
    if extra_keys is None:
        return None
    return tuple(tuple(each) if isinstance(each, list) else each for each in extra_keys)


def _kind(spec: Any) -> str | None:
    try:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
    except ImportError:  # older vLLMs do not say the kind
        return None
    return str(get_kv_cache_spec_kind(spec).value)
