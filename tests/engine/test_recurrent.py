"""A model with recurrent layers: what comes back from a tier is what a hit on the device gives.

vLLM computes such layers on a CPU in bfloat16 only, where a sum depends on what is computed together. So texts are
compared where both engines compute the same pieces: requests alone, with as many cached tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from engine import ahead, reach
from engine.conftest import REFERENCE_BLOCKS, ProcessOf
from engine.engine_child import Answers
from engine.engine_process import EngineProcess
from engine.hybrid_models import HybridModel
from engine.launcher import Launcher, differences
from engine.likelihoods import Likelihoods, apart, of_first_tokens
from engine.model_runners import V1, chosen
from engine.patience import wait_for_every_hit
from engine.tier_settings import disk, host
from engine.vllm_versions import VERSION, runs_gated_delta_net
from engine.workload import Request, again, random_tokens
from rigs.manager_probe import flip_bits

pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM cannot report failed loads of several groups"),
    runs_gated_delta_net,
    # Answers of the device are in the time of the test that asks for them first.
    pytest.mark.timeout(300),
]

TALKS = 24 if chosen() == V1 else 8
TALKS_OF_RANKS = 8
"""Ranks in processes of their own take their time."""
ANSWER = 8
BLOCK = 160
"""What vLLM makes of the small model: the KV of so many tokens is as large as a state."""
OPTIONS = {"dtype": "bfloat16", "max_model_len": 4096, "max_num_batched_tokens": 1024}
DEVICE_BLOCKS = 40
"""Enough for the longest request alone."""
HOST_BLOCKS = 1200
SMALL_HOST_BLOCKS = 60
"""Holds two of the longest requests: a prompt is loaded whole or not at all."""
FLIP_EVERY_BYTES = 32 * 65_536
"""Some of the blocks on disk: many prompts are still there whole."""
ROUNDING = 0.1
"""Likelihoods were seen to move by a third of it with what is computed beside; without their KV most move farther."""
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}


class OnDevice(NamedTuple):
    """Answers of an engine without us whose device never evicts, every request alone."""

    requests: list[Request]
    """Conversations, turn by turn."""
    full: list[Request]
    """The same prompts, none of which waits for another one's answer."""
    first: Answers
    """Of the requests."""
    hits: Answers
    """Of the prompts once more: all of each but its last block is there."""
    computed: Answers
    """Of the prompts when nothing is there."""
    likelihoods: Likelihoods
    """Of what follows the prompts when all is there."""


Start = Callable[..., EngineProcess]
References = Callable[[int], OnDevice]


