"""Our events in vLLM's own form, as vLLM's publisher encodes them."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="events are vLLM's own classes; vllm is not installed")

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvbm.block import Tier
from kvbm.hashing import chain_keys
from kvbm.protocol import RemovedBlocks, StoredRun
from kvbm.vllm_integration.kv_events import EventForm, events_wanted, says_of

KEYS = chain_keys(bytes(32), range(400), 4)
HOST, DISK = int(Tier.HOST), int(Tier.DISK)
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)


def request(**more: Any) -> Any:
    fields = {
        "all_token_ids": list(range(100, 140)),
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
    }
    return SimpleNamespace(**{**fields, "prompt_embeds": None, "num_tokens": 40, **more})


def always() -> bool:
    return True


def test_tokens_are_said_of_the_blocks_alone() -> None:
    said = says_of(request(), 4, always)(2, 4)
    assert struct.unpack("<8I", said.tokens) == tuple(range(108, 116))
    assert said.facts == ()


def test_a_stored_run_is_one_event_with_all_that_a_router_needs() -> None:
    form = EventForm(4, 0, SPEC)
    said = says_of(request(), 4, always)(1, 3)
    (event,) = form([StoredRun(HOST, KEYS[1] + KEYS[2], KEYS[0], said.tokens)])
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [maybe_convert_block_hash(key) for key in KEYS[1:3]]
    assert all(isinstance(name, int) and name < 1 << 64 for name in event.block_hashes)
    assert event.parent_block_hash == maybe_convert_block_hash(KEYS[0])
    assert (event.token_ids, event.block_size, event.medium) == (list(range(104, 112)), 4, "CPU")
    assert (event.lora_id, event.lora_name) == (None, None)
    (first,) = form([StoredRun(DISK, KEYS[0], b"", said.tokens[:16])])
    assert (first.parent_block_hash, first.medium) == (None, "STORAGE")


def test_a_removed_block_names_its_tier() -> None:
    (event,) = EventForm(4, 0, SPEC)([RemovedBlocks(DISK, KEYS[0] + KEYS[1])])
    assert isinstance(event, BlockRemoved)
    assert (len(event.block_hashes), event.medium) == (2, "STORAGE")


def test_adapters_and_salts_travel_with_their_blocks() -> None:
    lora = LoRARequest("a", 7, "/adapters/a")
    said = says_of(request(lora_request=lora, cache_salt="pepper"), 4, always)(0, 2)
    run = StoredRun(HOST, KEYS[0] + KEYS[1], b"", said.tokens, said.facts)
    (event,) = EventForm(4, 0, SPEC)([run])
    assert (event.lora_id, event.lora_name) == (7, "a")
    published = getattr(event, "extra_keys", [("a", "pepper"), ("a",)])
    assert published == [("a", "pepper"), ("a",)]


def test_vllms_publisher_can_encode_them() -> None:
    said = says_of(request(), 4, always)(0, 2)
    events = EventForm(4, 0, SPEC)(
        [StoredRun(HOST, KEYS[0] + KEYS[1], b"", said.tokens), RemovedBlocks(HOST, KEYS[0])]
    )
    raw = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    decoded = msgspec.msgpack.Decoder(KVEventBatch).decode(raw)
    assert decoded.events == events


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (SimpleNamespace(), False),
        (SimpleNamespace(kv_events_config=None), False),
        (SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=False)), False),
        (SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True)), True),
    ],
)
def test_events_are_published_where_vllm_publishes_its_own(config: Any, wanted: bool) -> None:
    assert events_wanted(config) is wanted
