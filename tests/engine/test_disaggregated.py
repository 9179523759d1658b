"""Prefill and decode apart: the texts are those of one worker that computes all, whatever dies in between.

All workers have one thread, so that all round alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbm.demo.client import Client
from kvbm.demo.counters import read, total
from kvbm.demo.server import free_port
from kvbm.testing.tiny_model import make_model
from rigs.disaggregated import NIXL, RECOMPUTE, Worker, alone, answered, both, decode, needs_nixl, prefill

pytestmark = [needs_nixl, pytest.mark.timeout(600)]

PROMPTS, PROMPT_TOKENS = 6, 400


def prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 400) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Pair:
    """A prefill worker with a cache, and a decode worker. Both are started at once."""

    def __init__(self, directory: Path, connector: str, decode_caches: bool = False) -> None:
        self._directory = directory
        self._model = make_model(directory / "model", "tiny", "float32")
        self._connector = connector
        self._decode_caches = decode_caches
        self.metrics_ports = (free_port(), free_port())
        self.prefiller, self.decoder = self.new_prefiller(), self.new_decoder()

    def new_prefiller(self) -> Worker:
        return Worker(self._model, self._directory, both(self._connector), self._metrics(0))

    def new_decoder(self) -> Worker:
        transfer = both(self._connector) if self._decode_caches else NIXL | RECOMPUTE
        return Worker(self._model, self._directory, transfer, self._metrics(1))

    def _metrics(self, which: int) -> dict[str, str]:
        return {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(self.metrics_ports[which])}

    def loaded(self, which: int = 0) -> int:
        """Blocks that the manager of the prefill worker, or of the decode worker, gave back."""
        page = Client("127.0.0.1", self.metrics_ports[which], timeout_s=10).page()
        return total(read(page), "kvbm_onboard_blocks_h2d")


@pytest.fixture(scope="module", params=["PdConnector"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"), request.param)
    with ExitStack() as ends:
        ends.callback(lambda: (pair.prefiller.stop(), pair.decoder.stop()))
        pair.prefiller.launch()
        pair.decoder.launch()
        pair.prefiller.wait_until_ready()
        pair.decoder.wait_until_ready()
        yield pair


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
    assert pair.loaded() - before == PROMPTS * (PROMPT_TOKENS // 32)


def test_a_request_that_ends_between_the_two_harms_nobody(pair: Pair) -> None:
    left, *asked = prompts(2)
    prefill(pair.prefiller, left)
    texts, reference = texts_and_reference(pair, asked)
    assert texts == reference


def test_a_killed_manager_costs_hits_alone(pair: Pair) -> None:
    asked = prompts(3)
    texts, reference = texts_and_reference(pair, asked)
    pair.prefiller.kill_manager()
    pair.prefiller.forget()
    pair.decoder.forget()
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == texts == reference


def test_kv_that_cannot_be_fetched_is_computed(pair: Pair) -> None:
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


def test_a_decode_worker_that_is_killed_is_replaced(pair: Pair) -> None:
    asked = prompts(6)
    prefill(pair.prefiller, asked[0])
    pair.decoder.kill()
    pair.decoder = pair.new_decoder()
    pair.decoder.launch()
    pair.decoder.wait_until_ready()
    texts, reference = texts_and_reference(pair, asked)
    assert texts == reference
