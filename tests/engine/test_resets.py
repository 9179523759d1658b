"""Resets of an engine that is busy: no load is in the way, and nothing from before them is kept or found."""

from __future__ import annotations

import random

from engine import reach, resets, weight_swaps
from engine.launcher import Launcher
from engine.tier_settings import host
from engine.workload import Request, again, random_tokens

PLAIN = {"transfer": None, "num_gpu_blocks_override": 1000}


def prompts(count: int, seed: int = 42, tokens: int = 325, answers: int = 16) -> list[Request]:
    source = random.Random(seed)
    return [Request(f"p{seed}-{i}", random_tokens(source, tokens), answers) for i in range(count)]


def test_25_resets_under_load(launcher: Launcher) -> None:
    """Pause, reset, resume, mostly while loads run; the weights change half-way."""
    asked = [*prompts(16), *again(prompts(16), "-2"), *again(prompts(16), "-3")]
    plain = launcher.start(**PLAIN)
    expected = {}
    for number in (0, 1):
        if number:
            plain.call(weight_swaps.swap, number, timeout_s=30.0)
            assert plain.call(reach.reset, connector=False, timeout_s=30.0)
        expected[number] = plain.run(again(asked, f"/{number}")).outputs
    assert len(expected[0]) == len(asked)
    engine = launcher.start({**host(), "DYN_KVBM_ONBOARD_MODE": "async"})
    engine.run(prompts(16, answers=1))
    while_loading = 0
    for number, count in ((0, 12), (1, 13)):
        run = engine.call(resets.run_with_resets, again(asked, f"/{number}"), count, number, timeout_s=180.0)
        assert run.answers.outputs == expected[number], number
        assert (run.done, run.refused) == (count, 3)
        while_loading += run.while_loading
    assert while_loading > 5
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > 50
    launcher.assert_nothing_held()
    assert "KVBM is off" not in engine.log()


def test_a_reset_that_is_refused_keeps_no_block_of_the_device(launcher: Launcher) -> None:
    """The device holds KV of other weights. A prompt that uses it is stored under no key; later it is computed."""
    fillers = prompts(4, seed=7)
    first, second = prompts(2), again(prompts(2), "-2")
    plain = launcher.start(**PLAIN)
    plain.call(weight_swaps.swap, 1, timeout_s=30.0)
    expected = plain.run(second).outputs
    engine = launcher.start(host())
    long = Request("long", random_tokens(random.Random(3), 40), 600)
    batches = [first, again(first, "+"), fillers, second]
    answers = engine.call(resets.ask_while_one_runs, long, 1, batches, timeout_s=120.0)
    assert all(answers[1].cached_tokens.values()), "the device held them"
    assert answers[3].outputs == expected
