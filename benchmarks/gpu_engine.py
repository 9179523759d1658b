"""The mini engine on the card: are its outputs the same with and without eviction, and how soon do they begin."""

from __future__ import annotations

import random
import statistics
import tempfile
from types import ModuleType
from typing import Any

import torch

import kvbm
from gpu_beside import BLOCK_TOKENS, large_model
from gpu_rig import PREPARED_S, Trial
from gpu_rows import Result

ROUNDS = 8


def example(result: Result, what: str) -> ModuleType | None:
    """examples/mini_engine.py; None, and `what` left out, where a dependency of kvbm is missing."""
    try:
        import mini_engine
    except ImportError as error:
        result.leave_out(what, error)
        return None
    return mini_engine


def check_outputs(trial: Trial) -> None:
    """Conversations in fp32, every token computed in the same shapes: the outputs must be the same, to the token."""
    rig, result = trial.rig, trial.result
    mini = example(result, "outputs with and without eviction")
    if mini is None:
        return
    model = mini.Model.random(mini.MADE_UP, str(rig.device), torch.float32)
    for title, tiers in (
        ("host memory", {"host": "64MB"}),
        ("host memory and disk", {"host": "2MB", "disk": "128MB"}),
        ("disk alone", {"host": None, "disk": "128MB", "disk_direct": "off"}),
        (
            "disk alone, directly",
            {"host": None, "disk": "128MB", "disk_direct": "GDS" if rig.cuda else "POSIX"},
        ),
    ):
        with tempfile.TemporaryDirectory(prefix="kvbm-gpu-") as directory:
            try:
                plain, evicting, kept = mini.compare(
                    model, conversations=3, turns=2, device_blocks=40, disk_dir=directory, **tiers
                )
            except kvbm.SettingsError as error:
                if "directly" not in title:
                    raise
                result.leave_out(f"outputs with {title}", error)
                continue
        result.check("outputs with eviction", evicting.talks == plain.talks)
        result.check(f"outputs with eviction and {title}", kept.talks == plain.talks)
        came = kept.counts["blocks onboarded"]
        lost = plain.counts["blocks found on device"] - kept.counts["blocks found on device"]
        # Not all of it has to: host memory gives up what the disk, slower than this, has not taken yet.
        result.check(f"blocks that were evicted came from {title}", 0 < came <= lost)
        result.add(f"blocks that came back from {title}", came, f"of {lost}")


def time_hits(trial: Trial) -> None:
    """Long prompts that come again and again: computed, found on the device, and brought from host memory."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    mini = example(result, "first tokens with and without KVBM")
    if mini is None:
        return
    model = large_model(rig, sizes)
    rng, vocabulary = random.Random(0), range(model.config.vocab)
    prompts = [rng.choices(vocabulary, k=2 * sizes.tokens) for _ in range(4)]
    width = -(-(2 * sizes.tokens + 2) // BLOCK_TOKENS)

    turns = ROUNDS if rig.cuda else 2

    def first_tokens(engine: Any) -> tuple[float, list[list[int]]]:
        """The median of a prefill's seconds, the first round left out, and what was said in the last one."""
        taken_s, said = [], []
        for turn in range(turns):
            said = []
            for prompt in prompts:
                request, before_s = mini.Request(prompt, 2), engine.prefill_s
                engine.serve([request])
                said.append(request.output)
                if turn:
                    taken_s.append(engine.prefill_s - before_s)
            if engine.manager is not None and turn == 0:
                all_locked(engine)
        return statistics.median(taken_s), said

    computed_s, _ = first_tokens(mini.Engine(model, width, exact=False))
    holding = mini.Engine(model, len(prompts) * width, exact=False)
    on_device_s, expected = first_tokens(holding)
    engine = mini.Engine(model, width, exact=False)
    host = len(prompts) * width * engine.layout.block_bytes
    with kvbm.BlockManager(engine.layout, host=host, namespace=engine.namespace) as engine.manager:
        from_host_s, said = first_tokens(engine)
    # A device hit computes the same tail in the same shapes: in bf16, too, the bits must be the same.
    result.check("first tokens from host memory are those of a device hit", said == expected)
    blocks = (turns - 1) * len(prompts) * ((2 * sizes.tokens - 1) // BLOCK_TOKENS)
    found, came = holding.counts["blocks found on device"], engine.counts["blocks onboarded"]
    result.check(f"every prompt was found on the device ({found} of {blocks} blocks)", found == blocks)
    result.check(f"every prompt came from host memory ({came} of {blocks} blocks)", came == blocks)
    what = f"first token after {2 * sizes.tokens} tokens"
    result.add(f"{what}, computed (in plain torch)", computed_s * 1e3, "ms")
    result.add(f"{what}, found on the device", on_device_s * 1e3, "ms")
    result.add(f"{what}, from host memory", from_host_s * 1e3, "ms")
    result.add(f"{what}, faster than computed", computed_s / from_host_s, "×")


def all_locked(engine: Any) -> None:
    """Wait until host memory is page-locked: the start is not timed."""
    copier = engine.manager.backend._copiers.of(engine.kv_cache)
    if hasattr(copier, "prepared"):
        copier.prepared(PREPARED_S)
