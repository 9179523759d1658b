"""The facts that must agree before two SGLang ranks share pages, without the weights, which select a key space.

Weights may change in memory as often as a trainer likes. A namespace for each would be memory and a directory for each;
a key space costs nothing, and pages of earlier weights leave as any unused page does (decision 0031).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvbm.layout import Namespace
from kvbm.sglang_integration.versions import release
from kvbm.weights import canonical_config, changed_since, local_files, process_start_s, weights_digest

log = logging.getLogger("kvbm.sglang")

ENGINE = "sglang"
"""What the names of these engines begin with, in metrics."""

_SERVER_FACTS = (
    "context_length",
    "dtype",
    "enable_lora",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "quantization",
    "quantization_param_path",
    "torchao_config",
)
"""Arguments that shape K and V by more than rounding, as far as neither tensors nor the configuration show it."""


def page_namespace(runner: Any, pool: str, description: str, page_tokens: int, shape: str) -> Namespace:
    """The namespace of one pool's pages. `description` says how a page's bytes lie, `shape` how the model is divided
    over ranks; `runner` is SGLang's model runner of the target."""
    config, arguments = runner.model_config, runner.server_args
    served = getattr(arguments, "served_model_name", None) or getattr(arguments, "model_path", "")
    text_config = (
        config.hf_config.to_dict() if hasattr(config.hf_config, "to_dict") else vars(config.hf_config)
    )
    facts = {name: str(getattr(arguments, name, None)) for name in _SERVER_FACTS}
    fields = (
        ("engine", ENGINE),
        ("release", ".".join(release().split(".")[:3])),
        ("implementation", f"{type(runner.model).__module__}.{type(runner.model).__qualname__}"),
        ("config", hashlib.sha256(canonical_config(text_config).encode()).hexdigest()),
        ("pool", pool),
        ("page_tokens", str(page_tokens)),
        ("page_layout", description),
        ("ranks", shape),
        ("arguments", canonical_config(facts)),
    )
    return Namespace(model=os.path.basename(os.path.normpath(str(served))), fields=fields)


def describe_pages(pool: Any, cache: Mapping[str, torch.Tensor]) -> str:
    """How a page's bytes lie in its slot, in one line."""
    sizes = [str(tensor[0].numel() * tensor.element_size()) for tensor in cache.values()]
    repeated = f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(sizes)
    facts = [
        f"{name}={getattr(pool, name)}"
        for name in (
            "layout",
            "dtype",
            "layer_num",
            "head_num",
            "head_dim",
            "v_head_dim",
            "start_layer",
            "end_layer",
        )
        if getattr(pool, name, None) is not None
    ]
    return " ".join((type(pool).__name__, *facts, f"pieces={repeated}"))


def adapters_digest(server_args: Any, memo_path: Path) -> bytes:
    """Names the adapters that the server starts with: SGLang names those by their paths alone.

    Adapters that come later have a name that no other load gets. An adapter whose files cannot be read here, or changed
    after this process began, is named by chance: then nothing is shared with other starts, and one line says so.
    """
    lora_paths = getattr(server_args, "lora_paths", None)
    entries = lora_paths.values() if isinstance(lora_paths, Mapping) else lora_paths or ()
    names = [str(getattr(entry, "lora_path", entry)) for entry in entries]
    if not names:
        return b""
    paths = [path for name in names if (path := local_files(name, None, None)) is not None]
    try:
        unsure = len(paths) < len(names) or changed_since(paths, process_start_s()) is not None
        digest = weights_digest(paths, memo_path) if not unsure else None
    except OSError:
        digest = None
    if digest is None:
        log.warning(
            "files of adapters (%s) cannot be read here, or changed since this process began: its pages are for this "
            "start of the engine alone",
            ", ".join(names),
        )
    return bytes.fromhex(digest) if digest is not None else os.urandom(32)
