"""The parts of `mini_engine.py` beside KVBM: Llama and Qwen3 in plain torch over a paged KV cache, and its blocks.

Weights come from a directory as transformers saves it (`config.json`, `*.safetensors`), or are random. transformers
itself is not needed, nor any kernel: the sequences' blocks are gathered, and what follows are matrix products.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # as all of torch calls it

from kvbm import SettingsError

MEMO = Path.home() / ".cache" / "kvbm" / "weights.json"  # digests of weight files seen before


@dataclass(frozen=True, kw_only=True)
class Config:
    """The dimensions of a Llama (`qk_norm=False`) or a Qwen3. `rope_scaling`: Llama 3's, where there is one."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 4096
    qk_norm: bool = False
    tied: bool = False
    eps: float = 1e-6
    theta: float = 10_000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Read a transformers `config.json`. Raises ValueError, KeyError or OSError where it cannot be served."""
        raw = json.loads(path.read_text())
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        for name, value, known in (
            ("model_type", raw["model_type"], ("llama", "qwen3")),
            ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default", "llama3")),
            ("use_sliding_window", raw.get("use_sliding_window", False), (False,)),
            ("quantization_config", raw.get("quantization_config"), (None,)),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}; known: {', '.join(map(str, known))}")
        return cls(
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab=raw["vocab_size"],
            qk_norm=raw["model_type"] == "qwen3",
            tied=raw.get("tie_word_embeddings", False),
            eps=raw["rms_norm_eps"],
            theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
            rope_scaling=rope if rope.get("rope_type") == "llama3" else {},
        )

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight's name and shape, `[out, in]` for matrices."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)
        for layer in (f"model.layers.{i}" for i in range(self.layers)):
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{layer}.self_attn.q_proj.weight", (width, self.hidden)
            yield f"{layer}.self_attn.k_proj.weight", (kv_width, self.hidden)
            yield f"{layer}.self_attn.v_proj.weight", (kv_width, self.hidden)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, width)
            if self.qk_norm:
                yield f"{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.intermediate)


class Step(NamedTuple):
    """What one forward pass computes: R rows of each of S sequences, and where they lie in the KV cache."""

    ids: torch.Tensor  # [S, R]: tokens
    positions: torch.Tensor  # [S, R]: … and their positions in their sequence
    tables: torch.Tensor  # [S, N]: the sequences' device blocks
    rows: torch.Tensor  # [W]: the rows, of S × R, whose KV is written
    blocks: torch.Tensor  # [W]: … to these device blocks
    offsets: torch.Tensor  # [W]: … and these tokens within them
    last: torch.Tensor  # [S]: the rows, of S × R, whose logits are wanted


class Model:
    """Weights and the forward pass. `identity` names the weights by content: it goes into the namespace."""

    def __init__(self, config: Config, weights: dict[str, torch.Tensor], identity: str) -> None:
        self.config, self.weights, self.identity = config, weights, identity
        self.embedding = weights["model.embed_tokens.weight"]
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=self.embedding.device)
        self.inv_freq = config.theta ** (-steps / config.head_dim)
        if scaling := config.rope_scaling:
            low, high, old = (
                scaling[name]
                for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            )
            turns = old * self.inv_freq / (2 * torch.pi)
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            self.inv_freq = self.inv_freq * (smooth + (1 - smooth) / scaling["factor"])

    @classmethod
    def load(cls, directory: Path, device: str = "cpu", dtype: torch.dtype | None = None) -> Model:
        """Read `config.json` and `*.safetensors`; `dtype` None is the checkpoint's. Raises SettingsError."""
        # A random model has no files, and needs neither.
        from safetensors import SafetensorError, safe_open

        from kvbm.weights import changed_since, weights_digest

        begun_s = time.time()
        weights: dict[str, torch.Tensor] = {}
        try:
            config = Config.from_json(directory / "config.json")
            shapes = dict(config.shapes())
            identity = weights_digest([directory], MEMO)
            for path in sorted(directory.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118  # it is no mapping and cannot be iterated over
                        if name.removesuffix("bias").removesuffix("weight") + "weight" in shapes:
                            weights[name] = file.get_tensor(name).to(device, dtype, copy=True)
            for name, shape in shapes.items():
                if name not in weights or weights[name].shape != shape:
                    found = list(weights[name].shape) if name in weights else "missing"
                    raise ValueError(f"{name} is {found}, expected {list(shape)}")
            # The digest must be of what was loaded: KV of other weights under its name would be served as ours.
            if identity is None or changed_since([directory], begun_s):
                raise ValueError("its files changed while they were read")
            return cls(config, weights, identity)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            why = f"no {error} in config.json" if isinstance(error, KeyError) else error
            accepted = f"a Llama or Qwen3 directory, config.json and *.safetensors ({why})"
            raise SettingsError("model", str(directory), accepted) from error

    @classmethod
    def random(cls, config: Config, device: str, dtype: torch.dtype, seed: int = 0) -> Model:
        """Random weights of unit scale. The generator's device counts: CPU and CUDA draw other numbers."""
        generator = torch.Generator(device).manual_seed(seed)
        weights: dict[str, torch.Tensor] = {}
        for name, shape in config.shapes():
            weight = weights[name] = torch.ones(shape, device=device, dtype=dtype)
            if len(shape) == 2:
                weight.normal_(0.0, 1.0 if "embed" in name else shape[1] ** -0.5, generator=generator)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(2.0)  # attention becomes peaky, and the output depends on the KV that is read
        return cls(config, weights, f"random-{seed}-{torch.__version__}-{device}-{dtype}-{config}")

    def forward(
        self, kv: torch.Tensor, step: Step, before_layer: Callable[[int], None] = lambda layer: None
    ) -> torch.Tensor:
        """Logits `[S, vocab]`. Writes to and reads from `kv` `[blocks, layers, 2, tokens, KV heads, D]`.

        `before_layer` is called before each layer's KV is touched: loads that run beside can be waited for there.
        """
        angles = step.positions[..., None, None].float() * self.inv_freq
        turn = angles.cos().to(self.embedding.dtype), angles.sin().to(self.embedding.dtype)
        places = torch.arange(step.tables.shape[1] * kv.shape[3], device=kv.device)
        ahead = places > step.positions[..., None]
        x = F.embedding(step.ids, self.embedding)
        for i in range(self.config.layers):
            before_layer(i)
            name = f"model.layers.{i}"
            h = self._norm(x, f"{name}.input_layernorm")
            x = x + self._attend(f"{name}.self_attn", h, kv[:, i], step, turn, ahead)
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate = F.silu(self._linear(h, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(h, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        x = self._norm(x.flatten(0, 1)[step.last], "model.norm")
        return F.linear(x, self.weights.get("lm_head.weight", self.embedding))

    def _attend(
        self,
        name: str,
        h: torch.Tensor,  # [S, R, hidden]
        kv: torch.Tensor,  # [blocks, 2, tokens, KV heads, D], of this layer
        step: Step,
        turn: tuple[torch.Tensor, torch.Tensor],  # [S, R, 1, D / 2]
        ahead: torch.Tensor,  # [S, R, N × tokens]
    ) -> torch.Tensor:
        c, (s, r, _) = self.config, h.shape
        q, k, v = (
            self._linear(h, f"{name}.{letter}_proj").view(s, r, -1, c.head_dim) for letter in ("q", "k", "v")
        )
        if c.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = _rotate(q, *turn), _rotate(k, *turn)
        kv[:, 0][step.blocks, step.offsets] = k.flatten(0, 1)[step.rows]
        kv[:, 1][step.blocks, step.offsets] = v.flatten(0, 1)[step.rows]
        # Gather the sequences' blocks: [S, N, 2, tokens, KV heads, D] → 2 × [S, KV heads, N × tokens, D].
        keys, values = kv[step.tables].permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
        # Query heads that share a KV head become rows of one matrix: [S, KV heads, G × R, D].
        q = q.view(s, r, c.kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (q @ keys.transpose(-1, -2)).unflatten(2, (-1, r)) * c.head_dim**-0.5
        scores = scores.masked_fill(ahead[:, None, None], -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype).flatten(2, 3)
        out = (weights @ values).unflatten(2, (-1, r)).permute(0, 3, 1, 2, 4).flatten(2)
        return self._linear(out, f"{name}.o_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.eps)
        return wide.to(x.dtype) * self.weights[f"{name}.weight"]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class DeviceBlocks:
    """Device blocks and the prefix cache in them. A block without users keeps its content until it is needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._free = list(reversed(range(count)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # no users but content; used longest ago first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out."""
        return len(self._free) + len(self._idle)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix that is held; the caller becomes a user of them."""
        found = []
        for key in keys:
            if key not in self._block_of:
                break
            block = self._block_of[key]
            self._idle.pop(block, None)
            self._users[block] += 1
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int]:
        """Blocks to write to. Free ones first, then those that were used longest ago are evicted."""
        assert count <= self.available, (count, self.available)
        for _ in range(count - len(self._free)):
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Full blocks that others may use from now on. The newest of a key replaces an older one."""
        for key, block in zip(keys, blocks, strict=True):
            old = self._block_of.get(key, block)
            if old != block:
                del self._key_of[old]
                if old in self._idle:
                    del self._idle[old]
                    self._free.append(old)
            self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """The caller uses them no more. Last blocks first: a prefix is worth more than what follows it."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0 and block in self._key_of:
                self._idle[block] = None
            elif self._users[block] == 0:
                self._free.append(block)
