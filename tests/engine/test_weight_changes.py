"""Weights that change while the engine runs: KV of other weights is neither read nor kept under their name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine import reach, weight_swaps
from engine.engine_child import Answers
from engine.engine_process import EngineProcess
from engine.launcher import Launcher
from engine.model_configs import write_config
from engine.patience import wait_for_every_hit, wait_for_every_store
from engine.tier_settings import disk, host
from engine.workload import Request, again, random_tokens

TRANSFER = {"weight_transfer_config": {"backend": weight_swaps.BACKEND}}
PLAIN = {"transfer": None, "num_gpu_blocks_override": 1000}
HIT = 320


def prompts(count: int = 6) -> list[Request]:
    """Long prompts of their own."""
    source = random.Random(42)
    return [Request(f"p{i}", random_tokens(source, HIT + 5), 6) for i in range(count)]


def texts(answers: Answers) -> list[list[int]]:
    return [tokens for _, tokens in sorted(answers.outputs.items())]


def start(launcher: Launcher, settings: dict[str, str], **options: Any) -> EngineProcess:
    """An engine that keeps and finds everything that it may, however busy the machine is."""
    engine = launcher.start(settings, **options)
    engine.call(wait_for_every_store, timeout_s=20.0)
    engine.call(wait_for_every_hit, timeout_s=20.0)
    return engine


def answer(engine: EngineProcess, name: str) -> Answers:
    """Ask all prompts, when the device's own cache is empty."""
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    return engine.run(again(prompts(), name))


def hits(answers: Answers) -> int:
    return sum(tokens == HIT for tokens in answers.cached_tokens.values())


@pytest.fixture
def expected(launcher: Launcher) -> dict[int, list[list[int]]]:
    """The texts without a cache by number of the weights; 0 are those of the files."""
    engine = launcher.start(**PLAIN)
    found = {}
    for number in (0, 1, 2, 3):
        if number:
            engine.call(weight_swaps.swap, number, timeout_s=30.0)
        found[number] = texts(answer(engine, f"/{number}"))
    assert len({str(text) for text in found.values()}) == len(found), "the weights do not show"
    return found


def test_sleep_swap_wake(launcher: Launcher, expected: dict[int, list[list[int]]], tmp_path: Path) -> None:
    """And what is on disk still means the files' weights: an engine that starts with them hits it or computes."""
    launcher.process.call(weight_swaps.register, timeout_s=60.0)
    settings = disk(tmp_path / "cache", host_blocks=200)
    engine = start(launcher, settings, **TRANSFER)
    assert texts(engine.run(again(prompts(), "a"))) == expected[0]
    assert hits(engine.run(again(prompts(), "b"))) + hits(engine.run(again(prompts(), "b+"))) > 0
    for number in (1, 2):
        engine.call(weight_swaps.sleep, timeout_s=30.0)
        engine.call(weight_swaps.swap, number, timeout_s=30.0)
        engine.call(weight_swaps.wake, timeout_s=30.0)
        assert texts(answer(engine, f"c{number}")) == expected[number]
        before = launcher.metrics()["kvbm_onboard_blocks_h2d"]
        assert texts(engine.run(again(prompts(), f"d{number}"))) == expected[number]
        loaded = launcher.metrics()["kvbm_onboard_blocks_h2d"] - before
        assert loaded > 10, "the device holds half of it; what was computed since is kept for this engine"
    assert engine.log().count("for this engine's life only") == 1
    launcher.stop()
    later = answer(start(launcher, settings), "e")
    assert texts(later) == expected[0]
    assert hits(later) == 6, "sleep leaves on disk what means the files' weights"


def test_updates_in_a_loop(launcher: Launcher, expected: dict[int, list[list[int]]], tmp_path: Path) -> None:
    """As a trainer does it: update, then empty the device's cache, without a word to the connector."""
    launcher.process.call(weight_swaps.register, timeout_s=60.0)
    settings = disk(tmp_path / "cache", host_blocks=200)
    engine = start(launcher, settings, **TRANSFER)
    assert texts(engine.run(again(prompts(), "a"))) == expected[0]
    for number in (1, 2, 3, 1):
        engine.call(weight_swaps.update, number, timeout_s=30.0)
        for turn in ("b", "c"):
            answers = answer(engine, f"{turn}{number}")
            assert texts(answers) == expected[number]
        launcher.assert_nothing_held()
    launcher.stop()
    again_from_files = answer(start(launcher, settings), "d")
    assert texts(again_from_files) == expected[0]
    assert hits(again_from_files) == 6, "from start on an engine that may be updated keeps its blocks"


