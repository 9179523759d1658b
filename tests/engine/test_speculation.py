"""Speculative decoding: the text of an engine that never evicts and never guesses, and hits that count in full."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine import reach, speculation
from engine.draft_models import make_draft_model, make_eagle, make_eagle3
from engine.engine_process import EngineProcess
from engine.launcher import Launcher, differences
from engine.model_runners import V1, chosen
from engine.tier_settings import disk, host
from engine.vllm_versions import VERSION
from engine.workload import BLOCK_TOKENS, Request, again, random_tokens, workload

pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="older releases do not guess on a CPU"),
    pytest.mark.skipif(chosen() != V1, reason="V2 guesses in kernels that take too long to interpret"),
    pytest.mark.timeout(300),  # n-gram guessing is compiled when it is first used
]

NOTHING = {"requests": 0, "lookups": 0, "stores": 0}
DEVICE_BLOCKS = {"eagle3": 100}
"""Where the draft's layer has a group of its own, a request needs blocks for two groups."""
PROMPT_TOKENS = 10 * BLOCK_TOKENS + 11

Guessing = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def guessing(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Guessing:
    """The `speculative_config` of each kind; its draft model is made once."""
    made: dict[str, dict[str, Any]] = {}
    make: dict[str, Callable[[Path], Path]] = {
        "eagle": lambda directory: make_eagle(directory, model, kv_heads=4),
        "eagle3": lambda directory: make_eagle3(directory, model, window=96),
        "draft_model": lambda directory: make_draft_model(directory, model, noise=0.02),
    }

    def config(kind: str) -> dict[str, Any]:
        if kind not in made:
            made[kind] = {"method": kind, "num_speculative_tokens": 3}
            if kind == "ngram":
                made[kind] |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            else:
                made[kind]["model"] = str(make[kind](tmp_path_factory.mktemp(kind) / "draft"))
        return made[kind]

    return config


@pytest.fixture
def start(launcher: Launcher, reference: dict[str, list[int]], guessing: Guessing) -> Callable[..., Any]:
    """Starts an engine that guesses, on a device that is too small; the reference is there before."""

    def started(kind: str, environment: dict[str, str]) -> EngineProcess:
        launcher.process.call(speculation.let_vllm_pass_by_llvmlite, timeout_s=30.0)
        blocks = {"num_gpu_blocks_override": DEVICE_BLOCKS[kind]} if kind in DEVICE_BLOCKS else {}
        return launcher.start(environment, speculative_config=guessing(kind), **blocks)

    return started


@pytest.mark.parametrize(
    "kind",
    ["ngram", "eagle3", "eagle", "draft_model"],
)
def test_text_is_that_of_an_engine_that_never_guesses(
    launcher: Launcher, start: Callable[..., Any], reference: dict[str, list[int]], kind: str
) -> None:
    engine = start(kind, host(1200))
    for turn in ("", "+"):
        answers = engine.run(again(workload(), turn))
        assert len(answers.outputs) >= 96
        assert answers.preempted > 0
        assert differences(reference, answers, turn) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > 300
    assert engine.call(reach.engine_metrics, timeout_s=20.0)["vllm:spec_decode_num_drafts"] > 100
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()
    groups = {"eagle": ["FullAttentionSpec"], "eagle3": ["SlidingWindowSpec"]}
    if kind in groups:
        assert engine.call(speculation.draft_groups, timeout_s=20.0) == groups[kind]


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model"])
def test_a_small_host_and_a_disk(
    launcher: Launcher, start: Callable[..., Any], reference: dict[str, list[int]], tmp_path: Path, kind: str
) -> None:
    """Also after a restart; and loads that fail are computed again."""
    for turn in ("first", "restarted"):
        engine = start(kind, disk(tmp_path, 60))
        if turn == "restarted":
            engine.call(reach.fail_loads, 3, timeout_s=20.0)
        assert differences(reference, engine.run(workload())) == [], turn
        assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
        metrics = launcher.metrics()
        launcher.assert_nothing_held()
        launcher.stop()
    assert metrics["kvbm_onboard_blocks_d2d"] > 30
    assert metrics['kvbm_failures_total{tier="host",kind="load"}'] > 0


def _asked_twice(
    engine: EngineProcess, prompts: list[tuple[int, ...]], turn: str
) -> tuple[list[Any], list[int]]:
    """The answers and the cached tokens of prompts that are asked one after the other, with an empty device."""
    outputs, cached = [], []
    for index, tokens in enumerate(prompts):
        assert engine.call(reach.reset, connector=False, timeout_s=20.0)
        name = f"{turn}{index}"
        answers = engine.run([Request(name, tokens, 40)])
        outputs.append(answers.outputs[name])
        cached.append(answers.cached_tokens[name])
    return outputs, cached


@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_hits_count_in_full(start: Callable[..., Any], kind: str) -> None:
    """vLLM leaves out a block of a local hit where a head guesses; a load brings all of them."""
    engine = start(kind, host(1200))
    source = random.Random(5)
    prompts = [random_tokens(source, PROMPT_TOKENS) for _ in range(4)]
    first, nothing = _asked_twice(engine, prompts, "first")
    again_, cached = _asked_twice(engine, prompts, "again")
    assert nothing == [0] * 4
    assert cached == [PROMPT_TOKENS - PROMPT_TOKENS % BLOCK_TOKENS] * 4
    assert again_ == first


def test_the_draft_reads_its_own_blocks(start: Callable[..., Any]) -> None:
    """After a load as many guesses are right as after computing; with the draft's layers spoilt they are not, and the
    text is the same. The negative control: spoilt blocks of the target change it."""
    engine = start("draft_model", host(1200))
    source = random.Random(6)
    prompts = [random_tokens(source, PROMPT_TOKENS) for _ in range(6)]
    accepted, outputs = [0.0], []
    for turn, spoil in (("computed", None), ("loaded", None), ("spoilt", speculation.spoil_draft_layers)):
        if spoil is not None:
            engine.call(spoil, timeout_s=20.0)
        outputs.append(_asked_twice(engine, prompts, turn)[0])
        accepted.append(engine.call(speculation.accepted, timeout_s=20.0))
    computed, loaded, spoilt = (after - before for before, after in pairwise(accepted))
    assert computed == loaded > 50
    assert spoilt < loaded
    assert outputs[0] == outputs[1] == outputs[2]
    engine.call(reach.scribble_over_slots, timeout_s=20.0)
    assert _asked_twice(engine, prompts, "wrong")[0] != outputs[0]
