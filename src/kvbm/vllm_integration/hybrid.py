"""The KV cache groups of a model, from vLLM's configuration of them.

vLLM gives all groups one block pool and one page size: block b is page b of each tensor, for whichever group has it.
So a block of any group fills one slot, and only their keys, and which of them a prefix needs, differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvbm.grouping import Grouping
from kvbm.groups import Group, GroupKind
from kvbm.vllm_integration.block_tables import tables_of

_KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "SlidingWindowMLASpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNK,
    "MambaSpec": GroupKind.STATE,
}
SUPPORTED_SPECS = tuple(_KINDS)


class Hybrid(NamedTuple):
    """The groups of a model that has several kinds of layers, or one kind that does not need all tokens.

    `ids[i]` is vLLM's number of `groups[i]`; groups of full attention come first, because the keys of group 0 are the
    engine's own hashes. `block_tokens` is by how many tokens these are made.
    """

    block_tokens: int
    groups: tuple[Group, ...]
    ids: tuple[int, ...]

    def in_order(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """vLLM's block tables, in the order of our groups."""
        return [tables[number] for number in self.ids]

    def request_blocks(self, tokens: int) -> int:
        """How many blocks of all groups a prompt of so many tokens needs at most."""
        grouping, blocks = Grouping(self.groups), -(-tokens // self.block_tokens)
        return grouping.run_length_max(grouping.floor(blocks), 0)

    def allocated(self, blocks: Any) -> list[Sequence[int]]:
        """The same from a `KVCacheBlocks` of vLLM."""
        return self.in_order(tables_of(blocks))


def cacheable_groups(kv_cache_config: Any) -> list[tuple[int, Any]]:
    """vLLM's number and specification of each group whose blocks are named by content; others are scratch."""
    numbers = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    groups = kv_cache_config.kv_cache_groups
    numbers = range(len(groups)) if numbers is None else numbers
    return [(number, uniform_spec(groups[number])) for number in numbers]


def uniform_spec(group: Any) -> Any:
    """The specification of a group; where each layer has its own, of one kind, that of the first."""
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def hybrid_of(kv_cache_config: Any) -> Hybrid | None:
    """The groups of a model, or None where all of its layers need all tokens and share their blocks."""
    specs = cacheable_groups(kv_cache_config)
    if len(kv_cache_config.kv_cache_groups) == 1 and kind_of(specs[0][1]) is GroupKind.FULL:
        return None
    sizes = [int(spec.block_size) for _, spec in specs]
    tokens = int(getattr(kv_cache_config, "hash_block_size", None) or math.gcd(*sizes))
    named = [(number, _group(spec, tokens)) for number, spec in specs]
    named.sort(key=lambda entry: entry[1].kind is not GroupKind.FULL)
    return Hybrid(tokens, tuple(group for _, group in named), tuple(number for number, _ in named))


def kind_of(spec: Any) -> GroupKind | None:
    """What a group of this specification keeps of a prefix; None for a kind that we do not know."""
    # vLLM may have layers with a window keep all tokens: their specification is one of full attention then.
    return _KINDS.get(type(spec).__name__)


def _group(spec: Any, tokens: int) -> Group:
    kind, size = kind_of(spec), int(spec.block_size)
    assert kind is not None
    reach = 0
    if kind is GroupKind.WINDOW:
        kept = int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0))
        reach = max(1, -(-kept // size))
    elif kind is GroupKind.CHUNK:
        reach = int(spec.attention_chunk_size) // size
    return Group(kind=kind, span=size // tokens, reach=reach)
