"""The digest of the files that vLLM loads: begun before the load, in the rank that needs it, and asked for after it.

vLLM gives connectors nothing in a rank before the weights are loaded. Executors of all kinds call `init_device` of the
rank's wrapper first, with the whole configuration, in the rank's own process: that call is watched. Where it was not
seen, all of the digest is made after the load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbm import engine_start
from kvbm.errors import SettingsError
from kvbm.settings import available_memory_bytes, load_settings, process_environment
from kvbm.strict import record_swallowed
from kvbm.vllm_integration.weight_changes import watch
from kvbm.weights import changed_since, digest_by, local_files, open_memo
from kvbm.weights_beside import WeightsBeside

log = logging.getLogger("kvbm.vllm")

UNKNOWN_WEIGHTS = "unknown-"

MEMO = "weights.json"
"""In the runtime directory."""

BEFORE_LOADING = "init_device"
"""The call of a rank's wrapper that comes before it loads weights. The rank has its number by then."""

_CONNECTOR = "DynamoConnector"

_FILE_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "pt",
    "npcache",
    "mistral",
    "sharded_state",
    "gguf",
    "bitsandbytes",
)
"""Loaders that read the model's own files. Only this engine can name the weights of another loader."""

_PAST_THE_PAGE_CACHE = frozenset({"fastsafetensors", "instanttensor", "runai_streamer"})
"""Those of them that may read past the page cache. Digests made beside such a load would read the device a second time,
while the load wants all of it."""

_beside: WeightsBeside | None = None
"""Of the engine that this process loads now, or loaded last."""


def begin_before_loading(wrapper: type) -> None:
    """Digests are begun, from now on, before wrappers of this class load weights."""
    watch(wrapper, BEFORE_LOADING, _begun_first)


def _begun_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(wrapper: Any, *arguments: Any, **more: Any) -> Any:
        try:
            begin(wrapper.vllm_config)
        except SettingsError:
            pass  # the connector reports it
        except Exception as error:  # vLLM's classes differ between releases
            record_swallowed(error)
            log.debug("no digests of weights beside the load", exc_info=True)
        return original(wrapper, *arguments, **more)

    return call


def begin(vllm_config: Any) -> None:
    """Begin to digest the weights, if this rank will be asked for the digest and they lie in files."""
    global _beside
    extra = next(_extra_configs(vllm_config.kv_transfer_config), None)
    if extra is None or not reads_the_files(vllm_config.parallel_config):
        return
    if _loader(vllm_config) in ("dummy", *_PAST_THE_PAGE_CACHE):
        return
    _, locations = _files(vllm_config)
    known = [location for location in locations if location is not None]
    if len(known) == len(locations):
        settings = load_settings(
            process_environment(), extra_config=extra.get("kvbm"), memory_bytes=available_memory_bytes()
        ).settings
        _beside = WeightsBeside(known, Path(settings.runtime_dir) / MEMO)


def reads_the_files(parallel: Any) -> bool:
    """Whether this is the rank that reads the files: they are the same for all."""
    return int(parallel.rank) % int(parallel.world_size) == 0


def weights_name(vllm_config: Any, memo_path: Path) -> str:
    """The digest of all weights that shape KV: the model's and, with one, the draft model's.

    Called when they are loaded. Where no file shows what was loaded it is a name that only this engine has.
    """
    global _beside
    if _loader(vllm_config) == "dummy":
        return f"dummy-seed-{vllm_config.model_config.seed}"
    beside, _beside = _beside, None
    names, locations = _files(vllm_config)
    known = [location for location in locations if location is not None]
    digest, young = None, None
    if len(known) == len(locations):
        begun = beside is not None and beside.memo_path == memo_path
        digest = digest_by(beside.finish() if beside and begun else open_memo(memo_path), known)
    if digest is not None:
        # Files that have not changed since this process began were loaded as they were digested, before it or after.
        young = changed_since(known, engine_start.engine_start_s())
    if digest is None or young is not None:
        log.warning(
            "weights of %s %s: its blocks are kept for this engine only",
            ", ".join(names),
            f"may have changed while they were loaded ({young})"
            if young is not None
            else "are in no local file that could be digested",
        )
        return f"{UNKNOWN_WEIGHTS}{this_start(vllm_config)}"
    return digest


def _files(vllm_config: Any) -> tuple[list[str], list[Path | None]]:
    """The names of the models whose weights shape KV, and where their files lie."""
    model = vllm_config.model_config
    models = [(getattr(model, "model_weights", "") or model.model, model.revision)]
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        models.append((draft.model, draft.revision))
    names = [name for name, _ in models]
    if _loader(vllm_config) not in _FILE_FORMATS:
        return names, [None]
    downloads = vllm_config.load_config.download_dir
    return names, [local_files(name, revision, downloads) for name, revision in models]


def _loader(vllm_config: Any) -> str:
    return str(vllm_config.load_config.load_format).rpartition(".")[2].lower()


def _extra_configs(kv_transfer: Any) -> Iterator[Mapping[str, Any]]:
    """The extra configuration of each of our connectors, one inside another connector too."""
    if kv_transfer is None:
        return
    nested = isinstance(kv_transfer, Mapping)
    name = kv_transfer.get("kv_connector") if nested else kv_transfer.kv_connector
    extra = kv_transfer.get("kv_connector_extra_config") if nested else kv_transfer.kv_connector_extra_config
    if name == _CONNECTOR:
        yield extra or {}
    for child in (extra or {}).get("connectors") or ():
        yield from _extra_configs(child)


def this_start(vllm_config: Any) -> str:
    """This start of the engine, the same on all its ranks; its name alone may be a fixed one of the user's."""
    return f"{vllm_config.kv_transfer_config.engine_id}-{vllm_config.instance_id}"