def conversations(count: int) -> list[Request]:
    """Turns that append to long prompts, which begin alike in fours: recurrent states lie at ends of chunks only.

    No answer completes a block. vLLM would keep that block of full attention without a state, and split the next
    prompt's computation behind it, if the block was on its device: the sums of another engine would be others.
    """
    source = random.Random(3)
    begins = [random_tokens(source, tokens) for tokens in (600, 900)]
    requests, lengths = [], [0] * count
    for turn in (1, 2, 3, 4):
        for talk in range(count):
            tokens = random_tokens(
                source, source.randint(200, 900) if turn == 1 else source.randint(100, 400)
            )
            tokens = begins[talk // 4 % len(begins)] + tokens if turn == 1 else tokens
            length = lengths[talk] + len(tokens)
            if (length - 1) // BLOCK != (length + ANSWER) // BLOCK:
                tokens, length = tokens[: -2 * ANSWER], length - 2 * ANSWER
            parent = f"talk{talk}-{turn - 1}" if turn > 1 else ""
            requests.append(Request(f"talk{talk}-{turn}", tokens, ANSWER, parent))
            lengths[talk] = length + ANSWER
    return requests


def in_full(requests: list[Request], outputs: dict[str, list[int]]) -> list[Request]:
    """The same prompts, none of which waits for another one's answer."""
    said: dict[str, tuple[int, ...]] = {"": ()}
    full = []
    for request in requests:
        tokens = said[request.parent] + request.tokens
        said[request.name] = tokens + tuple(outputs[request.name])
        full.append(replace(request, tokens=tokens, parent=""))
    return full


def alone(process: EngineProcess, requests: list[Request]) -> Answers:
    return process.call(reach.run_alone, requests, 170.0, timeout_s=180.0)


def one_by_one(process: EngineProcess, requests: list[Request]) -> Answers:
    """As `alone`, and nothing is found on the device."""
    everything = Answers()
    for request in requests:
        assert process.call(reach.reset, connector=False, timeout_s=20.0)
        answers = alone(process, [request])
        everything.outputs.update(answers.outputs)
        everything.cached_tokens.update(answers.cached_tokens)
    return everything


@pytest.fixture(scope="module")
def references(process_of: ProcessOf, hybrid_model: HybridModel) -> References:
    """What is right for so many ranks; each number of them is asked once."""
    known: dict[int, OnDevice] = {}

    def reference(ranks: int) -> OnDevice:
        if ranks not in known:
            process = process_of(f"engine-{chosen()}", chosen())
            options = {"num_gpu_blocks_override": REFERENCE_BLOCKS, "tensor_parallel_size": ranks, **OPTIONS}
            process.start({"model": str(hybrid_model("recurrent")), **options}, {})
            requests = conversations(TALKS if ranks == 1 else TALKS_OF_RANKS)
            first = alone(process, requests)
            full = in_full(requests, first.outputs)
            hits = alone(process, full)
            likelihoods, _ = process.call(of_first_tokens, full, True, timeout_s=180.0)
            known[ranks] = OnDevice(requests, full, first, hits, one_by_one(process, full), likelihoods)
            process.stop()
            assert len(first.outputs) == len(requests)
        return known[ranks]

    return reference


@pytest.fixture
def start(launcher: Launcher, hybrid_model: HybridModel, references: References) -> Start:
    """Starts an engine on a device that is too small."""

    def started(environment: dict[str, str], ranks: int = 1) -> EngineProcess:
        references(ranks)  # in the same process, so before
        options = {"num_gpu_blocks_override": DEVICE_BLOCKS, "tensor_parallel_size": ranks, **OPTIONS}
        engine = launcher.start(environment, model=str(hybrid_model("recurrent")), **options)
        engine.call(wait_for_every_hit, timeout_s=20.0)
        return engine

    return started


def unlike(known: OnDevice, answers: Answers) -> tuple[list[str], int]:
    """The requests whose texts are not those of a device with as many cached tokens, and how many were compared."""
    wrong, compared = [], 0
    for name, cached in answers.cached_tokens.items():
        alike = (
            kind for kind in (known.first, known.hits, known.computed) if kind.cached_tokens[name] == cached
        )
        right = [kind.outputs[name] for kind in alike]
        compared += bool(right)
        if right and answers.outputs[name] not in right:
            wrong.append(name)
    return wrong, compared


def assert_same(known: Answers, answers: Answers) -> None:
    assert answers.cached_tokens == known.cached_tokens
    assert differences(known.outputs, answers) == []


def assert_quiet(launcher: Launcher, engine: EngineProcess) -> None:
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_one_tier(
    launcher: Launcher, start: Start, references: References, tmp_path: Path, tiers: str
) -> None:
    engine, known = start(host(HOST_BLOCKS) if tiers == "host" else disk(tmp_path)), references(1)
    assert_same(known.first, alone(engine, known.requests))
    assert_quiet(launcher, engine)
    assert launcher.metrics()[f"kvbm_onboard_blocks_{'h2d' if tiers == 'host' else 'd2d'}"] > 2 * TALKS
    if tiers == "host":
        engine.call(reach.scribble_over_slots, timeout_s=20.0)
        assert len(differences(known.hits.outputs, one_by_one(engine, known.full))) > 3 * TALKS


def test_host_that_evicts_and_disk(
    launcher: Launcher, start: Start, references: References, tmp_path: Path
) -> None:
    """States and blocks pass through a small host tier to disk, survive a restart, and are verified."""
    engine, known = start(disk(tmp_path, SMALL_HOST_BLOCKS)), references(1)
    assert_same(known.first, alone(engine, known.requests))
    assert launcher.metrics()['kvbm_evicted_blocks_total{tier="host",reason="capacity"}'] > 4 * TALKS
    assert_quiet(launcher, engine)
    launcher.stop()
    engine = start(disk(tmp_path, SMALL_HOST_BLOCKS))
    assert_same(known.hits, alone(engine, known.full))
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_d2d"] > 4 * TALKS
    assert metrics['kvbm_failures_total{tier="disk",kind="corrupt"}'] == 0
    assert_quiet(launcher, engine)
    launcher.stop()
    assert flip_bits(tmp_path, stride_bytes=FLIP_EVERY_BYTES, offset_bytes=1234) > TALKS // 2
    engine = start(disk(tmp_path, SMALL_HOST_BLOCKS))
    answers = one_by_one(engine, known.full)
    wrong, compared = unlike(known, answers)
    assert wrong == []
    assert compared > 3 * TALKS
    assert answers.cached_tokens != known.hits.cached_tokens
    assert launcher.metrics()['kvbm_failures_total{tier="disk",kind="corrupt"}'] > TALKS // 4
    assert_quiet(launcher, engine)


def assert_some_are_computed(known: OnDevice, answers: Answers) -> None:
    """Where loads fail now and then, a request has the text of a hit or of computing, and it is known of which."""
    assert unlike(known, answers) == ([], len(known.full))
    computed = sum(cached == 0 for cached in answers.cached_tokens.values())
    assert 0 < computed < len(known.full)


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_loads_that_fail(launcher: Launcher, start: Start, references: References) -> None:
    engine, known = start(host(HOST_BLOCKS)), references(1)
    assert_same(known.first, alone(engine, known.requests))
    engine.call(reach.fail_loads, 2, timeout_s=20.0)
    assert_some_are_computed(known, one_by_one(engine, known.full))
    assert launcher.metrics()['kvbm_failures_total{tier="host",kind="load"}'] > TALKS
    assert_quiet(launcher, engine)
    engine.call(reach.fail_loads, 0, timeout_s=20.0)
    assert_same(known.hits, one_by_one(engine, known.full))
    assert_quiet(launcher, engine)


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_two_ranks(launcher: Launcher, start: Start, references: References, tmp_path: Path) -> None:
    """Each has a half of every state. Where one fails at every fourth copy, the other's half is of no use."""
    engine, known = start(disk(tmp_path, SMALL_HOST_BLOCKS), ranks=2), references(2)
    assert_same(known.first, alone(engine, known.requests))
    assert_same(known.hits, one_by_one(engine, known.full))
    engine.call(reach.fail_loads_of_rank, 1, 4, timeout_s=20.0)
    assert_some_are_computed(known, one_by_one(engine, known.full))
    engine.call(reach.fail_loads_of_rank, 1, 0, timeout_s=20.0)
    assert_same(known.hits, one_by_one(engine, known.full))
    assert_quiet(launcher, engine)
    engine.call(reach.scribble_in_rank, 1, timeout_s=20.0)
    wrong = differences(known.hits.outputs, one_by_one(engine, known.full))
    assert len(wrong) > len(known.full) // 2


def crowd(full: list[Request]) -> list[Request]:
    """The prompts with longer answers, which take blocks from others, and some that are aborted on their way."""
    source = random.Random(4)
    requests = [replace(request, output_count=source.randint(ANSWER, 60)) for request in full]
    for i in range(TALKS // 2):
        tokens = full[4 * i].tokens[:700] + random_tokens(source, source.randint(100, 1500))
        requests.insert(7 * i, Request(f"abort{i}", tokens, 40, abort_after=2 * i))
    return requests


def too_far_apart(known: OnDevice, engine: EngineProcess) -> list[str]:
    """The requests of which the engine, with nothing on its device, says otherwise than the device that never evicts
    what comes next; it must find as much."""
    given, cached_tokens = engine.call(of_first_tokens, known.full, False, timeout_s=180.0)
    assert cached_tokens == known.hits.cached_tokens
    return [name for name, right in known.likelihoods.items() if apart(given[name], right) > ROUNDING]


@pytest.fixture(params=["in turn", "ahead"])
def crowded(request: pytest.FixtureRequest, launcher: Launcher, references: References) -> Iterator[Launcher]:
    """Its engines plan a step when the last one's tokens are known, or before."""
    references(1)
    with ahead.scheduling_ahead(launcher.process) if request.param == "ahead" else nullcontext():
        yield launcher


def test_many_at_once(crowded: Launcher, start: Start, references: References) -> None:
    """What they store under preemption, beside aborted requests and loads, is asked for alone afterwards.

    It was computed in other company than what it is compared with, so that some texts may differ by rounding.
    """
    engine, known = start(host(HOST_BLOCKS)), references(1)
    for turn in ("", "+"):
        requests = again(crowd(known.full), turn)
        answers = engine.run(requests)
        assert answers.preempted > 0
        assert answers.failed == set()
        assert {name: len(answer) for name, answer in answers.outputs.items()} == {
            request.name: request.output_count for request in requests if request.abort_after is None
        }
        assert_quiet(crowded, engine)
    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    engine.call(reach.gate_loads, timeout_s=20.0)
    assert engine.call(reach.abort_while_loading, again(known.full[:8], "!"), False, timeout_s=60.0) > 0
    engine.call(reach.open_gate, timeout_s=20.0)
    engine.call(reach.step_idle, 20, timeout_s=20.0)
    assert_quiet(crowded, engine)
    assert too_far_apart(known, engine) == []
    assert_quiet(crowded, engine)
    engine.call(reach.scribble_over_slots, timeout_s=20.0)
    assert len(too_far_apart(known, engine)) > 3 * TALKS