@pytest.mark.parametrize("how", [weight_swaps.update, weight_swaps.update_unseen, weight_swaps.swap])
def test_an_update_that_nobody_tells_of(
    launcher: Launcher, expected: dict[int, list[list[int]]], how: object, tmp_path: Path
) -> None:
    """No reset follows (`pause(clear_cache=False)`), the engine core never hears of it, or it is no update by name."""
    launcher.process.call(weight_swaps.register, timeout_s=60.0)
    settings = disk(tmp_path / "cache", host_blocks=200)
    engine = start(launcher, settings, **TRANSFER)
    first, second = prompts()[:3], prompts()[3:]
    engine.run(first)
    launcher.assert_nothing_held()  # an update that falls into a store drops it
    engine.call(how, 1, timeout_s=30.0)
    # What the device holds of before is vLLM's to serve; these prompts are new to it.
    assert texts(engine.run(second)) == expected[1][3:]
    launcher.stop()
    answers = answer(start(launcher, settings), "+")
    assert texts(answers) == expected[0]
    assert hits(answers) == 3, "the prompts of before the update are kept, and no others"


def test_an_update_while_requests_run_and_wait(
    launcher: Launcher, expected: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    """What runs goes on with KV of both; nothing of it is kept."""
    launcher.process.call(weight_swaps.register, timeout_s=60.0)
    settings = disk(tmp_path / "cache", host_blocks=200)
    engine = start(launcher, settings, **TRANSFER, max_num_seqs=2)
    engine.call(weight_swaps.update_between, prompts(), 1, timeout_s=180.0)
    assert texts(answer(engine, "+")) == expected[1]
    launcher.stop()
    assert texts(answer(start(launcher, settings), "-")) == expected[0]


def test_a_named_version_outlives_the_engine(
    launcher: Launcher, expected: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    """Through the resets that belong to its updates, and plain ones after them."""
    launcher.process.call(weight_swaps.register, timeout_s=60.0)
    settings = disk(tmp_path / "cache", host_blocks=200)
    for turn in range(2):
        engine = start(launcher, settings, **TRANSFER)
        answer(engine, f"0{turn}")
        for number in (1, 2):
            engine.call(weight_swaps.update, number, f"step-{number}00", timeout_s=30.0)
            answers = answer(engine, f"a{turn}{number}")
            assert texts(answers) == expected[number]
            assert hits(answers) == (6 if turn else 0)
            later = answer(engine, f"b{turn}{number}")
            assert texts(later) == expected[number]
            assert hits(later) == 6
        launcher.stop()


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_write_past_every_call_is_found_by_the_reset_that_follows(
    launcher: Launcher, expected: dict[int, list[list[int]]], tmp_path: Path, asked_before: bool
) -> None:
    """Also where it is the first thing that happens, and nothing says that weights may change."""
    settings = disk(tmp_path / "cache", host_blocks=200)
    assert texts(answer(start(launcher, settings), "a")) == expected[0]
    launcher.stop()
    engine = start(launcher, settings)
    if asked_before:
        assert texts(answer(engine, "b")) == expected[0]
    engine.call(weight_swaps.write_past_everything, 1, timeout_s=30.0)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    assert engine.call(weight_swaps.reset_device, timeout_s=30.0)
    answers = engine.run(again(prompts(), "c"))
    assert texts(answers) == expected[1]
    assert hits(answers) == 0
    launcher.stop()
    later = answer(start(launcher, settings), "d")
    assert texts(later) == expected[0]
    assert hits(later) == 6


def test_a_call_that_changes_nothing_costs_nothing(launcher: Launcher) -> None:
    engine = start(launcher, host())
    answer(engine, "a")
    engine.call(weight_swaps.look_around, timeout_s=30.0)
    assert hits(answer(engine, "b")) == 6
    assert "for this engine's life only" not in engine.log()


@pytest.mark.timeout(400)
def test_updates_of_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """Each rank samples and counts its own weights. Their shards are overwritten alike, so the texts are their own."""

    def swapped(engine: EngineProcess) -> list[list[list[int]]]:
        found = [texts(answer(engine, "a"))]
        for number in (1, 2):
            engine.call(weight_swaps.swap, number, timeout_s=60.0)
            found += [texts(answer(engine, f"b{number}"))]
        return found

    expected = swapped(launcher.start(**PLAIN, tensor_parallel_size=2))
    assert expected[0] != expected[1] != expected[2]
    engine = start(launcher, disk(tmp_path / "cache", host_blocks=200), tensor_parallel_size=2)
    assert swapped(engine) == expected
    assert engine.log().count("for this engine's life only") == 1


@pytest.mark.quick
def test_weights_of_real_size_are_compared(launcher: Launcher, tmp_path: Path) -> None:
    """Calls that change nothing keep the blocks of a model of real size; a swap of its weights does not."""
    model = write_config(tmp_path / "model", "qwen3_0_6b")
    options = {"model": str(model), "load_format": "dummy", "dtype": "bfloat16"}
    engine = start(launcher, host(blocks=20), **options)
    prompt = [Request("p", random_tokens(random.Random(7), 70), 1)]
    hit = 64

    def ask(name: str) -> int:
        assert engine.call(weight_swaps.reset_device, timeout_s=20.0)
        (tokens,) = engine.run(again(prompt, name)).cached_tokens.values()
        return tokens

    assert ask("a") == 0
    engine.call(weight_swaps.look_around, timeout_s=20.0)
    assert ask("b") == hit
    engine.call(weight_swaps.swap, 1, timeout_s=60.0)
    assert ask("c") == 0
