"""Models with several kinds of layers: how large their blocks are, and which groups vLLM makes of them.

The numbers of `MODELS` are those of each model's `config.json` on the Hugging Face Hub, in 16-bit KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvbm.groups import Group, GroupKind

EVEN_OUT = 1.5
"""Where the most layers of a kind are fewer than this times the fewest, vLLM makes groups of the larger number."""


class Layers(NamedTuple):
    """The layers of one kind. `layer_bytes` is of one layer: the KV of a token, or a whole recurrent state. `tokens` is
    the length of a window or of a chunk."""

    kind: GroupKind
    number: int
    layer_bytes: int
    tokens: int = 0


class Slots(NamedTuple):
    """How a model's KV lies in the slots of a tier: a slot holds a block of one group.

    If nothing was ever left out, `everything_bytes` would be kept of each block of a trace: all layers, without the
    padding of groups that have fewer layers than others.
    """

    slot_bytes: int
    groups: tuple[Group, ...]
    everything_bytes: int


@dataclass(frozen=True, slots=True)
class HybridModel:
    """A model with layers of several kinds."""

    name: str
    layers: tuple[Layers, ...]

    def slots(self, block_tokens: int) -> Slots:
        """The groups and their slot for blocks of a trace of so many tokens, as vLLM would make them: groups of equal
        numbers of layers, and pages of one size. Where a state is larger than the KV of a block's tokens, blocks span
        several of the trace's."""
        counts = [each.number for each in self.layers]
        together = max(counts) if max(counts) < EVEN_OUT * min(counts) else min(counts)
        token_bytes = max(
            (each.layer_bytes for each in self.layers if each.kind is not GroupKind.STATE), default=0
        )
        state_bytes = max(
            (each.layer_bytes for each in self.layers if each.kind is GroupKind.STATE), default=0
        )
        span = max(1, -(-state_bytes // (token_bytes * block_tokens))) if token_bytes else 1
        groups: list[Group] = []
        for each in sorted(self.layers, key=lambda each: each.kind is not GroupKind.FULL):
            groups += [_group(each, span, span * block_tokens)] * -(-each.number // together)
        page_bytes = max(span * block_tokens * token_bytes, state_bytes)
        everything = sum(
            each.number * each.layer_bytes * (1 if each.kind is GroupKind.STATE else span * block_tokens)
            for each in self.layers
        )
        return Slots(together * page_bytes, tuple(groups), everything // span)


def _group(layers: Layers, span: int, group_tokens: int) -> Group:
    if layers.kind is GroupKind.WINDOW:
        return Group(kind=layers.kind, span=span, reach=max(1, -(-(layers.tokens - 1) // group_tokens)))
    if layers.kind is GroupKind.CHUNK:
        return Group(kind=layers.kind, span=span, reach=max(1, layers.tokens // group_tokens))
    return Group(kind=layers.kind, span=span)


def hybrid_of(name: str, config: dict[str, Any], token_bytes: int, dtype_bytes: int) -> HybridModel:
    """The model of a `config.json` whose layers are of several kinds; a token takes `token_bytes` in a layer.

    Raises KeyError, TypeError or ValueError for a config that says less, or has kinds that are not known.
    """
    kinds = layer_kinds(config)
    layers = []
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        if kind == "full_attention":
            layers.append(Layers(GroupKind.FULL, count, token_bytes))
        elif kind == "sliding_attention":
            layers.append(Layers(GroupKind.WINDOW, count, token_bytes, int(config["sliding_window"])))
        elif kind == "chunked_attention":
            layers.append(Layers(GroupKind.CHUNK, count, token_bytes, int(config["attention_chunk_size"])))
        elif kind == "linear_attention":
            layers.append(Layers(GroupKind.STATE, count, _delta_net_bytes(config, dtype_bytes)))
        else:
            raise ValueError(f"layers of an unknown kind: {kind}")
    return HybridModel(name, tuple(layers))


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """The kind of each layer, in the words of `layer_types`; empty where all are alike."""
    kinds = list(config.get("layer_types") or ())
    if not kinds and str(config.get("model_type", "")).startswith("gemma3"):
        every = int(config.get("sliding_window_pattern") or 6)  # what the model's code assumes
        count = int(config["num_hidden_layers"])
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return kinds if len(set(kinds)) > 1 else []


def _delta_net_bytes(config: dict[str, Any], dtype_bytes: int) -> int:
    """The state of one gated delta net: of its convolution and its memory, in the KV's dtype."""
    keys = int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    value_heads, value_size = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
    convolution = (2 * keys + value_heads * value_size) * (int(config["linear_conv_kernel_dim"]) - 1)
    return (convolution + value_heads * value_size * int(config["linear_key_head_dim"])) * dtype_bytes


def _attention(kind: GroupKind, count: int, kv_heads: int, head_size: int, tokens: int = 0) -> Layers:
    return Layers(kind, count, 2 * kv_heads * head_size * 2, tokens)


MODELS = {
    model.name: model
    for model in (
        # google/gemma-3-27b-it
        HybridModel(
            "gemma-3-27b",
            (_attention(GroupKind.FULL, 10, 16, 128), _attention(GroupKind.WINDOW, 52, 16, 128, 1024)),
        ),
        # google/gemma-3-12b-it
        HybridModel(
            "gemma-3-12b",
            (_attention(GroupKind.FULL, 8, 8, 256), _attention(GroupKind.WINDOW, 40, 8, 256, 1024)),
        ),
        # openai/gpt-oss-120b
        HybridModel(
            "gpt-oss-120b",
            (_attention(GroupKind.FULL, 18, 8, 64), _attention(GroupKind.WINDOW, 18, 8, 64, 128)),
        ),
        # Qwen/Qwen3-Next-80B-A3B-Instruct
        HybridModel(
            "qwen3-next-80b",
            (
                _attention(GroupKind.FULL, 12, 2, 256),
                Layers(GroupKind.STATE, 36, (8192 * 3 + 32 * 128 * 128) * 2),
            ),
        ),
    )
}
"""Models by the name that `--model` takes."""
