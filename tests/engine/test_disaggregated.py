"""Prefill and decode apart: the texts are those of one worker that computes all, whatever dies in between.

All workers have one thread, so that all round alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvbm.demo.client import Client
from kvbm.demo.counters import read, total
from kvbm.demo.server import free_port
from kvbm.testing.tiny_model import make_model
from rigs.disaggregated import (
    BLOCK_TOKENS,
    HOST_GB,
    NIXL,
    RECOMPUTE,
    SharedManager,
    Worker,
    alone,
    answered,
    both,
    decode,
    needs_nixl,
    prefill,
)

pytestmark = [needs_nixl, pytest.mark.timeout(600)]

PROMPTS, PROMPT_TOKENS, LONG_ANSWER_TOKENS = 6, 400, 40


def prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 400) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Form(NamedTuple):
    """How a pair is joined: with a private manager behind the prefill worker, or one that both workers share."""

    connector: str
    shared: bool


class Pair:
    """A prefill worker with a cache, and a decode worker, which has the same one where it is shared."""

    def __init__(self, directory: Path, form: Form) -> None:
        self._directory = directory
        self._model = make_model(directory / "model", "tiny", "float32")
        self._connector = form.connector
        self._metrics_port = free_port()
        self.manager = SharedManager(directory, self._metrics_port) if form.shared else None
        self.prefiller, self.decoder = self.new_prefiller(), self.new_decoder()

    def new_prefiller(self) -> Worker:
        return Worker(self._model, self._directory, both(self._connector), self._variables())

    def new_decoder(self) -> Worker:
        transfer = both(self._connector) if self.manager is not None else NIXL | RECOMPUTE
        return Worker(self._model, self._directory, transfer, self._variables())

    def _variables(self) -> dict[str, str]:
        if self.manager is not None:
            return {"DYN_KVBM_MANAGER": self.manager.socket}
        private = {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(self._metrics_port)}
        return {"DYN_KVBM_CPU_CACHE_GB": HOST_GB, **private}

    def start(self) -> None:
        """Both workers at once."""
        if self.manager is not None:
            self.manager.launch()
            self.manager.wait_until_ready()
        self.prefiller.launch()
        self.decoder.launch()
        self.prefiller.wait_until_ready()
        self.decoder.wait_until_ready()

    def stop(self) -> None:
        self.prefiller.stop()
        self.decoder.stop()
        if self.manager is not None:
            self.manager.stop()

    def kill_manager(self) -> None:
        """As a crash does; a shared one is started again, as its operator would."""
        if self.manager is None:
            self.prefiller.kill_manager()
            return
        self.manager.kill()
        self.manager.launch()
        self.manager.wait_until_ready()

    def loaded(self) -> int:
        """Blocks that the manager gave back."""
        page = Client("127.0.0.1", self._metrics_port, timeout_s=10).page()
        return total(read(page), "kvbm_onboard_blocks_h2d")


FORMS = (
    Form("PdConnector", shared=False),
    pytest.param(Form("MultiConnector", shared=True), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form.connector)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"), request.param)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


def texts_and_reference(pair: Pair, asked: list[list[int]]) -> tuple[list[str], list[str]]:
    texts = [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked]
    return texts, [alone(pair.decoder, tokens) for tokens in asked]


def test_texts_are_those_of_one_worker_and_the_second_round_is_loaded(pair: Pair) -> None:
    asked = prompts(1)
    texts, reference = texts_and_reference(pair, asked)
    assert texts == reference
    assert len(set(texts)) == PROMPTS
    pair.prefiller.forget()
    pair.decoder.forget()
    before = pair.loaded()
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == reference
    assert pair.loaded() - before == PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS)


@pytest.mark.slow
def test_the_next_turn_finds_what_the_decode_worker_computed(pair: Pair) -> None:
    if pair.manager is None:
        pytest.skip("this decode worker has no cache")
    tokens, more = prompts(7, 2)
    where = prefill(pair.prefiller, tokens)
    turn = pair.decoder.complete(
        tokens, kv_transfer_params=where, max_tokens=LONG_ANSWER_TOKENS, return_token_ids=True
    )
    longer = tokens + turn["choices"][0]["token_ids"] + more[:40]
    pair.prefiller.forget()
    before = pair.loaded()
    text = answered(pair.prefiller, pair.decoder, longer)
    # The last token's KV was never computed.
    assert pair.loaded() - before >= (PROMPT_TOKENS + LONG_ANSWER_TOKENS - 1) // BLOCK_TOKENS
    assert text == alone(pair.decoder, longer)


@pytest.mark.slow
def test_a_request_that_ends_between_the_two_harms_nobody(pair: Pair) -> None:
    left, *asked = prompts(2)
    prefill(pair.prefiller, left)
    texts, reference = texts_and_reference(pair, asked)
    assert texts == reference


@pytest.mark.slow
def test_a_killed_manager_costs_hits_alone(pair: Pair) -> None:
    asked = prompts(3)
    texts, reference = texts_and_reference(pair, asked)
    pair.kill_manager()
    pair.prefiller.forget()
    pair.decoder.forget()
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == texts == reference


@pytest.mark.slow
def test_kv_whose_place_cannot_be_reached_is_computed(pair: Pair) -> None:
    """NIXL fails: nobody listens where the prefill worker is said to be."""
    asked = prompts(9, 3)
    places = [
        prefill(pair.prefiller, tokens) | {"remote_port": free_port(), "remote_engine_id": f"nobody-{number}"}
        for number, tokens in enumerate(asked)
    ]
    texts = [decode(pair.decoder, tokens, where) for tokens, where in zip(asked, places, strict=True)]
    assert texts == [alone(pair.decoder, tokens) for tokens in asked]


@pytest.mark.slow
def test_kv_of_a_worker_that_was_killed_is_computed(pair: Pair) -> None:
    """The prefill worker is killed after its answer; a new one takes its place."""
    asked = prompts(4)
    places = [prefill(pair.prefiller, tokens) for tokens in asked]
    pair.prefiller.kill()
    texts = [decode(pair.decoder, tokens, where) for tokens, where in zip(asked, places, strict=True)]
    assert texts == [alone(pair.decoder, tokens) for tokens in asked]
    pair.prefiller = pair.new_prefiller()
    pair.prefiller.launch()
    pair.prefiller.wait_until_ready()
    more = prompts(5)
    texts, reference = texts_and_reference(pair, more)
    assert texts == reference
    assert re.search("KV cache is on", pair.prefiller.log_path.read_text())


@pytest.mark.slow
def test_a_decode_worker_that_is_killed_is_replaced(pair: Pair) -> None:
    asked = prompts(6)
    prefill(pair.prefiller, asked[0])
    pair.decoder.kill()
    pair.decoder = pair.new_decoder()
    pair.decoder.launch()
    pair.decoder.wait_until_ready()
    texts, reference = texts_and_reference(pair, asked)
    assert texts == reference
